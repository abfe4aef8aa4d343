"""Recovering labels from an update."""
