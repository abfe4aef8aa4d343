"""Read networks for attacks: activations, the calls of a pass, and recorded passes."""
