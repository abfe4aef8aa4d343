"""Images of a whole batch, from every sample's features and error."""
