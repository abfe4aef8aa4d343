"""Attack models of token ids: find the tokens, and place them in texts."""
