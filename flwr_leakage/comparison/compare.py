"""Compare runs that differ in some settings; runs that differ in the seed alone form a group."""

import html
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_leakage.comparison.outcome import MEASURES, SAID, Measure, Outcome, outcome
from flwr_leakage.report.index import grouped
from flwr_leakage.tracking import RunData, read_run
from flwr_leakage.tracking.jsonl import METADATA_FILE, RECORDS_FILE
from flwr_leakage.tracking.text import plain_text

if TYPE_CHECKING:
    import pandas as pd

NOT_COMPARED = (
    "seed", "run_dir", "objective", "engine", "tracker", "hydra", "server.attack_workers",
    "server.attack_cpus", "server.attack_gpus", "server.attack_retries",
    "server.attack_folder", "server.num_threads", "server.wait_seconds", "client.num_threads",
)  # fmt: skip
"""The settings that do not define a group of runs: the seed, over which a group repeats, and
settings that do not change the numbers of a run.
"""


FEW = 5
"""The number of runs below which their range is shown in place of the standard deviation, which few
runs hardly determine. The 95 % interval of the deviation of normal numbers reaches to 2.9 times its
estimate for five runs, and to 6.3 times for three (from the χ² law of the variance).
"""


MANY = 6
"""The largest number of differing settings that have a column each in the table of compared runs.
More would be wider than a page: groups are then named by their runs' folders, and the settings
stand in a second table.
"""


