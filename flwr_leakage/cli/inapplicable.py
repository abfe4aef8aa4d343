"""What to say where an attack could not be applied to anything."""

from pathlib import Path

from flwr_leakage.report.attempts import fates
from flwr_leakage.report.index import Index
from flwr_leakage.tracking import read_run


def suggestion(folder: Path, name: str) -> str:
    """What to try instead of an attack that gave no result at all; empty where it gave one.

    Args:
        folder: of the run.
        name: of the attack.
    """
    fate = fates(Index(read_run(folder).records))
    if fate.answered or not fate.unanswered:
        return ""
    reason = next((reason for reason in fate.unanswered.values() if reason), "")
    because = f": {reason.rstrip('.')}" if reason else ""
    other = "inverting_gradients" if name == "strongest" else "strongest"
    what = {
        "strongest": "tries every attack on this very update, and leaves out those that do not "
        "apply",
        "inverting_gradients": "searches by optimisation, and needs no special layer",
    }[other]
    return (
        f"{name} does not apply here{because}. That is no sign of safety.\n"
        f"Try `flwr-leakage attack {other}` with the same settings: it {what}. "
        f"`flwr-leakage list attack` says what each attack needs."
    )
