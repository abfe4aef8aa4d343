"""A Flower app with secure aggregation, whose server attacks the sum that it is shown."""
