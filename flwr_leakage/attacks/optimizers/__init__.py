"""Minimise many independent objectives at once, one in each row of a matrix of variables."""
