"""Run the command ``python -m flwr_leakage.simulation``."""

from flwr_leakage.simulation.command import main

if __name__ == "__main__":
    main()
