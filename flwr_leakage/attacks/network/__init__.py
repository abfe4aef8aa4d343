"""How attacks read a network: its activations, the calls of a pass, and one recorded pass."""
