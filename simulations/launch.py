"""Run a built experiment on an engine, then write its report and its table."""

import logging
from pathlib import Path

from flwr_leakage.flower.launch import run_inline, run_ray
from flwr_leakage.flower.progress import ConsoleProgress
from flwr_leakage.report import write_report
from flwr_leakage.tracking import read_run, write_metadata
from rich.console import Console

from simulations.apps import make_client_app, make_server_app
from simulations.build import Config, ConfigError, Experiment, build
from simulations.summary import print_summary


def launch(config: Config, choices: dict[str, str]) -> Path:
    """Run an audit from start to report; returns the report's path.

    Args:
        config: resolved, plain.
        choices: the chosen option of each config group, for the report.

    Raises:
        ConfigError: before anything starts, naming the key that is wrong.
        RuntimeError: not one update was received in the whole run.
    """
    experiment = build(config)
    console = Console()
    describe(config, experiment, choices)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    progress = ConsoleProgress(console)
    settings = experiment.settings
    progress.line(
        f"{settings.num_clients} clients, {settings.num_rounds} rounds, "
        f"{choices.get('dataset')} · {choices.get('model')} · {choices.get('strategy')} · "
        f"defense {choices.get('defense')} · attack {choices.get('attack')} "
        f"({experiment.threat.describe()}) · engine {config['engine']['name']}"
    )
    client_app, server_app = make_client_app(config), make_server_app(config, progress)
    _run(config["engine"], server_app, client_app, settings.num_clients)
    return finish(Path(settings.run_dir), console)


def describe(config: Config, experiment: Experiment, choices: dict[str, str]) -> None:
    """Write ``run.json``: what the run's numbers belong to."""
    run_dir = Path(experiment.settings.run_dir)
    write_metadata(
        run_dir,
        config=config,
        seed=experiment.settings.seed,
        extra={"run": run_dir.name, "threat": experiment.threat.describe(), **choices},
    )


def finish(run_dir: Path, console: Console) -> Path:
    """Write the report, print the table, say where the report is."""
    report = write_report(run_dir)
    run = read_run(run_dir)
    print_summary(run, console)
    console.print(f"Report: {report.resolve()}", markup=False, highlight=False, soft_wrap=True)
    if not any(record.name == "train_cpu_seconds" for record in run.records):
        raise RuntimeError("no client returned a usable update in any round; see the report.")
    return report


def _run(engine: Config, server_app: object, client_app: object, num_clients: int) -> None:
    options = dict(engine)
    name = options.pop("name")
    runners = {"inline": run_inline, "ray": run_ray}
    if name not in runners:
        raise ConfigError(f"engine.name must be one of {sorted(runners)}, got {name!r}.")
    try:
        runners[name](server_app, client_app, num_clients, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"engine: {error}") from error
