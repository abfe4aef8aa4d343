"""Small audits that tests run in process."""

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp
from rich.console import Console

from flwr_leakage.flower import run_inline
from flwr_leakage.simulation import summary
from flwr_leakage.simulation.apps import make_client_app, make_server_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import Config, compose
from flwr_leakage.tracking import RunData, read_run

TINY = [
    "partition=iid",
    "client.num_examples=1",
    "client.batch_size=1",
    "client.num_steps=1",
    "scoring.max_samples=null",
    "selection.every=1",
    "selection.max_examples=null",
    "server.attack_max_seconds=null",
    "what_if=null",
    "num_clients=3",
    "num_rounds=2",
    "model=linear",
    "score=none",
    "attack=idlg",
    "attack.optimizer.iterations=5",
    "attack.batching=vmap",
    "server.test_samples=10",
]
"""Overrides of an audit that takes a fraction of a second."""


def tiny_config(root: Path, *overrides: str, name: str = "run") -> Config:
    """The config of a tiny audit on the data set that the fixture ``tiny_data`` wrote."""
    chosen = any(override.startswith("dataset=") for override in overrides)
    data = [] if chosen else ["dataset=npz", "dataset.name=tiny", f"dataset.root={root}"]
    return compose([*TINY, *data, *overrides], str(root / name))


def write_tiny_data(folder: Path) -> Path:
    """An npz data set of 60 training and 20 test images, 8×8, four classes."""
    draws = np.random.default_rng(0)
    for part, count in (("train", 60), ("test", 20)):
        images = draws.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        labels = np.arange(count, dtype=np.int64) % 4
        np.savez(folder / f"tiny_{part}.npz", images=images, labels=labels)
    return folder


def no_page() -> AbstractContextManager:
    """Runs end without their report, which takes as long as all else of a tiny audit."""
    return mock.patch.object(summary, "write_report", lambda folder: folder / "report.html")


def run(config: Config, client_app: ClientApp | None = None, page: bool = False) -> RunData:
    """Run an audit in process and read its folder.

    Args:
        config: of the run.
        client_app: in place of the config's own.
        page: whether its report is written.
    """
    with nullcontext() if page else no_page():
        run_inline(
            make_server_app(lambda _: config, Console(quiet=True)),
            client_app or make_client_app(lambda _: build(config)),
            config["num_clients"],
        )
    return read_run(config["run_dir"])


def values(data: RunData, name: str) -> dict[tuple[int, int, int], float | None]:
    """All values of a name by (round, client, sample)."""
    return {
        (r.server_round, r.client_id, r.sample): r.value for r in data.records if r.name == name
    }


def replace_arrays(reply: Message, change: dict) -> None:
    """Overwrite entries of a reply's arrays with tensors."""
    state = reply.content["arrays"].to_torch_state_dict()
    reply.content["arrays"] = ArrayRecord({**state, **change})


def numbers(data: RunData) -> str:
    """All numbers of a run that are no times, as text, to compare runs exactly."""
    rows = [
        (r.server_round, r.client_id, r.sample, r.kind, r.name, r.value, r.note)
        for r in data.records
        if r.kind != "cost"
    ]
    return json.dumps(sorted(rows, key=str))
