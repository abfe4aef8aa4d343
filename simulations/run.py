"""Run a federated leakage audit, or an experiment of a paper, from a clone of the project.

``python simulations/run.py [group=option] [key=value] …``: ``docs/simulations.md`` is about audits,
``docs/papers.md`` about experiments.
"""

import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAPERS = FOLDER / "papers" / "conf"


def is_of_papers(arguments: Sequence[str]) -> bool:
    """Return whether ``experiment=…`` among the arguments names an experiment of a paper."""
    given = [argument.lstrip("+").partition("=") for argument in arguments]
    chosen = [value for key, _, value in given if key == "experiment"]
    patterns = [word for value in chosen for word in re.findall(r"[\w*?]+", value)]
    names = [path.stem for path in (PAPERS / "experiment").glob("*.yaml")]
    return any(fnmatch(name, pattern) for name in names for pattern in patterns)


def main() -> None:
    """Check the arguments by the configs that they are for, then run."""
    if not is_of_papers(sys.argv[1:]):
        from flwr_leakage.simulation.command import main as run_audit

        run_audit()
        return
    sys.path.insert(0, str(FOLDER.parent))  # this clone's experiments and package, as they fit
    from flwr_leakage.simulation.command import check_command

    check_command(PAPERS)
    # Imported here only: it takes seconds, which nobody should wait for to be told of a typo.
    from simulations.papers.configured import run_by_hydra

    run_by_hydra()


if __name__ == "__main__":
    main()
