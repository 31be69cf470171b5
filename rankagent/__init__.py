"""The agent inside each rank. In a rank it is loaded under a private name and never imports the package's public one."""
