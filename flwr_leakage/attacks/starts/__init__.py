"""Where a reconstruction starts."""