RUN = "run"
"""The name of the setting by which runs without a config differ, such as those of a user's own app.
Its value is the end of the path of the run's folder, as long as it takes to tell these runs apart.
"""


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, one for each seed.

    Attributes:
        settings: the values of the settings that differ between groups, as text; ``–`` where a
            group does not have a setting.
        runs: the runs of the group, in the order in which they were given.
    """

    settings: Mapping[str, str]
    runs: tuple[Outcome, ...]

    @property
    def name(self) -> str:
        """Return the group's settings as text, such as ``defense=pruning, client.batch_size=4``.

        If more than six settings differ between groups (``MANY``), the text is the names of the
        runs' folders.
        """
        if len(self.settings) > MANY:
            places = [run.folder.parts[-2:] for run in self.runs]
            # The runs of a sweep are numbered, so that the sweep's folder is part of the name.
            names = ["/".join(p) if p[-1].isdecimal() else p[-1] for p in places]
            return plain_text(", ".join(dict.fromkeys(names)))
        return ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "all runs"

    def known(self, measure: str) -> list[float]:
        """Return the values of a measure, such as ``psnr_best``, of the group's runs that have a
        value.
        """
        values = (run.values[measure] for run in self.runs)
        return [value for value in values if value is not None]

    def mean(self, measure: str) -> float | None:
        """Return the mean of a measure over the group's runs that have a value; ``None`` if none
        has.
        """
        known = self.known(measure)
        return statistics.fmean(known) if known else None

    def deviation(self, measure: str) -> float | None:
        """Return a measure's standard deviation (n − 1) over the group's runs; ``None`` below five
        runs.
        """
        known = self.known(measure)
        return statistics.stdev(known) if len(known) >= FEW else None

    def told(self, measure: Measure) -> str:
        """Return a measure's mean and spread over the runs, as text; see ``format_spread``.

        For a share of members that a membership test found, counts are summed over the runs, and
        the spread is the confidence interval of the share.
        """
        shares = [run.shares[measure.name] for run in self.runs if measure.name in run.shares]
        if shares:
            return sum(shares[1:], shares[0]).told(measure.style)
        return format_spread(self.known(measure.name), measure.style)


@dataclass(frozen=True)
class Comparison:
    """Several runs, grouped by equal settings, to be shown in one table.

    Attributes:
        settings: the names of the settings in which the runs differ.
        groups: the groups of runs with equal settings, in the order of their first runs.
        problems: sentences on folders that could not be read, and unfinished or broken runs.
    """

    settings: tuple[str, ...]
    groups: tuple[Group, ...]
    problems: tuple[str, ...]

    @property
    def runs(self) -> tuple[Outcome, ...]:
        """Return the runs of all groups, in the order of the groups."""
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def measures(self) -> tuple[str, ...]:
        """Return the names of the measures for which a run has a value, in the order of
        ``MEASURES``.
        """
        return tuple(
            m.name for m in MEASURES if any(run.values[m.name] is not None for run in self.runs)
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the headings of the columns that name a group.

        The headings are the names of the settings, or ``run`` if more than six settings differ
        (``MANY``).
        """
        return self.settings if len(self.settings) <= MANY else (RUN,)

    def to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with one row per group: settings, number of ``runs``, measures.

        Each measure has a column ``NAME_mean``. Its columns with the suffixes ``_n``, ``_low``,
        ``_high`` and ``_sd`` hold the number of runs with a value, the lowest and the highest
        value, and the standard deviation, which is missing below five runs.
        """
        import pandas as pd

        rows = []
        for group in self.groups:
            row: dict[str, Any] = {**group.settings, "runs": len(group.runs)}
            for measure in self.measures:
                row[f"{measure}_mean"] = group.mean(measure)
                row[f"{measure}_sd"] = group.deviation(measure)
                known = group.known(measure)
                row[f"{measure}_n"] = len(known)
                row[f"{measure}_low"] = min(known, default=None)
                row[f"{measure}_high"] = max(known, default=None)
            rows.append(row)
        return pd.DataFrame(rows)

    def runs_to_pandas(self) -> "pd.DataFrame":
        """Return a data frame with one row per run.

        Its columns are the settings, ``seed``, ``status``, ``folder`` and every measure.
        """
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    **group.settings,
                    "seed": run.seed,
                    **{measure: run.values[measure] for measure in self.measures},
                    "status": run.status,
                    "folder": run.place,
                }
                for group in self.groups
                for run in group.runs
            ]
        )

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return the headings of the table, and its rows of text, one for each group of runs.

        A cell holds a setting, the number of runs, or the mean and spread of a measure over seeds.
        """
        shown = [m for m in MEASURES if m.name in self.measures]
        headings = [*self.labels, "runs", *(m.heading for m in shown)]
        rows = []
        for group in self.groups:
            labels = [group.settings.get(key, group.name) for key in self.labels]
            rows.append([*labels, str(len(group.runs)), *map(group.told, shown)])
        return headings, rows

    def __str__(self) -> str:
        headings, rows = self.cells()
        lines = [headings, ["---"] * len(headings), *rows]
        return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)

    def _repr_html_(self) -> str:
        headings, rows = self.cells()
        head = "".join(f"<th>{html.escape(text)}</th>" for text in headings)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>"
            for row in rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def compare(folders: str | Path | RunData | Iterable[str | Path | RunData]) -> Comparison:
    """Return a comparison of runs; runs that differ in the seed alone form a group.

    Args:
        folders: one or several entries, each of which is a run folder, a folder of run folders such
            as Hydra's ``multirun/…``, or a run that was read already.

    Raises:
        ValueError: there is no run in any entry.
    """
    if isinstance(folders, str | Path | RunData):
        folders = [folders]
    problems: list[str] = []
    outcomes: list[Outcome] = []
    for entry in folders:
        if isinstance(entry, RunData):
            outcomes.append(outcome(entry))
            continue
        found = run_folders(Path(entry))
        if not found:
            place = plain_text(str(entry))
            problems.append(f"{place} holds no run ({RECORDS_FILE} or {METADATA_FILE}).")
        outcomes += [outcome(read_run(folder)) for folder in found]
    if not outcomes:
        raise ValueError("there must be at least one run to compare. " + " ".join(problems))
    for run in outcomes:
        if run.status != "finished":
            problems.append(f"{run.place}: {run.status}; what numbers it has are in the means.")
    keys = differing(outcomes)
    if len(outcomes) > 1 and any(map(_is_untold, outcomes)):
        keys.insert(0, RUN)  # nothing shows that these runs are repetitions of each other
    names = _names_of_folders([run.folder for run in outcomes if _is_untold(run)])
    alike = grouped((tuple(_setting(run, key, names) for key in keys), run) for run in outcomes)
    groups = tuple(
        Group(dict(zip(keys, values, strict=True)), tuple(runs)) for values, runs in alike.items()
    )
    for group in groups:
        seeds = [run.seed for run in group.runs]
        if len(set(seeds)) < len(seeds):
            problems.append(f"{group.name}: a seed occurs twice, so the spread is too small.")
    return Comparison(tuple(keys), groups, tuple(problems))


