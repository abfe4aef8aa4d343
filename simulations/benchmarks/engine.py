"""What the in-process engine adds to a round, beside training, scores and attacks.

``python -m simulations.benchmarks.engine``: two runs of different length, without scores and
attacks; the difference of their CPU seconds, less the training, is the engine's share. It holds
Flower's strategy and wire format, the checks of every reply, and the records.
"""

import logging
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from flwr_leakage.flower.launch import run_inline
from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import compose
from flwr_leakage.tracking import read_run

SHORT, LONG = 2, 22


def cpu_seconds(model: str, num_clients: int, num_rounds: int, folder: Path) -> tuple[float, float]:
    """CPU seconds of a run and of the training in it."""
    overrides = [
        f"num_clients={num_clients}",
        f"num_rounds={num_rounds}",
        f"model={model}",
        "attack=none",
        "score=none",
        "server.test_samples=1",
    ]
    config = compose(overrides, str(folder))
    build(config)
    start = time.process_time()
    run_inline(
        make_server_app(lambda _: config, Console(quiet=True)),
        make_client_app(lambda _: config),
        num_clients,
    )
    total = time.process_time() - start
    records = read_run(folder).records
    return total, sum(r.value or 0.0 for r in records if r.name == "train_cpu_seconds")


def main() -> None:
    """Print the table."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print("| model | clients | parameters | training, ms a round | engine, ms a round |")
    print("|---|---|---|---|---|")
    for model, num_clients in (("lenet", 10), ("lenet", 100), ("resnet8", 10)):
        with tempfile.TemporaryDirectory() as folder:
            runs = [
                cpu_seconds(model, num_clients, rounds, Path(folder) / str(rounds))
                for rounds in (SHORT, LONG)
            ]
        total, training = (
            1000 * (long - short) / (LONG - SHORT) for short, long in zip(*runs, strict=True)
        )
        size = sum(p.numel() for p in build_size(model))
        print(f"| {model} | {num_clients} | {size} | {training:.1f} | {total - training:.1f} |")


def build_size(model: str) -> list[torch.nn.Parameter]:
    """The parameters of a model of the configs."""
    return list(build(compose([f"model={model}"], "unused")).network.parameters())


if __name__ == "__main__":
    main()
