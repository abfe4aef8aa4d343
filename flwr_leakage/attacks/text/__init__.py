"""The attack on models of token ids, which finds the tokens and places them in texts."""
