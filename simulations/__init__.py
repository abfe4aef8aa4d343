"""From a Hydra config to a running audit: one command, two engines, the same apps."""
