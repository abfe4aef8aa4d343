"""Attacks by algebra, which solve the equations that a gradient states for the input."""
