"""The audit's place in Flower: client mod, server strategy, engines."""
