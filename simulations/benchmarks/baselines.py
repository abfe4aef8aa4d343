"""Which methods of federated learning the audit explains, attacks, or refuses, and in which words.

    python -m simulations.benchmarks.baselines
    python -m simulations.benchmarks.baselines --fetched baselines --examples examples

The folders ``baselines`` and ``examples`` are of a copy of Flower's repository.

Every method of ``simulations.benchmarks.methods`` runs twice, with and without one line on each
side, in one process. The table tells whether the models of all rounds are equal to the bit, the
residuals of the replays, what the audit cost, and what it said.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow

from flwr_leakage.flower import InlineGrid, audit, observe, observe_legacy
from flwr_leakage.records import ThreatModel
from flwr_leakage.tracking import read_run
from flwr_leakage.tracking.run_data import RunData
from simulations.benchmarks.fetched import fetched_methods
from simulations.benchmarks.fetched_examples import fetched_examples
from simulations.benchmarks.fetched_others import fetched_others
from simulations.benchmarks.methods import METHODS, Method


@dataclass(frozen=True)
class Ran:
    """One run of a method.

    Attributes:
        models: what each round ended with, as bytes.
        data: the record of the audit; ``None`` without one.
    """

    models: list[bytes]
    data: RunData | None


def run(
    method: Method,
    folder: Path | None = None,
    attack: Any = None,
    num_clients: int = 2,
    num_rounds: int = 2,
    truth: Path | None = None,
    images: int = 4,
    seconds: float = 60.0,
    **client: Any,
) -> Ran:
    """Run a method; with the audit on both sides where a folder for its record is given.

    Args:
        method: of ``METHODS``.
        folder: of the record.
        attack: see ``observe``.
        num_clients: all of them train in each round.
        num_rounds: ≥ 1.
        truth: see ``observe``.
        images: of a client.
        seconds: CPU seconds of an attack on each update.
        client: settings of the client's ``audit``.
    """
    torch.manual_seed(0)
    app, net = method.client(), method.net()
    models: list[bytes] = []
    if folder is not None:
        app = audit(app, truth=truth, **client)
    grid = InlineGrid(app, num_clients, {"images": images})
    if method.uses_lists:
        around = partial(_observe_list, net, folder, attack, truth, seconds)
        _run_lists(method, grid, num_clients, num_rounds, around, models)
    else:
        around = partial(_observe_records, net, folder, attack, truth, seconds)
        _run_records(method, grid, num_clients, num_rounds, around, models)
    gc.collect()  # the older interface ends its record where nobody holds the strategy
    return Ran(models, None if folder is None else read_run(folder))


def _observe_list(
    net: Any, folder: Path | None, attack: Any, truth: Any, seconds: float, strategy: Any
) -> Any:
    if folder is None:
        return strategy
    threat = ThreatModel()
    return observe_legacy(
        strategy, net, folder, attack=attack, threat=threat, truth=truth, max_seconds=seconds
    )


def _observe_records(
    net: Any, folder: Path | None, attack: Any, truth: Any, seconds: float, strategy: Any
) -> Any:
    if folder is None:
        return strategy
    return observe(strategy, net, folder, attack=attack, truth=truth, max_seconds=seconds)


def _run_lists(
    method: Method, grid: InlineGrid, clients: int, rounds: int, around: Callable[[Any], Any],
    models: list[bytes],
) -> None:  # fmt: skip
    arrays = method.first(method.net())
    strategy = method.strategy(
        fraction_evaluate=0.0, min_fit_clients=clients, min_available_clients=clients,
        initial_parameters=ndarrays_to_parameters(arrays),
    )  # fmt: skip
    aggregate = strategy.aggregate_fit

    def keep(server_round: int, results: Any, failures: Any) -> Any:
        # Replies come in any order, and floating-point sums depend on it.
        results = sorted(results, key=lambda pair: pair[0].node_id)
        if failures:
            raise RuntimeError(f"a client failed: {failures[0]}")
        found = aggregate(server_round, results, failures)
        models.append(b"".join(each.tobytes() for each in parameters_to_ndarrays(found[0])))
        return found

    strategy.aggregate_fit = keep
    context = Context(1, 1, {}, RecordDict(), {})
    legacy = LegacyContext(context, ServerConfig(num_rounds=rounds), around(strategy))
    DefaultWorkflow()(grid, legacy)
    legacy.strategy = None  # type: ignore[assignment]


def _run_records(
    method: Method, grid: InlineGrid, clients: int, rounds: int, around: Callable[[Any], Any],
    models: list[bytes],
) -> None:  # fmt: skip
    strategy = method.strategy(
        fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
    )
    aggregate = strategy.aggregate_train

    def keep(server_round: int, replies: Any) -> Any:
        replies = sorted(replies, key=lambda reply: reply.metadata.src_node_id)
        found = aggregate(server_round, replies)
        if found[0] is not None:
            models.append(b"".join(array.numpy().tobytes() for array in found[0].values()))
        return found

    strategy.aggregate_train = keep
    first = ArrayRecord(method.first(method.net()))
    around(strategy).start(grid, first, num_rounds=rounds)


def row(name: str, method: Method, attack: str | None, images: int, seconds: float) -> list[str]:
    """A line of the table: name, equality, residuals, costs, attacks, what was said.

    Costs are CPU seconds of a run without and with the audit, every round of it replayed, and no
    attack; a run with attacks follows, where they are asked for.
    """
    began = time.process_time()
    plain = run(method, images=images)
    costs = [time.process_time() - began]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        audited = partial(run, method, images=images, share="everything", replay_every=1)
        began = time.process_time()
        seen = audited(place / "audited")
        costs.append(time.process_time() - began)
        same = plain.models == seen.models
        if attack:
            seen = audited(place / "run", attack, truth=place / "truth", seconds=seconds)
            same = same and plain.models == seen.models
    data = seen.data
    assert data is not None
    values = {
        name: [r.value for r in data.records if r.name == name and r.value is not None]
        for name in ("replay_residual", "psnr")
    }
    residuals, psnr = values["replay_residual"], values["psnr"]
    reasons = {r.note for r in data.records if r.name == "not_attacked"}
    said = {event.message for event in data.events}
    return [
        name,
        "yes" if same else "NO",
        f"{max(residuals):.1g}" if residuals else "none",
        f"{costs[0]:.2f}, {costs[1]:.2f} ({costs[1] / costs[0]:.1f})",
        f"{len(psnr)}: {np.median(psnr):.0f} dB" if psnr else "none",
        " / ".join(sorted(reasons | said)),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attack", default=None, help="a preset; none by default")
    parser.add_argument("--only", nargs="*", help="names of methods")
    parser.add_argument("--fetched", type=Path, help="the folder of Flower's baselines")
    parser.add_argument("--examples", type=Path, nargs="*", default=[], help="folders of apps")
    parser.add_argument("--others", type=Path, help="a folder of repositories, as OWNER/NAME")
    parser.add_argument("--images", type=int, default=4, help="of a client")
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU, for each update")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| method | equal | residual | CPU s: plain, audited (ratio) | images | said |")
    print("|---|---|---|---|---|---|")
    found = fetched_methods(arguments.fetched) if arguments.fetched else {}
    for folder in arguments.examples:
        found |= fetched_examples(folder, arguments.images)
    if arguments.others:
        found |= fetched_others(arguments.others, arguments.images)
    methods = found or METHODS
    for name in arguments.only or methods:
        try:
            method = methods[name]
            line = row(name, method, arguments.attack, arguments.images, arguments.seconds)
        except Exception as error:  # of one app; the list goes on, and tells it
            line = [
                name,
                "does not run",
                "none",
                "none",
                "none",
                f"{type(error).__name__}: {error}"[:200],
            ]
        print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
