"""What the launcher samples on its node, one file per kind of sampler."""
