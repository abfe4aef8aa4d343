"""The attack on models of token ids: which tokens, in which order, in which texts."""
