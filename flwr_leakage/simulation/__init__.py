"""From a Hydra config to a federated audit that runs."""
