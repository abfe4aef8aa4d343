"""Run a federated leakage audit: ``python simulations/run.py [group=option] [key=value] …``."""

from flwr_leakage.simulation.command import main

if __name__ == "__main__":
    main()
