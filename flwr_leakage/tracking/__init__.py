"""Where the numbers and images of a run are kept."""
