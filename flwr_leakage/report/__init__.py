"""The page that a person reads."""
