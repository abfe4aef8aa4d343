"""Turn a Hydra config into a federated audit, and run it."""
