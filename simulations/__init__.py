"""The command that runs a simulation, and the benchmarks."""
