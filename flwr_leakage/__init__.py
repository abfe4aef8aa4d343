"""Gradient-leakage audits for Flower."""
