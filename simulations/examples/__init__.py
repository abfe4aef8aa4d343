"""Flower apps as one writes them, with the audit's line on each side."""
