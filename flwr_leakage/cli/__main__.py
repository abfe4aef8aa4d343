"""``python -m flwr_leakage.cli``, the same as ``flwr-leakage``."""

from flwr_leakage.cli.app import main

if __name__ == "__main__":
    main()
