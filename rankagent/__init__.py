"""The agent inside each rank, where it is loaded under a private name and never imports the package's public one."""
