"""The same apps for ``flwr run``: the Hydra overrides come from the run config.

``flwr run . --run-config 'hydra-overrides="defense=pruning num_rounds=3" run-dir="/abs/path"'``
"""

import shlex
from functools import lru_cache
from pathlib import Path

from flwr.app import Context
from rich.console import Console

from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.config import Config, compose


def config_of(context: Context) -> Config:
    """Compose the config that the run asks for; once a process for the same overrides."""
    run_dir = str(context.run_config.get("run-dir", ""))
    if not run_dir:
        run_dir = str(Path.home() / ".flwr" / "leakage" / f"run-{context.run_id}")
    return _composed(str(context.run_config.get("hydra-overrides", "")), run_dir)


@lru_cache(maxsize=4)
def _composed(overrides: str, run_dir: str) -> Config:
    return compose(shlex.split(overrides), run_dir)


client_app = make_client_app(config_of)
server_app = make_server_app(config_of, Console())
