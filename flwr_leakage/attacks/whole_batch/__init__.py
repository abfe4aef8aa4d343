"""Attacks that solve for all images of a batch, once each sample's features are known exactly."""
