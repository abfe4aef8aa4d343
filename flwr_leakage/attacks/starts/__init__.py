"""The starts of reconstructions."""
