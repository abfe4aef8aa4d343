"""Is every client of one image attacked, and under its own normalisation?

    python -m simulations.benchmarks.flower_normalisations --root FOLDER

prints a Markdown table. FOLDER holds ``NAME_test.npz`` of ``cifar10``, ``fashion_mnist`` and
``mnist``; the 8 by 8 digits are scikit-learn's. In each row 100 clients with ``audit`` train an MLP
on one image each, drawn by ``--first-seed``, and a server with ``observe`` attacks them by
``analytic``. Neither is told anything. *Alone*: each client is the only one of its federation.
*Own* is the normalisation that the client's pipeline uses. *Interpolated* images are resized by
0.9 in floating point and lie on no grid of 8 bits; *half* are half of the clients'.

*Right* are attacked under their own normalisation: the picture in the run folder is the private
one to one level of 8 bits.
"""

import logging
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.conventions import public_statistics
from flwr_leakage.flower import audit, observe, run_inline
from flwr_leakage.records import InputSpec
from flwr_leakage.tracking import read_run
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_batches import load

CLIENTS = 100
DIGITS = "digits 8×8"
ROWS: tuple[tuple[str, tuple[str, ...], bool, float], ...] = (
    ("cifar10", ("0.5 and 0.5",), True, 0.0),
    ("cifar10", ("CIFAR-10",), True, 0.0),
    ("fashion_mnist", ("0.5 and 0.5",), True, 0.0),
    ("fashion_mnist", ("Fashion-MNIST",), True, 0.0),
    ("mnist", ("MNIST",), True, 0.0),
    ("mnist", ("0 to 1",), True, 0.0),
    (DIGITS, ("0 to 1",), True, 0.0),
    (DIGITS, ("0 to 16",), True, 0.0),
    ("cifar10", ("0.5 and 0.5", "CIFAR-10"), False, 0.0),
    ("cifar10", ("0.5 and 0.5",), False, 0.5),
    ("fashion_mnist", ("Fashion-MNIST",), False, 0.5),
    ("cifar10", ("0.5 and 0.5",), False, 1.0),
    ("cifar10", ("CIFAR-10",), False, 1.0),
    ("fashion_mnist", ("Fashion-MNIST",), False, 1.0),
    ("mnist", ("0 to 1",), False, 1.0),
)
"""Data, the normalisations of clients in turn, whether each is alone, the share interpolated."""


def images_of(root: Path, name: str) -> Tensor:
    """Pixels (N, C, H, W) in [0, 1]."""
    if name != DIGITS:
        return load(root, name, "test")[0][lab.REPORTED_FROM :]
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().images).float()[:, None] / 16


def network(spec: InputSpec) -> nn.Module:
    """An MLP of 32 units."""
    torch.manual_seed(0)
    size = torch.Size(spec.shape).numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, 10))


def client_app(images: list[Tensor], spec: InputSpec) -> ClientApp:
    """An app of clients with one normalised image each."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: object) -> Message:
        model = network(spec)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        number = context.node_config["partition-id"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.cross_entropy(model(images[number][None]), torch.tensor([number % 10])).backward()
        optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    return audit(app)


def attacked(images: list[Tensor], pixels: list[Tensor], spec: InputSpec) -> Counter[str]:
    """How many clients of a federation are attacked, and how many under their own normalisation."""
    with tempfile.TemporaryDirectory() as folder:
        model = network(spec)
        every = {"min_train_nodes": len(images), "min_available_nodes": len(images)}
        strategy = FedAvg(fraction_evaluate=0.0, **every)
        observed = observe(strategy, model, Path(folder) / "run", attack="analytic")
        server = ServerApp()

        @server.main()
        def main(grid: object, context: object) -> None:
            observed.start(grid, ArrayRecord(model.state_dict()), num_rounds=1)

        run_inline(server, client_app(images, spec), len(images))
        found = read_run(Path(folder) / "run").images
        counts = Counter(clients=len(images), attacked=len(found))
        for one in found:
            shown = np.asarray(Image.open(Path(folder) / "run" / one.path), dtype=float)
            shown = shown[None] if shown.ndim == 2 else shown.transpose(2, 0, 1)
            true = (255 * pixels[one.client_id]).round().numpy()
            counts["right"] += bool(np.abs(shown - true).max() <= 1)
    return counts


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--first-seed", type=int, default=lab.REPORTED_FROM)
    parser.add_argument("--data", default="", help="rows whose data's name holds this")
    parser.add_argument("--rows", type=int, nargs="*", help="rows by number; all by default")
    given = lab.start(parser)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    lab.print_header(
        "data", "own", "alone", "interpolated", "clients", "attacked", "right", "CPU s"
    )
    for number, (name, owns, alone, share) in enumerate(ROWS):
        if given.data not in name or (given.rows and number not in given.rows):
            continue
        pixels = images_of(given.root, name)
        chosen = torch.randperm(len(pixels), generator=lab.generator(given.first_seed))[:CLIENTS]
        held, inputs = [], []
        for client, index in enumerate(chosen.tolist()):
            one = pixels[index]
            if client < share * CLIENTS:
                half = F.interpolate(one[None], scale_factor=0.9, mode="bilinear")
                one = F.interpolate(half, size=one.shape[1:], mode="bilinear")[0]
            statistics = public_statistics(owns[client % len(owns)], len(one))
            spec = InputSpec((one.shape[0], one.shape[1], one.shape[2]), 10, *statistics)
            if owns == ("0 to 16",):
                one = (16 * one).round() / 16
            held.append(one)
            inputs.append(spec.normalize(one))
        parts = [[i] for i in range(CLIENTS)] if alone else [list(range(CLIENTS))]
        counts: Counter[str] = Counter()
        with lab.Stopwatch() as watch:
            for part in parts:
                counts += attacked([inputs[i] for i in part], [held[i] for i in part], spec)
        cells = (counts["clients"], counts["attacked"], counts["right"], f"{watch.seconds:.0f}")
        row = (name, " / ".join(owns), "yes" if alone else "no", f"{100 * share:.0f} %")
        lab.print_row(*row, *cells)


if __name__ == "__main__":
    main()
