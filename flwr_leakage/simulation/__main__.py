"""``python -m flwr_leakage.simulation``, wherever the package is installed."""

from flwr_leakage.simulation.command import main

if __name__ == "__main__":
    main()
