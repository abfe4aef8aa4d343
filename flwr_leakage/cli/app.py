"""The commands of ``flwr-leakage``.

Each command imports the modules that it needs when it is called, so that ``--help`` is quick.
"""

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TextIO

import click
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup
from typer.models import ArgumentInfo
from typer.utils import get_params_from_function

from flwr_leakage._conf import DEFAULT_ATTACK

if TYPE_CHECKING:
    from flwr_leakage.comparison import Comparison


class _Commands(TyperGroup):
    """The group of all commands, in which a command's arguments have the help texts of their
    annotations.

    With click 8.5, typer loses these texts, so that this class sets them.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name, with the help texts of its arguments' annotations."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.callback is not None:
            told = get_params_from_function(command.callback)
            for param in command.params:
                info = told[param.name].default if param.name in told else None
                if isinstance(param, click.Argument) and isinstance(info, ArgumentInfo):
                    param.help = info.help  # type: ignore[attr-defined,unused-ignore]
        return command


app = typer.Typer(
    name="flwr-leakage",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
ONE_ROUND = (
    "num_clients=1",
    "num_rounds=1",
    "partition=iid",
    "client.num_examples=1",
    "what_if=null",
    "server.attack_max_seconds=null",
    "selection.max_examples=null",
    "scoring.relative_cost=null",
)
"""The Hydra overrides of the commands ``attack`` and ``score``: one client trains on one sample in
one round, without limits of time and cost. A user's own overrides replace these.
"""
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="group=option and key=value, as of Hydra.", metavar="[OVERRIDES]…"),
]
FailAbove = Annotated[
    str | None,
    typer.Option(
        metavar="GRADE",
        help="Exit with 3 if an image has a worse grade than recognisable, partly or nothing; with "
        "4 if the run cannot say.",
    ),
]
MaxSeconds = Annotated[
    float | None, typer.Option(help="CPU seconds for a target; the run's own by default.")
]
Allow = Annotated[
    list[Path] | None,
    typer.Option(help="A folder outside of the run that its config may read: its data set."),
]
MaxMemory = Annotated[
    float | None, typer.Option(help="GB that a process may take; half of all by default.")
]
JunitFile = Annotated[Path | None, typer.Option("--junit", help="Also write JUnit XML.")]
SarifFile = Annotated[Path | None, typer.Option("--sarif", help="Also write SARIF 2.1.0.")]
SummaryFile = Annotated[
    Path | None,
    typer.Option("--summary", help="Also add Markdown to a file, such as $GITHUB_STEP_SUMMARY."),
]
Folders = Annotated[
    list[Path], typer.Argument(help="Run folders, or folders of them such as multirun/….")
]


def _print_version(is_asked: bool) -> bool:
    if is_asked:
        version()
        raise typer.Exit
    return is_asked


@app.callback()
def root(
    is_asked: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Measure what the updates of federated training leak, and what defenses cost."""


@app.command(context_settings=PASS_ON)
def run(
    context: click.Context,
    overrides: Overrides = None,
    multirun: Annotated[
        bool, typer.Option("-m", "--multirun", help="One run for each combination of the lists.")
    ] = False,
    show: Annotated[bool, typer.Option("--cfg", help="Print the whole config and stop.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would do and take, and stop.")
    ] = False,
    fail_above: FailAbove = None,
    junit: JunitFile = None,
    sarif: SarifFile = None,
    summary: SummaryFile = None,
) -> None:
    """Train a federation, attack its updates, write a report.

    Examples:
        flwr-leakage run

        flwr-leakage run defense=pruning defense.prune_ratio=0.9 seed=1

        flwr-leakage run -m defense=none,pruning,gaussian seed=0,1,2

        flwr-leakage run --dry-run client.epochs=5 num_rounds=20

        flwr-leakage run --fail-above partly --junit leakage.xml

    `flwr-leakage list` names the options of every group. A sweep ends with comparison.html.
    """
    given = [*(overrides or []), *context.args]
    is_checked = any((fail_above, junit, sarif, summary))
    if is_checked and (multirun or show or dry_run):
        _fail(ValueError("a sweep, --cfg and --dry-run have no run to check: leave them out."))
    if dry_run:
        _price(given, multirun)
        return
    flags = [*(["-m"] if multirun else []), *(["--cfg", "job"] if show else [])]
    if not is_checked:
        _simulate([*flags, *given])
        return
    _grade(fail_above)  # this is checked before the training, which takes long
    folder = _run_folder(given)
    _simulate([*given, f"run_dir={folder}"])
    _check(folder, fail_above, junit, sarif, summary)


