"""A Flower app that trains a small network on digits."""
