"""Run ``flwr-leakage`` as ``python -m flwr_leakage.cli``."""

from flwr_leakage.cli.app import main

if __name__ == "__main__":
    main()
