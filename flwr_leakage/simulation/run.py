"""Run one audit by a config that Hydra composed."""

import logging
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from flwr_leakage._conf import conf_dir
from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import Config, ConfigError, to_config
from flwr_leakage.simulation.machine import check_machine
from flwr_leakage.simulation.nodes import instantiate
from flwr_leakage.simulation.sweep import fail, objective_of
from flwr_leakage.simulation.watch import closed_afterwards
from flwr_leakage.tracking import RunData, read_run
from flwr_leakage.tracking.guarded import LOST


@hydra.main(version_base=None, config_path=str(conf_dir()), config_name="config")
def run_by_hydra(cfg: DictConfig) -> Any:
    """Run one audit; Hydra calls it once for each point of a sweep (``-m``).

    The result is the value, or a tuple of values, of the measures that the config names as
    ``objective``, which a sweeper such as Optuna's optimises. It is ``None`` if the config names
    none.
    """
    hydra_config = HydraConfig.get()
    try:
        config = to_config(cfg, hydra_config.runtime.choices)
        launch(config)
        return objective_of(config["run_dir"], config["objective"])
    except Exception as error:
        # In a sweep, an error of this run must not stop the other runs.
        if hydra_config.mode == RunMode.MULTIRUN:
            return fail(hydra_config.runtime.output_dir, error, cfg.objective)
        if isinstance(error, ConfigError | NoUpdateError | IncompleteRunError):
            sys.exit(f"error: {error}")
        if isinstance(error, OSError):  # an error of the machine, for example a full disk
            sys.exit(f"error: the run in {cfg.run_dir} cannot be written or read: {error}")
        raise


class NoUpdateError(RuntimeError):
    """The error for a run in which no client returned a usable update."""


class IncompleteRunError(RuntimeError):
    """The error for a run whose records or report could not be written in full."""


def launch(config: Config) -> None:
    """Build the whole experiment first, so that errors in the config appear early; then run it in
    this process or on Ray.

    Raises:
        ConfigError: the config cannot be run.
        IncompleteRunError: something could not be written, as on a full disk.
        NoUpdateError: no client returned a usable update in any round.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    experiment = build(config)
    engine = instantiate(config, "engine")
    check_machine(experiment)
    client_app = make_client_app(lambda _: build(config))
    server_app = make_server_app(lambda _: config, Console())
    with closed_afterwards(Path(config["run_dir"])):
        engine(server_app, client_app, config["num_clients"])
    data = read_run(config["run_dir"])
    check_complete(data)
    if not any(record.name == "train_cpu_seconds" for record in data.records):
        raise NoUpdateError("no client returned a usable update in any round; the report says why.")


def check_complete(data: RunData) -> None:
    """Check that a run's records are closed and complete, and that it has a report.

    Raises:
        IncompleteRunError: one of them is missing. The message names it, and says what can be done.
    """
    missing = []
    if not data.closed:
        missing.append("its record is not closed")
    missing += [event.message.rstrip(".") for event in data.events if LOST in event.message]
    if not (data.folder / "report.html").exists():
        missing.append("its report was not written")
    if missing:
        raise IncompleteRunError(
            f"the run in {data.folder} is incomplete: {'; '.join(missing)}. What was written can "
            f"be read: make room, then flwr-leakage report {data.folder}"
        )
