"""Priors of images for gradient inversion."""
