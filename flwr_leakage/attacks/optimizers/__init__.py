"""Minimise many independent problems at once."""
