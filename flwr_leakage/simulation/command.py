"""The command: ``python -m flwr_leakage.simulation [group=option] [key=value] …``."""

import os
import sys

from flwr_leakage.simulation.overrides import check_overrides, spell_experiment


def main() -> None:
    """Check the overrides, then run."""
    sys.argv[1:] = spell_experiment(sys.argv[1:])
    problem = check_overrides(sys.argv[1:])
    if problem:
        sys.exit(f"error: {problem}")
    # Imported here only: it takes seconds, which nobody should wait for to be told of a typo.
    from flwr_leakage.simulation.run import run_by_hydra

    os.umask(0o077)  # Hydra makes the run folder and its log, which may tell of private data
    run_by_hydra()
