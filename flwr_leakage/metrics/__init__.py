"""Distances between reconstructions and the truth."""
