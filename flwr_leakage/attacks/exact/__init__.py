"""Attacks that solve the equations that a gradient states for the network's input exactly."""