def run_folders(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run folder, and all run folders below it.

    The folders are sorted by path, with numbers in names by value, so that 2 comes before 10. The
    list is empty if there is no run folder.
    """
    if not folder.is_dir():
        return []
    found = [
        Path(held)
        for held, _, files in os.walk(folder)
        if RECORDS_FILE in files or METADATA_FILE in files
    ]
    return sorted(found, key=lambda path: [_natural(part) for part in path.parts])


def differing(runs: Sequence[Outcome]) -> list[str]:
    """Return the names of settings in which runs differ: config groups first, then single keys.

    A key of a config group counts only if it differs between runs with the same option of that
    group. Keys in ``NOT_COMPARED`` never count.
    """
    groups = [g for g in _names(run.choices for run in runs) if not g.startswith(NOT_COMPARED)]
    keys = [g for g in groups if len({run.choices.get(g) for run in runs}) > 1]
    for key in _names(run.config for run in runs):
        if key.startswith(NOT_COMPARED):
            continue
        owner = key.partition(".")[0]
        alike = grouped((run.choices.get(owner), _text(run.config.get(key))) for run in runs)
        if any(len(set(values)) > 1 for values in alike.values()):
            keys.append(key)
    return keys


def _names(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _is_untold(run: Outcome) -> bool:
    return not run.config.keys() - {SAID} and run.seed is None


def _names_of_folders(folders: Sequence[Path]) -> dict[Path, str]:
    """Return a name for each folder: the last parts of its path.

    The number of parts is the same for all folders, and the least that tells different folders
    apart.

    Example:
        >>> list(_names_of_folders([Path("/a/plain/leakage"), Path("/a/noise/leakage")]).values())
        ['plain/leakage', 'noise/leakage']
    """
    parts = {folder: folder.resolve().parts for folder in folders}
    different, length = len(set(parts.values())), 1
    while len({each[-length:] for each in parts.values()}) < different:
        length += 1
    return {folder: plain_text("/".join(each[-length:])) for folder, each in parts.items()}


def _setting(run: Outcome, key: str, names: Mapping[Path, str]) -> str:
    if key == RUN:
        return names[run.folder] if _is_untold(run) else "–"
    return _text(run.choices[key] if key in run.choices else run.config.get(key))


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else plain_text(str(value))


def _natural(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (-1, part)


def format_spread(numbers: Sequence[float], style: str) -> str:
    """Return the mean of numbers and their spread, as text.

    The spread is the standard deviation (n − 1), or for fewer than five numbers their range and
    count n. ``style`` is a number's format specification.

    Example:
        >>> format_spread([20, 21, 22, 23, 24], ".1f"), format_spread([1, 0, 1], ".0%")
        ('22.0 ± 1.6', '67% (0% to 100%, n = 3)')
        >>> format_spread([21, 21], ".1f"), format_spread([21], ".1f"), format_spread([], ".1f")
        ('21.0 (n = 2)', '21.0', '–')
    """
    if not numbers:
        return "–"
    mean = f"{statistics.fmean(numbers):{style}}"
    if len(numbers) == 1:
        return mean
    if len(numbers) < FEW:
        low, high = f"{min(numbers):{style}}", f"{max(numbers):{style}}"
        return f"{mean} ({f'{low} to {high}, ' * (low != high)}n = {len(numbers)})"
    return f"{mean} ± {statistics.stdev(numbers):{style}}"


def _cell(text: str) -> str:
    """Return a text escaped for a Markdown cell, without HTML, links, images or formulas."""
    text = re.sub(r"[\\|`$\[\]]", r"\\\g<0>", " ".join(text.split()))
    text = html.escape(text, quote=False).replace("://", ":&#47;/")
    return re.sub(r"(?i)\bwww\.", "www&#46;", text)