@app.command(context_settings=PASS_ON)
def attack(
    context: click.Context,
    name: Annotated[
        str,
        typer.Argument(help="An attack, see `flwr-leakage list attack`; or a FILE with an update."),
    ],
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="FILE: MODULE:NAME of what makes the model.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="FILE: C,H,W of an input.")] = None,
    before: Annotated[
        Path | None, typer.Option(help="FILE: the parameters before training, in a file.")
    ] = None,
    holds: Annotated[
        str | None, typer.Option(help="FILE: difference, gradient or parameters.")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="FILE: samples behind the update.")] = 1,
    learning_rate: Annotated[float | None, typer.Option(help="FILE: of local training.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="FILE: local steps.")] = 1,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="FILE: of local training; all samples by default.")
    ] = None,
    momentum: Annotated[float, typer.Option(help="FILE: of SGD.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="FILE: of SGD.")] = 0.0,
    mean: Annotated[str | None, typer.Option(help="FILE: of normalised inputs.")] = None,
    std: Annotated[str | None, typer.Option(help="FILE: the same.")] = None,
    preset: Annotated[str, typer.Option(help="FILE: the attack.")] = DEFAULT_ATTACK,
    max_seconds: Annotated[float | None, typer.Option(help="FILE: CPU seconds.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="FILE: the folder of record and report.")
    ] = None,
) -> None:
    """Attack the update of one client in one round, without scores.

    If the attack does not apply, the verdict says which may, and the exit status is 1. Examples:
        flwr-leakage attack strongest

        flwr-leakage attack exact_batch model=mlp client.num_examples=8

    An update in a file (safetensors, npz, torch.save) is attacked without a training, whatever
    framework wrote it, and its report is written. It is a difference of parameters, such as
    NVFlare's WEIGHT_DIFF, a gradient, or the parameters after training with those `--before`:
        flwr-leakage attack diff.npz --model my_app:Net --shape 3,32,32 --learning-rate 0.1

        flwr-leakage attack after.pt --before before.pt --model my_app:Net --shape 1,28,28
        --learning-rate 0.1 --examples 4
    """
    from flwr_leakage.cli.update_file import SUFFIXES, UpdateFile, attack_file
    from flwr_leakage.report.attempts import fates
    from flwr_leakage.report.index import Index
    from flwr_leakage.tracking import read_run

    if model is not None or Path(name).suffix.lower() in SUFFIXES:
        from flwr_leakage.records import LocalSchedule
        from flwr_leakage.untrusted import memory_limit

        folder = output or Path(f"leakage-{Path(name).stem}")
        with _failing_on(OSError, ValueError, ImportError):
            if model is None or shape is None:
                raise ValueError(
                    f"an attack on the file {name} takes --model MODULE:NAME and --shape C,H,W."
                )
            if unknown := [*(overrides or []), *context.args]:
                raise ValueError(f"an attack on a file takes options only, got {unknown}.")
            schedule = None if learning_rate is None else LocalSchedule(
                learning_rate, steps, batch_size or examples, momentum, weight_decay
            )  # fmt: skip
            given = UpdateFile(
                Path(name), model, _shape(shape), before, holds,
                examples, schedule, _floats(mean, "--mean"), _floats(std, "--std"),
            )  # fmt: skip
            with memory_limit(None):
                _say(attack_file(given, folder, preset, max_seconds))
    else:
        settings = [*(overrides or []), *context.args]
        chosen = _one_round([f"attack={name}", "score=none"], settings)
        if {"-m", "--multirun"} & set(settings):
            _simulate(chosen)
            return
        folder = _run_folder(chosen)
        _simulate([*chosen, f"run_dir={folder}"])
    if fates(Index(read_run(folder).records)).is_refused:
        raise typer.Exit(1)


@app.command(context_settings=PASS_ON)
def score(
    context: click.Context,
    name: Annotated[
        str, typer.Argument(help="A score; see `flwr-leakage list score`.")
    ] = "default",
    overrides: Overrides = None,
) -> None:
    """Score the samples of one client in one round, without an attack, and print the scores.

    Examples:
        flwr-leakage score

        flwr-leakage score lavp model=convnet_small client.num_examples=4
    """
    from flwr_leakage.cli.scores import print_scores

    given = [*(overrides or []), *context.args]
    if "=" in name:  # the name may be left out before an override
        name, given = "default", [name, *given]
    chosen = _one_round([f"score={name}", "attack=none"], given)
    folder = _run_folder(chosen)
    _simulate([*chosen, f"run_dir={folder}"])
    print_scores(folder, Console())


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    output: Annotated[Path | None, typer.Option(help="The file to write.")] = None,
    max_gallery: Annotated[
        int, typer.Option(min=0, help="How many samples the gallery shows at most.")
    ] = 1000,
) -> None:
    """Write the report of a run again, also of a run that still goes on or was killed. Of several
    runs, such as a sweep, `flwr-leakage compare` makes one page.
    """
    from flwr_leakage.comparison.compare import run_folders
    from flwr_leakage.report import write_report

    runs = run_folders(folder)
    if runs and folder not in runs:
        _fail(ValueError(
            f"expected one run folder, got {folder}, which holds {len(runs)}; put them beside each "
            f"other by `flwr-leakage compare {folder}`, or name one, such as {runs[0]}."
        ))  # fmt: skip
    with _failing_on(OSError, ValueError):
        _say(write_report(folder, output, max_gallery))


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(help="A run folder, of a run that still goes on.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the page on 127.0.0.1; 0 for a free one.")
    ] = 8765,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Show a run while it trains, in the terminal and a browser, updated after each round.

    The page is served on this machine only, and nothing leaves it. In an SSH session, the command
    prints the line that forwards the page to your own machine. Examples:
        flwr-leakage watch outputs/RUN

        flwr-leakage watch leakage --port 9000 --no-browser
    """
    from flwr_leakage.cli.watch import watch_run

    with _failing_on(OSError, ValueError):
        watch_run(folder, port, browser, Console())


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    fail_above: FailAbove = None,
    junit: JunitFile = None,
    sarif: SarifFile = None,
    summary: SummaryFile = None,
) -> None:
    """Check a run in a pipeline: exit status 0 if it passed, 3 if it leaks, 4 if it cannot say.

    Without --fail-above every grade above "nothing" fails. Examples:
        flwr-leakage check outputs/RUN --fail-above partly

        flwr-leakage check leakage --junit leakage.xml --sarif leakage.sarif
    """
    _check(folder, fail_above, junit, sarif, summary)


@app.command()
def evidence(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page; its JSON stands beside it.")
    ] = None,
) -> None:
    """Write a page on a run to be filed: each sentence with the records behind it, no images.

    Example:
        flwr-leakage evidence outputs/RUN -o evidence.html
    """
    from flwr_leakage.evidence import write_evidence

    with _failing_on(OSError, ValueError):
        _say(write_evidence(folder, output))


@app.command()
def verify(
    page: Annotated[Path, typer.Argument(help="A page of evidence, or its JSON.")],
    folder: Annotated[Path, typer.Argument(help="The run folder that it was made from.")],
    find: Annotated[
        list[str] | None, typer.Option(help="Print the record with this id; may be repeated.")
    ] = None,
) -> None:
    """Check that a page of evidence still agrees with its run; exit status 1 if not.

    Example:
        flwr-leakage verify evidence.html outputs/RUN
    """
    from flwr_leakage import evidence

    with _failing_on(OSError, ValueError):
        for record in evidence.records_by_id(folder, find or ()):
            _say(record)
        wrong = evidence.verify(page, folder)
    for sentence in wrong:
        _say(sentence)
    if wrong:
        raise typer.Exit(1)
    _say("The run bears out the page: all records and sentences are the same.")


@app.command()
def client(
    folder: Annotated[
        Path, typer.Argument(help="What ClientAudit(folder=…) or client.folder=… named.")
    ],
) -> None:
    """Show a client's own scores, its attacks on its own updates, and which it withheld.

    Example:
        flwr-leakage client /var/lib/my-node/leakage
    """
    from flwr_leakage.cli.owner import own_folders, print_own

    with _failing_on(OSError, ValueError):
        for each in own_folders(folder):
            print_own(each, Console())


@app.command()
def attack_kept(
    folder: Annotated[Path, typer.Argument(help="A run folder with kept updates.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="MODULE:NAME of the model's class, where the run was an app of your own."
        ),
    ] = None,
    attack: Annotated[
        str, typer.Option(help="The preset that attacks then; otherwise the run's own attack does.")
    ] = DEFAULT_ATTACK,
    workers: Annotated[
        str, typer.Option(help="Processes that attack, or ray: tasks of the cluster that runs.")
    ] = "1",
    max_seconds: MaxSeconds = None,
    allow: Allow = None,
    max_memory: MaxMemory = None,
    shard: Annotated[
        str | None,
        typer.Option(help="i/n: attack this share of the targets only; merge records all shares."),
    ] = None,
    shard_folder: Annotated[
        Path | None,
        typer.Option(help="Where the share's results go; kept/shards/i-of-n by default."),
    ] = None,
) -> None:
    """Attack the updates that a run kept for later, and add the results to its record and report.

    The folder may come from anybody: no code that it names is run, and no file outside of it is
    read unless you allow it. The command can be ended at any moment and called again. Examples:

        flwr-leakage run server.attack_later=true

        flwr-leakage attack-kept outputs/RUN --workers 4

        flwr-leakage attack-kept leakage --model my_app.task:Net

        flwr-leakage attack-kept outputs/RUN --shard 3/16
    """
    from flwr_leakage.audit.later import attack_kept
    from flwr_leakage.audit.shards import Shard, attack_shard
    from flwr_leakage.cli.kept import kept_run_of_folder, workers_of

    if shard is None and shard_folder is not None:
        _fail(ValueError("--shard-folder must come with --shard i/n."))
    with _attacking(max_memory):
        mine = None if shard is None else Shard.parse(shard)
        run = kept_run_of_folder(folder, model, attack, max_seconds, allow or ())
        on = workers_of(workers, run)
        if mine is not None:
            done = attack_shard(run, mine, shard_folder, on)
            _say(f"Shard {mine} has {done} attacks, which are done. merge records all shards.")
            return
        done = attack_kept(run, on)
        _say_what_came(folder, done, "attacked")


@app.command()
def merge(
    folder: Annotated[Path, typer.Argument(help="The run folder whose kept updates were shared.")],
    shards: Annotated[
        list[Path] | None,
        typer.Argument(help="The folders of all shards; those in kept/shards by default."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="As for attack-kept.")] = None,
    attack: Annotated[str, typer.Option(help="As for attack-kept.")] = DEFAULT_ATTACK,
    max_seconds: MaxSeconds = None,
    allow: Allow = None,
    max_memory: MaxMemory = None,
) -> None:
    """Add the results of all shards of attack-kept to the record of the run, and write its report.

    No attack is run. Shards of another run, code or setting are refused; so is a set of shards that
    is not complete. The command can be called again. Example:

        flwr-leakage merge outputs/RUN
    """
    from flwr_leakage.audit.shards import merge_shards
    from flwr_leakage.cli.kept import kept_run_of_folder

    with _attacking(max_memory):
        run = kept_run_of_folder(folder, model, attack, max_seconds, allow or ())
        _say_what_came(folder, merge_shards(run, shards or ()), "recorded")


@contextmanager
def _attacking(max_memory: float | None) -> Iterator[None]:
    """Return a context for attacks on data that may come from anybody.

    The context limits the memory of this process to ``max_memory`` GB, ``None`` for half of the
    machine's. It ends the process with a message and status 2 on an error.
    """
    from flwr_leakage.untrusted import memory_limit

    logging.getLogger("flwr").setLevel(logging.ERROR)  # no training takes place in this command
    with (
        _failing_on(OSError, ValueError, ImportError),
        memory_limit(None if max_memory is None else int(max_memory * 1e9)),
    ):
        yield


def _say_what_came(folder: Path, done: int, what: str) -> None:
    """Write the report of a run, and print the number of completed rounds and the verdict.

    ``done`` is the number of rounds, and ``what`` says what was done to them, such as ``attacked``.
    """
    from flwr_leakage.report import write_report
    from flwr_leakage.report.index import Index
    from flwr_leakage.report.page import as_shown
    from flwr_leakage.report.verdict import judge
    from flwr_leakage.tracking import read_run

    rounds = f"{done} round{'s' * (done != 1)}" if done else "No round was left to be"
    run = as_shown(read_run(folder))
    verdict = judge(Index(run.records), run.events, run.metadata)
    _say(f"{rounds} {what}. {verdict.sentence} {write_report(folder)}")


@app.command()
def compare(
    folders: Folders,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Also write .html, .csv, .tex, .md, .parquet or .png."),
    ] = None,
    reports: Annotated[
        bool,
        typer.Option("--reports", help="Write each run's report anew, and link an .html to them."),
    ] = False,
) -> None:
    """Compare runs in one table of means over seeds with their spread.

    Examples:
        flwr-leakage compare multirun/2026-01-01_12-00-00

        flwr-leakage compare RUN1 RUN2 RUN3 -o comparison.html
    """
    from flwr_leakage import comparison
    from flwr_leakage.cli.table import make_table

    with _failing_on(OSError, ValueError, ImportError):
        found = comparison.compare(folders)
        if sys.stdout.isatty():
            headings, rows = found.cells()
            Console().print(make_table(headings, rows, right=headings[1:]))
        else:
            print(found)
        for problem in found.problems:
            _say(f"note: {problem}", file=sys.stderr)
        if reports:
            from flwr_leakage.report import write_report

            for each in found.runs:
                write_report(each.folder)
        if output is not None:
            _say(_write(found, output, reports))


@app.command()
def export(
    folders: Folders,
    output: Annotated[Path, typer.Option("-o", "--output", help=".csv or .parquet.")],
    records: Annotated[
        bool, typer.Option("--records", help="A row a number, in place of a row a run.")
    ] = False,
) -> None:
    """Write the numbers of runs as a table for other programs.

    Examples:
        flwr-leakage export outputs/RUN -o numbers.csv --records

        flwr-leakage export multirun/SWEEP -o runs.parquet
    """
    from flwr_leakage import comparison
    from flwr_leakage.comparison.export import export_records

    with _failing_on(OSError, ValueError, ImportError):
        if records:
            _say(export_records(folders, output))
        else:
            _say(comparison.export(comparison.compare(folders), output, per_run=True))


@app.command(name="list")
def list_(
    group: Annotated[str | None, typer.Argument(help="A config group, such as attack.")] = None,
) -> None:
    """List what a config can name: attacks, defenses, scores, models, data sets, …"""
    from flwr_leakage.cli.catalog import entries, groups

    with _failing_on(ValueError):
        for name in groups() if group is None else [group]:
            table = _plain_table(title=name)
            for option, line in entries(name).items():
                table.add_row(option, Text(line))
            Console().print(table)


@app.command()
def doctor() -> None:
    """Say what is installed here and what is missing; exit status 1 if something needed is."""
    from flwr_leakage.cli.doctor import examine

    table = _plain_table()
    findings = examine()
    colours = {"ok": "green", "missing": "yellow", "broken": "red"}
    for finding in findings:
        state = f"[{colours[finding.state]}]{finding.state}[/]"
        table.add_row(finding.name, state, Text(finding.text))
    Console().print(table)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    from flwr_leakage.tracking.metadata import installed_versions

    for name, number in installed_versions().items():
        print(f"{name} {number}")


def main() -> None:
    """Run the ``flwr-leakage`` command with the arguments of the process."""
    from flwr_leakage.tracking.text import accept_any_text

    accept_any_text()
    try:
        app()
    except ModuleNotFoundError as error:
        from flwr_leakage._lazy import missing

        named = missing("this command", error)
        if named is error:
            raise
        sys.exit(f"error: {named}")


def _simulate(arguments: Iterable[str]) -> None:
    """Run a simulation with the given command line, and exit with status 2 if an option is wrong.

    The command line replaces the process's own one, and is kept in ``run.json``.
    """
    from flwr_leakage.simulation.command import main as simulate

    sys.argv = [sys.argv[0], *arguments]
    try:
        simulate()
    except SystemExit as error:
        from flwr_leakage.simulation.config import ConfigError

        asked_in_vain = error.__context__ is None or isinstance(error.__context__, ConfigError)
        if isinstance(error.code, str) and asked_in_vain:
            _say(error.code, sys.stderr)
            raise typer.Exit(2) from error
        raise


def _grade(fail_above: str | None) -> str:
    """Return the worst grade of a reconstruction that the option ``--fail-above`` allows.

    ``None`` stands for ``nothing``. A text that is no grade ends the process with status 2.
    """
    from flwr_leakage.report.grades import GRADES

    grade = "nothing" if fail_above is None else fail_above
    if grade not in GRADES[1:]:
        _fail(ValueError(f"--fail-above must be one of {list(GRADES[1:])}, got {grade!r}."))
    return grade


def _check(
    folder: Path,
    fail_above: str | None,
    junit: Path | None,
    sarif: Path | None,
    summary: Path | None,
) -> None:
    """Check a run for leaks, print the result, and end the process with its exit status.

    The status is 0 if the run passed, 3 if it leaks and 4 if it cannot say. ``fail_above`` is the
    worst grade of a reconstruction that is allowed. The result is also written as JUnit and SARIF,
    and appended to the Markdown file ``summary``, where these paths are given.
    """
    from flwr_leakage import testing

    grade = _grade(fail_above)
    with _failing_on(OSError, ValueError):
        found = testing.check(folder, grade)  # type: ignore[arg-type]
        testing.write_check(found, junit, sarif, summary)
    _say(f"{found.outcome}: {found.message}")
    raise typer.Exit(found.exit_code)


def _price(overrides: list[str], multirun: bool) -> None:
    from flwr_leakage.cli.price import dry_run
    from flwr_leakage.simulation.config import ConfigError

    with _failing_on(ConfigError):
        dry_run(overrides, multirun, Console())


def _shape(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise ValueError(f"--shape must be C,H,W, such as 3,32,32, got {text!r}.")
    channels, height, width = map(int, parts)
    return channels, height, width


def _floats(text: str | None, option: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(","))) if text else ()
    except ValueError as error:
        raise ValueError(f"{option} must be numbers such as 0.5,0.5,0.5, got {text!r}.") from error


def _one_round(fixed: list[str], given: list[str]) -> list[str]:
    """Return the Hydra overrides of a run with one client and one round.

    They are ``fixed``, those that the command needs; then those of ``ONE_ROUND`` whose keys the
    user does not set; then ``given``, the user's own.
    """
    keys = {override.partition("=")[0] for override in given}
    return [*fixed, *(o for o in ONE_ROUND if o.partition("=")[0] not in keys), *given]


def _run_folder(overrides: Iterable[str]) -> Path:
    from datetime import datetime

    keys = ("hydra.run.dir=", "run_dir=")
    given = [o.partition("=")[2] for o in overrides if o.startswith(keys)]
    return Path(given[-1] if given else f"outputs/{datetime.now():%Y-%m-%d_%H-%M-%S}")


def _write(found: "Comparison", output: Path, link_reports: bool) -> Path:
    """Write a comparison in the format of the file's suffix, and return the file's path.

    ``link_reports`` tells whether an HTML page links to the runs' reports.
    """
    from flwr_leakage import comparison

    if output.suffix == ".html":
        return comparison.write_comparison(found, output, link_reports)
    if output.suffix == ".png":
        comparison.frontier(found).savefig(output, dpi=144, facecolor="white")
        return output
    return comparison.export(found, output)


def _plain_table(title: str | None = None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False)


def _say(text: object, file: TextIO | None = None) -> None:
    """Print a text without control characters, by which untrusted text could control a terminal.

    ``file`` is the stream to print to, ``None`` for standard output.
    """
    from flwr_leakage.tracking.text import plain_text

    print(plain_text(str(text)), file=file)


@contextmanager
def _failing_on(*kinds: type[Exception]) -> Iterator[None]:
    """Return a context that ends the process with a message and status 2 on an error of these
    kinds.
    """
    try:
        yield
    except kinds as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    _say(f"error: {error}", sys.stderr)
    raise typer.Exit(2)
