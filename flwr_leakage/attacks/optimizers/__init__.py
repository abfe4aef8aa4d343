"""Minimisers of many independent problems at once."""
