"""Run the command ``python -m flwr_leakage.simulation [group=option] [key=value] …``."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flwr_leakage._conf import conf_dir
from flwr_leakage.simulation.overrides import check_overrides, spell_experiment
from flwr_leakage.tracking.text import accept_any_text


def output_problem(arguments: Sequence[str]) -> str:
    """Return a text on why Hydra cannot make its output folder; empty if it can.

    By default the run folder lies in this folder. Hydra itself would end with a traceback. If the
    command line only asks for help or for a config, no folder is made.
    """
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("-")}
    if flags - {"-m", "--multirun"}:
        return ""
    kind, name = ("sweep", "multirun") if flags else ("run", "outputs")
    key = f"hydra.{kind}.dir"
    for argument in arguments:
        given, _, value = argument.lstrip("+").partition("=")
        if given == key:
            name = value.strip("'\"")
    plain = name.partition("${")[0]  # an interpolation in the name, such as the time, is cut off
    folder = Path(plain if plain == name else os.path.dirname(plain))  # noqa: PTH120
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{key} must name a folder that can be made, got {name}: {error.strerror}."
    return ""


def check_command(folder: Path) -> None:
    """Check this process's command line against a folder of configs; exit on an error.

    ``folder`` holds ``config.yaml`` and the config groups. After the call, files that the process
    writes are readable only by their owner.
    """
    accept_any_text()
    sys.argv[1:] = spell_experiment(sys.argv[1:])
    problem = check_overrides(sys.argv[1:], folder)
    if problem:
        sys.exit(f"error: {problem}")
    # The mask is set before Hydra makes the run folder and its log, which may reveal private data.
    os.umask(0o077)
    if problem := output_problem(sys.argv[1:]):
        sys.exit(f"error: {problem}")


def main() -> None:
    """Check the overrides on the command line, then run the audit that they describe."""
    check_command(conf_dir())
    # The import takes seconds, and so comes after the check, which reports misspelt keys at once.
    from flwr_leakage.simulation.run import run_by_hydra

    run_by_hydra()
