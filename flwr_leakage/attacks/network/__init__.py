"""Find out how any network computes: its layers and activations, as recorded in a forward pass."""
