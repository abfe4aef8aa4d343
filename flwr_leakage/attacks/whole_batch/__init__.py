"""Attacks that solve for the images of a whole batch from every sample's features and error."""
