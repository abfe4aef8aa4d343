"""Write a run's first line, its ``run.json``, its report and the table at its end."""

import json
import shlex
import statistics
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flwr_leakage.measurements import ENDED_EARLY
from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report import write_report
from flwr_leakage.report.advice import advise
from flwr_leakage.report.attempts import attempts, tally
from flwr_leakage.report.grades import GRADES
from flwr_leakage.report.index import Index, count
from flwr_leakage.report.verdict import judge
from flwr_leakage.simulation.config import Config
from flwr_leakage.simulation.experiment import Experiment
from flwr_leakage.simulation.foreign import paths_outside
from flwr_leakage.tracking import (
    GuardedTracker,
    JsonlTracker,
    RunData,
    read_run,
    write_metadata,
)
from flwr_leakage.tracking.jsonl import METADATA_FILE, RECORDS_FILE, write_private


def headline(config: Config, experiment: Experiment, own_configs: bool = False) -> str:
    """Return a line on a run: its clients, rounds, config options and the attacker's knowledge.

    With ``own_configs`` the line also says that clients may have their own configs.
    """
    settings, choices = experiment.settings, config["choices"]
    groups = ("dataset", "model", "strategy", "defense", "attack", "engine")
    parts = [f"{settings.num_clients} clients", f"{settings.num_rounds} rounds"]
    parts += [f"{group} {choices[group]}" for group in groups if group in choices]
    if own_configs:
        parts.append("real nodes use a defense and data of their own")
    return " · ".join([*parts, f"attacker: {experiment.threat.describe()}"])


def describe(config: Config, experiment: Experiment) -> None:
    """Write ``run.json``, the description of the run, into its folder."""
    run_dir = Path(experiment.settings.run_dir)
    extra = {
        "run": run_dir.name,
        "threat": experiment.threat.describe(),
        "defenses_in_words": {name: d.in_words() for name, d in experiment.what_ifs.items()},
        # ``input_std`` has each channel's standard deviation, in units of pixels in [0, 1].
        "input_std": list(experiment.spec.std),
        **config["choices"],
    }
    write_metadata(run_dir, config=config, seed=experiment.settings.seed, extra=extra)


def describe_own_configs(config: Config, clients: Set[int]) -> None:
    """Add to ``run.json`` the ids of the clients that ran by their own configs.

    The server does not know these configs, and the defense of the run's config is not theirs. The
    clients' remarks, which are among the run's events, name their defenses.
    """
    path = Path(config["run_dir"]) / METADATA_FILE
    metadata = json.loads(path.read_bytes())
    defense = f"of the nodes' own config; the run's names {config['choices'].get('defense')}"
    metadata |= {"defense": defense, "own_config_clients": sorted(clients)}
    write_private(path, json.dumps(metadata, indent=2).encode() + b"\n")


def close_broken_run(run_dir: Path, reason: str) -> None:
    """Close the records of a run whose server process died, and write the run's report.

    ``reason`` is a text on why the process died, for the records.
    """
    if not (run_dir / RECORDS_FILE).exists() or read_run(run_dir).closed:
        return
    try:
        tracker = GuardedTracker(JsonlTracker(run_dir, resume=True), print)
        tracker.event(RunEvent(run_dir.name, 0, -1, "error", f"{ENDED_EARLY}: {reason}"))
        tracker.close()
        report = write_report(run_dir)
    except OSError as error:
        print(f"The run in {run_dir} could not be closed, though {reason}: {error}")
        return
    print(f"The run was closed, as {reason}. Report: {report}")


def finish(run_dir: Path, console: Console) -> None:
    """Write the report of a run, print its summary, and print where the report is."""
    try:
        report = write_report(run_dir)
    # An error here, such as a full disk, must not hide the error that ended the run.
    except OSError as error:
        console.print(
            f"The report could not be written ({error}). What was recorded is kept; later\n"
            f"    flwr-leakage report {run_dir.resolve()}", markup=False, soft_wrap=True
        )  # fmt: skip
        return
    run = read_run(run_dir)
    print_summary(run, console)
    if kept := len(list(run_dir.glob("kept/round*"))):
        config = run.metadata.get("config") or {}
        paths = dict.fromkeys(path for _, path in paths_outside(config, run_dir))
        allow = "".join(f" --allow {shlex.quote(path)}" for path in paths)
        console.print(
            f"The updates of {count(kept, 'round')} are kept: flwr-leakage attack-kept {run_dir}"
            f"{allow}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    console.print(f"Report: {report.resolve()}", markup=False, highlight=False, soft_wrap=True)


def summary_table(run: RunData) -> Table:
    """Return a table with a line for each round: leakage, accuracy of the model, and seconds."""
    name, style = ("token_accuracy", "{:.0%}") if run.texts else ("psnr", "{:.1f}")
    table = Table(box=None, padding=(0, 1, 0, 0))
    grades_written = ("exact", "recogn.", "partly", "nothing")
    columns = ("round", "acc.", "tries", *grades_written, "median", "best", "blind")
    for column in (*columns, "labels", "sec."):
        table.add_column(column, justify="right", no_wrap=True)
    found = attempts(Index(run.records))
    rounds = sorted({record.server_round for record in run.records if record.server_round > 0})
    for server_round in rounds:
        near = _values(run, server_round, name)
        if run.texts:  # a text without a reconstruction counts as one with no token in place
            near = [record.value or 0.0 for record in _records(run, server_round, name)]
        here = [attempt for attempt in found if attempt.key[0] == server_round]
        grades = tally(here)
        table.add_row(
            str(server_round),
            _told(_values(run, server_round, "test_accuracy"), "{:.1%}"),
            str(len(here)) if here else "–",
            *(str(grades[name]) if grades else "–" for name in GRADES),
            _told(near, style, statistics.median),
            _told(near, style, max),
            _told(_values(run, server_round, f"blind_{name}"), style, statistics.median),
            _told(_values(run, server_round, "label_accuracy"), "{:.0%}"),
            _told(_values(run, server_round, "attack_wall_seconds"), "{:.1f}"),
        )
    return table


def print_summary(run: RunData, console: Console) -> None:
    """Print the table of rounds, the answer whether training may go on, advice, and warnings."""
    measure = "tokens in place" if run.texts else "PSNR in dB"
    console.print(f"\nLeakage by round ({measure}; {run.metadata.get('threat', '')})", markup=False)
    console.print(summary_table(run))
    index = Index(run.records)
    verdict = judge(index, run.events, run.metadata)
    for sentence in (verdict.sentence, *verdict.details[:3]):
        console.print(sentence, markup=False, highlight=False)
    for line in advise(index, run.metadata, [], run.events).do:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    failures = [event for event in run.events if event.level != "info"]
    if failures:
        console.print(f"{len(failures)} warnings and errors; the report lists them.")
        for event in failures[:5]:
            text = event.message.splitlines()[0][:160]
            console.print(f"  round {event.server_round}: {text}", markup=False, highlight=False)


def _records(run: RunData, server_round: int, name: str) -> list[LeakageRecord]:
    return [r for r in run.records if r.server_round == server_round and r.name == name]


def _values(run: RunData, server_round: int, name: str) -> list[float]:
    return [r.value for r in _records(run, server_round, name) if r.value is not None]


def _told(
    values: Sequence[float], style: str, of: Callable[[Sequence[float]], float] = statistics.fmean
) -> str:
    return style.format(of(values)) if values else "–"
