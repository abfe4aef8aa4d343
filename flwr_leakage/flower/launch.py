"""Run a pair of Flower apps here: in this process, or on Flower's simulation runtime."""

import logging
import os
import warnings

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_leakage.flower.inline_grid import SERVER_NODE_ID, InlineGrid


def run_inline(server_app: ServerApp, client_app: ClientApp, num_clients: int) -> None:
    """Run the apps in this process, one client after the other."""
    grid = InlineGrid(client_app, num_clients)
    context = Context(
        run_id=grid.run.run_id,
        node_id=SERVER_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config={},
    )
    server_app(grid, context)


def run_ray(
    server_app: ServerApp,
    client_app: ClientApp,
    num_clients: int,
    *,
    num_cpus: int | None = None,
    client_cpus: int = 1,
    client_gpus: float = 0.0,
) -> None:
    """Run the apps on Flower's simulation runtime, clients in Ray actors.

    Args:
        server_app: runs in a thread of this process.
        client_app: is sent to the actors; it must be picklable.
        num_clients: the number of nodes and of partitions.
        num_cpus: CPUs that Ray may use; ``None`` for all of the machine's.
        client_cpus: CPUs of one client, ≥ 1.
        client_gpus: share of a GPU of one client.

    Raises:
        ValueError: a client asks for more CPUs than there are, on which Flower waits forever.
    """
    available = num_cpus if num_cpus is not None else (os.cpu_count() or 1)
    if not 1 <= client_cpus <= available:
        raise ValueError(f"client_cpus must lie in [1, {available}], got {client_cpus}.")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from flwr.simulation import run_simulation

        run_simulation(
            server_app,
            client_app,
            num_clients,
            backend_config={
                "client_resources": {"num_cpus": client_cpus, "num_gpus": client_gpus},
                "init_args": {
                    "num_cpus": available,
                    "include_dashboard": False,
                    "logging_level": logging.ERROR,
                    "log_to_driver": False,
                },
            },
        )
