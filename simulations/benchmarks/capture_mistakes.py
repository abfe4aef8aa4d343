"""Deliberate mistakes in what an audit assumes: what the attack reaches, and what is said.

Command: ``python -m simulations.benchmarks.capture_mistakes --seed 100 --clients 4``. Each client
trains on one digit for two steps of SGD with learning rate 0.1; one round; attack ``idlg``.
``named`` counts the clients of which a warning was recorded; what is said is the first of these.
"""

import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional as F

from flwr_leakage.data import embedded_mnist
from flwr_leakage.flower import audit, observe, run_inline
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.tracking import RunData, read_run
from simulations.benchmarks import lab


@dataclass(frozen=True)
class Case:
    """One setting of the clients, and what the server assumes of it.

    Attributes:
        assumed: arguments of ``observe``; what is missing is taken from the clients.
        momentum: of the clients' SGD.
        batch_norm: whether the network has a BatchNorm layer, which trains in train mode.
        head: whether a client starts with a head of its own.
        noise: standard deviation of what the client adds to each parameter that it sends.
    """

    assumed: dict[str, Any]
    momentum: float = 0.0
    batch_norm: bool = False
    head: bool = False
    noise: float = 0.0


SCHEDULE = LocalSchedule(0.1, num_steps=2, batch_size=1)
CASES: dict[str, Case] = {
    "none": Case({}),
    "learning rate ÷ 10": Case({"schedule": replace(SCHEDULE, learning_rate=0.01)}),
    "normalisation": Case({"spec": InputSpec((1, 28, 28), 10)}),
    "1 step": Case({"schedule": replace(SCHEDULE, num_steps=1)}),
    "10 steps": Case({"schedule": replace(SCHEDULE, num_steps=10)}),
    "momentum 0.9": Case({"schedule": SCHEDULE}, momentum=0.9),
    "BatchNorm mode": Case({"model": "running"}, batch_norm=True),
    "stateful head": Case({}, head=True),
    "DP noise": Case({}, noise=1e-3),
}


def network(batch_norm: bool) -> nn.Module:
    """Two convolutions of sigmoids and a head, which an attack recovers digits from."""
    norm = [nn.BatchNorm2d(8)] if batch_norm else []
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        *norm,
        nn.Sigmoid(),
        nn.Conv2d(8, 16, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )


def client_app(case: Case, model: Callable[[], nn.Module]) -> ClientApp:
    """A client that trains on one digit, as the case says."""
    digits, _ = embedded_mnist()
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        net = model()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        if case.head:
            nn.init.normal_(net[-1].weight, std=0.05)
        batch = digits.batch([client])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=case.momentum)
        net.train()
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(batch.inputs), batch.targets).backward()
            optimizer.step()
        if case.noise:
            with torch.no_grad():
                for value in net.parameters():
                    value.add_(case.noise * torch.randn_like(value))
        content = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def run(case: Case, seed: int, clients: int) -> RunData:
    """One round, audited by one line on each side."""
    torch.manual_seed(seed)
    initial = network(case.batch_norm)

    def model() -> nn.Module:
        return network(case.batch_norm)

    assumed = dict(case.assumed)
    public: nn.Module | GradientMap = initial
    if "model" in assumed:
        public = GradientMap(initial, batch_norm=assumed.pop("model"))
    with tempfile.TemporaryDirectory() as folder:
        truth, run_folder = Path(folder) / "truth", Path(folder) / "run"
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients)
        observed = observe(strategy, public, run_folder, attack="idlg", truth=truth, **assumed)
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            observed.start(grid, ArrayRecord(initial.state_dict()), num_rounds=1)

        app = audit(client_app(case, model), truth=truth, share="everything")
        run_inline(server, app, clients)
        return read_run(run_folder)


def main() -> None:
    """Print one row a mistake."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    given = lab.start(parser)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    lab.print_header("mistake", "PSNR median (lowest), dB", "replay residual", "named", "said")
    for name, case in CASES.items():
        data = run(case, given.seed, given.clients)
        psnr = [r.value for r in data.records if r.name == "psnr" and r.value is not None]
        residual = [r.value for r in data.records if r.name == "replay_residual"]
        warnings = [event for event in data.events if event.level == "warning"]
        named = len({event.client_id for event in warnings})
        said = warnings[0].message if warnings else "nothing"
        outcome = f"{median(psnr):.0f} ({min(psnr):.0f})" if psnr else "–"
        worst = max((value for value in residual if value is not None), default=None)
        shown = "–" if worst is None else f"{worst:.2g}"
        lab.print_row(name, outcome, shown, f"{named} of {given.clients}", said)


if __name__ == "__main__":
    main()
