"""Infer the labels of a batch from an update."""
