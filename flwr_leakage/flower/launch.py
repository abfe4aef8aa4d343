"""Run a Flower ``ServerApp`` and ``ClientApp`` on this machine, in this process or on Flower's
simulation runtime.
"""

import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from flwr.app import Context, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_leakage.flower.inline_grid import SERVER_NODE_ID, InlineGrid


def run_inline(
    server_app: ServerApp,
    client_app: ClientApp,
    num_clients: int,
    run_config: UserConfig | None = None,
) -> None:
    """Run a server app and a client app in this process, one client after the other.

    Args:
        server_app: the app of the server, which runs in the calling thread.
        client_app: the app of the clients.
        num_clients: the number of nodes and of partitions, ≥ 1.
        run_config: the settings that both apps find in ``context.run_config``. With Flower's own
            command they come from ``[tool.flwr.app.config]`` of the app's ``pyproject.toml``.
    """
    grid = InlineGrid(client_app, num_clients, run_config)
    context = Context(
        run_id=grid.run.run_id,
        node_id=SERVER_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=dict(run_config or {}),
    )
    server_app(grid, context)


@dataclass(frozen=True)
class RayEngine:
    """Flower's simulation runtime, on which clients run in Ray actors.

    Attributes:
        num_cpus: the number of CPUs that Ray may use; ``None`` for all of the machine's.
        client_cpus: the number of CPUs that each client uses, ≥ 1 and at most those that Ray may
            use, as Flower would otherwise wait forever.
        client_gpus: the number of GPUs that each client uses, ≥ 0 and at most the machine's; 0.5
            lets two clients share one.
    """

    num_cpus: int | None = None
    client_cpus: int = 1
    client_gpus: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.client_cpus <= self.available_cpus:
            raise ValueError(
                f"client_cpus must lie in [1, {self.available_cpus}], got {self.client_cpus}."
            )
        if not 0 <= self.client_gpus < math.inf:
            raise ValueError(f"client_gpus must be ≥ 0, got {self.client_gpus}.")
        if self.client_gpus > (gpus := torch.cuda.device_count()):
            raise ValueError(
                f"client_gpus must be at most {gpus}, the GPUs of this machine, got "
                f"{self.client_gpus}."
            )

    @property
    def available_cpus(self) -> int:
        """Return the number of CPUs that Ray may use: ``num_cpus``, or all of the machine's."""
        return self.num_cpus if self.num_cpus is not None else (os.cpu_count() or 1)

    def __call__(
        self,
        server_app: ServerApp,
        client_app: ClientApp,
        num_clients: int,
        run_config: UserConfig | None = None,
    ) -> None:
        """Run a server app and a client app; the arguments are those of :func:`run_ray`."""
        if run_config:
            server_app = _ConfiguredServer(server_app, run_config)
            client_app = _ConfiguredClient(client_app, run_config)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from flwr.simulation import run_simulation

            run_simulation(
                server_app,
                client_app,
                num_clients,
                backend_config={
                    "client_resources": {
                        "num_cpus": self.client_cpus,
                        "num_gpus": self.client_gpus,
                    },
                    "init_args": {
                        "num_cpus": self.available_cpus,
                        "include_dashboard": False,
                        "logging_level": logging.ERROR,
                        "log_to_driver": False,
                    },
                },
            )


def run_ray(
    server_app: ServerApp,
    client_app: ClientApp,
    num_clients: int,
    run_config: UserConfig | None = None,
    *,
    num_cpus: int | None = None,
    client_cpus: int = 1,
    client_gpus: float = 0.0,
) -> None:
    """Run a server app and a client app on Flower's simulation runtime, with clients in Ray actors.

    Args:
        server_app: the app of the server, which runs in a thread of this process.
        client_app: the app of the clients; it must be picklable.
        num_clients: the number of nodes and of partitions.
        run_config: the settings that both apps find in ``context.run_config``.
        num_cpus: the number of CPUs that Ray may use; ``None`` for all of the machine's.
        client_cpus: the number of CPUs that each client uses, ≥ 1.
        client_gpus: the number of GPUs that each client uses, ≥ 0; it may be a fraction.
    """
    engine = RayEngine(num_cpus, client_cpus, client_gpus)
    engine(server_app, client_app, num_clients, run_config)


class _ConfiguredClient(ClientApp):
    """A client app that runs another one with a given run config.

    Flower's ``run_simulation`` has no argument for a run config.
    """

    def __init__(self, app: ClientApp, run_config: UserConfig) -> None:
        super().__init__()
        self._app = app
        self._run_config = run_config

    def __call__(self, message: Message, context: Context) -> Message:
        with _configured(context, self._run_config):
            return self._app(message, context)


class _ConfiguredServer(ServerApp):
    """A server app that runs another one with a given run config.

    Flower's ``run_simulation`` has no argument for a run config.
    """

    def __init__(self, app: ServerApp, run_config: UserConfig) -> None:
        super().__init__()
        self._app = app
        self._run_config = run_config

    def __call__(self, grid: Grid, context: Context) -> None:
        with _configured(context, self._run_config):
            self._app(grid, context)


@contextmanager
def _configured(context: Context, run_config: UserConfig) -> Iterator[None]:
    """Set a context's run config within a ``with`` block, and restore it afterwards.

    The config is restored because Flower refuses a context whose run config has changed.
    """
    before = context.run_config
    context.run_config = dict(run_config)
    try:
        yield
    finally:
        context.run_config = before
