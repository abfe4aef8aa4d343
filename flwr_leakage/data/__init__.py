"""Datasets, partitions and the private batch of a client and round."""
