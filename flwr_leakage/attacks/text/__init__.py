"""Attack transformers on texts: find the tokens of a batch, and the texts that they form."""
