"""What runs from a clone only: the command, the experiments of papers, and the benchmarks."""
