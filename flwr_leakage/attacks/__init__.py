"""Gradient inversion attacks made of parts."""
