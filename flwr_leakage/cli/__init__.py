"""The command ``flwr-leakage``."""
