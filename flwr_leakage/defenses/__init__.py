"""Defenses of batches and updates, alone and chained."""
