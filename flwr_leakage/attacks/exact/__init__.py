"""Attacks by algebra: the equations that a gradient holds, solved for the input."""
