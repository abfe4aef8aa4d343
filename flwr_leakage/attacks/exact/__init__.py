"""Attacks that solve exactly the equations that a gradient gives for the network's input."""
