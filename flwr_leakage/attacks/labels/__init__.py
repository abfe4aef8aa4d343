"""Label attacks, which infer the labels of a batch from an update."""
