"""Print a dry run: a table of a run's work and estimated time, and what the estimate rests on."""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add

from rich.console import Console
from rich.filesize import decimal

from flwr_leakage.cli.table import make_table
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.simulation.overrides import check_overrides, spell_experiment
from flwr_leakage.simulation.price import NOT_PRICED, Price, price_runs
from flwr_leakage.simulation.work import Work

Row = tuple[str, str, str]


def dry_run(overrides: list[str], multirun: bool, console: Console) -> None:
    """Print an estimate of the work and time of a run without starting it.

    ``overrides`` are Hydra's. With ``multirun`` they make a sweep, and the estimate is for all its
    runs.

    Raises:
        ConfigError: the overrides, or the config that they make, cannot be run or estimated.
    """
    overrides = spell_experiment(overrides)
    problem = check_overrides(overrides)
    if problem:
        raise ConfigError(problem)
    print_price(price_runs(overrides, multirun), console)


def print_price(found: Sequence[tuple[Work, Price]], console: Console) -> None:
    """Print the work of all runs together, its estimated time, and what the estimate rests on.

    ``found`` holds the work and the estimated time of each run.
    """
    works, total = [work for work, _ in found], reduce(add, (price for _, price in found))
    headings = ("what", "how much", "CPU time")
    console.print(make_table(headings, rows(works, total), right=("CPU time",)))
    for line in grounds(works, total):
        console.print(line, markup=False, highlight=False)


def rows(works: Sequence[Work], total: Price) -> list[Row]:
    """Return the rows of a dry run's table.

    A row has a kind of work, how often all runs together do it, and its estimated CPU time as text.
    ``works`` has the counts of each run, ``total`` the times of all runs by kind of work.
    """

    def of(name: str) -> int:
        return sum(getattr(work, name) for work in works)

    clients = _span(work.clients for work in works)
    rounds = _span(work.rounds for work in works)
    limit, bound = "no limit", "at least about"
    if total.attacks is not None:
        limit, bound = f"≤ {duration(total.attacks)}", "about"
    disk = decimal(round(total.disk))
    jobs = [("runs", f"{len(works)}", "")] if len(works) > 1 else []
    return [
        *jobs,
        ("start", "imports, data, network", duration(total.start)),
        (
            "trainings",
            f"{of('trainings'):,} ({clients} clients, {rounds} rounds), {of('steps'):,} steps",
            duration(total.training),
        ),
        (
            "replays",
            f"{of('replays'):,} trainings again, as a check" if of("replays") else "none",
            duration(total.replays),
        ),
        (
            "scores",
            f"{of('scored'):,} samples scored, {of('ranked'):,} ranked" if of("scored") else "none",
            duration(total.scores),
        ),
        ("accuracy", f"{of('tested'):,} test images", duration(total.tests)),
        (
            "attacks",
            f"{of('updates'):,} updates"
            + (f", {of('targets'):,} with their what-ifs" if of("targets") > of("updates") else "")
            + (f", {of('self_attacks'):,} self-attacks" if of("self_attacks") else ""),
            limit,
        ),
        ("together", f"disk about {disk}", f"{bound} {duration(total.seconds)}"),
    ]


def grounds(works: Sequence[Work], total: Price) -> list[str]:
    """Return sentences on what the estimated times rest on, and on what they leave out.

    ``works`` has the counts of each run, ``total`` the times of all runs by kind of work.
    """
    limits = sorted({work.target_seconds for work in works if work.target_seconds is not None})
    told = [f"{limit:g} s" for limit in limits]
    attacks = (
        f"attacks: the most that they may take, {' or '.join(told)} of the CPU for each target "
        f"(server.attack_max_seconds)."
        if total.attacks is not None
        else "attacks: server.attack_max_seconds=null and no limit of their own; not in the sum."
    )
    return [
        "Rests on one training step, one sample's scores and one batch of test images, measured "
        "just now on this machine; " + attacks,
        f"Not in it: {NOT_PRICED}. Nothing was written.",
    ]


def duration(seconds: float) -> str:
    """Return a duration in seconds as text in suitable units.

    Example:
        >>> duration(0.04), duration(61), duration(7300)
        ('0.0 s', '1 min 1 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _span(numbers: Iterable[int]) -> str:
    values = sorted(set(numbers))
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"
