"""Compare the runs of a sweep at its end, and let the sweep go on if a run fails."""

import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from flwr_leakage.comparison import compare, outcome, write_comparison
from flwr_leakage.comparison.compare import run_folders
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.tracking import read_run
from flwr_leakage.tracking.jsonl import make_private_folder, write_private

FAILURE_FILE = "failure.txt"
PAGE_FILE = "comparison.html"


class CompareRuns(Callback):
    """A callback of Hydra that ends a sweep: it compares all runs and lists those that failed."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Write the comparison of all runs; exit with status 1 if a run failed."""
        folder = Path(config.hydra.sweep.dir)
        if run_folders(folder):
            found = compare([folder])
            page = write_comparison(found, folder / PAGE_FILE, link_reports=True)
            print(f"\n{found}\n\nComparison: {page.resolve()}")
        failed = sorted(folder.rglob(FAILURE_FILE))
        for path in failed:
            print(f"failed: {path.read_text().splitlines()[0]} ({path})", file=sys.stderr)
        if failed:
            sys.stdout.flush()
            sys.exit(1)


def fail(run_dir: str | Path, error: Exception, objective: str | Sequence[str] | None) -> Any:
    """Write the reason why a run of a sweep failed into its folder, and return NaN as the value of
    its objective.

    ``objective`` names the measure that the sweeper optimises. If it names several, the result is a
    tuple of NaN. If it is ``None``, so is the result.
    """
    folder = Path(run_dir)
    said = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    first = said.replace(os.linesep, " ")[:1000]
    details = "".join(traceback.format_exception(error))
    print(f"error in {folder}: {first}", file=sys.stderr)
    try:
        make_private_folder(folder)
        write_private(folder / FAILURE_FILE, f"{first}\n\n{details}".encode("utf-8", "replace"))
    except OSError as full:
        print(f"error: {FAILURE_FILE} could not be written: {full}", file=sys.stderr)
    return _each(objective, lambda name: math.nan)


def objective_of(run_dir: str | Path, objective: str | Sequence[str] | None) -> Any:
    """Return the value of the measure that a sweeper optimises; NaN if the run does not have it.

    ``objective`` names the measure. If it names several, the result is a tuple of values. If it is
    ``None``, so is the result.
    """
    if objective is None:
        return None
    values = outcome(read_run(run_dir)).values
    return _each(objective, lambda name: math.nan if values[name] is None else values[name])


def _each(objective: str | Sequence[str] | None, value: Any) -> Any:
    if objective is None or isinstance(objective, str):
        return None if objective is None else value(objective)
    return tuple(value(name) for name in objective)
