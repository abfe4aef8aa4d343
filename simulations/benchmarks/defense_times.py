"""What a defense adds to a client's training time.

    python -m simulations.benchmarks.defense_times --data-root FOLDER

prints CPU time against none for two networks, in two ways. *Step*: clients of one step on 32
images, so that every gradient is defended, as the papers train; images are encoded an epoch at a
time. *Round*: the Flower client that ``simulations/run.py`` runs, from the message it receives to
its reply: two local epochs of 256 images in mini-batches of 32, then one defense of the update.
``FOLDER`` is as in ``defense_table``; *round* uses the embedded digits.

All defenses take turns in blocks of a fraction of a second; each turn gives a ratio to the
undefended block of the same turn. Printed are the median ratio over turns and its quartiles:
what else the machine does changes both blocks of a turn alike.
"""

import time
from collections.abc import Callable
from statistics import quantiles

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import nn

from flwr_leakage.data import ImageDataset
from flwr_leakage.defenses import (
    Chain,
    Defense,
    GaussianNoise,
    GradientPruning,
    InstaHide,
    LaplacianNoise,
    MixUp,
    NoDefense,
)
from flwr_leakage.flower.inline_grid import InlineGrid
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import LeNet, ResNet8
from flwr_leakage.simulation.apps import make_client_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import compose
from simulations.benchmarks import lab
from simulations.benchmarks.defense_lab import train

MIXING: dict[str, Defense] = {
    "MixUp 4": MixUp(4),
    "MixUp 6": MixUp(6),
    "Intra-InstaHide 4": InstaHide(4),
    "Intra-InstaHide 6": InstaHide(6),
    "MixUp 4 + pruning 0.9": Chain([MixUp(4), GradientPruning(0.9)]),
    "Intra-InstaHide 4 + pruning 0.9": Chain([InstaHide(4), GradientPruning(0.9)]),
}
"""Those that mix images, as Huang et al. 2021 combine them."""

NONE = "none"
DEFENSES: dict[str, Defense] = {
    NONE: NoDefense(),
    "pruning 0.5": GradientPruning(0.5),
    "pruning 0.9": GradientPruning(0.9),
    "pruning 0.999": GradientPruning(0.999),
    "Gaussian noise": GaussianNoise(0.1),
    "Laplacian noise": LaplacianNoise(0.1),
    **MIXING,
}
OVERRIDES = {
    NONE: ["defense=none"],
    "pruning 0.5": ["defense=pruning", "defense.prune_ratio=0.5"],
    "pruning 0.9": ["defense=pruning", "defense.prune_ratio=0.9"],
    "pruning 0.999": ["defense=pruning", "defense.prune_ratio=0.999"],
    "Gaussian noise": ["defense=gaussian"],
    "Laplacian noise": ["defense=laplacian"],
    "MixUp 4": ["defense=mixup"],
    "MixUp 6": ["defense=mixup", "defense.k=6"],
    "Intra-InstaHide 4": ["defense=instahide"],
    "Intra-InstaHide 6": ["defense=instahide", "defense.k=6"],
    "MixUp 4 + pruning 0.9": ["defense=pruning_mixup"],
    "Intra-InstaHide 4 + pruning 0.9": ["defense=pruning_instahide"],
}
Block = Callable[[], float]
"""A block of training: its CPU seconds."""


def step_block(model: nn.Module, data: ImageDataset, defense: Defense) -> Block:
    """One epoch of one-step rounds of one client, encoding included."""
    gradient_map = GradientMap(model)

    def run() -> float:
        trained = train(
            gradient_map,
            data,
            None,
            defense,
            rounds=len(data) // 32,
            clients=1,
            batch_size=32,
            learning_rate=0.01,
            seed=0,
        )
        return trained.cpu_seconds

    return run


def round_block(model: str, defense: str) -> Block:
    """One round of the Flower client: two epochs of 256 images, then the defense."""
    overrides = [
        "experiment=equal_clients",
        f"model={model}",
        *OVERRIDES[defense],
        "attack=none",
        "score=none",
        "client.num_examples=256",
        "client.batch_size=32",
        "client.num_steps=16",
        "client.learning_rate=0.01",
    ]
    config = compose(overrides, "unused")
    grid = InlineGrid(make_client_app(lambda _: build(config)), 10)
    node = next(iter(grid.get_node_ids()))

    def run() -> float:
        # Only the latest experiments stay built: this one is, before the clock starts.
        arrays = ArrayRecord(build(config).network.state_dict())
        content = RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
        message = grid.create_message(content, "train", node, "1")
        start = time.process_time()
        (reply,) = grid.send_and_receive([message])
        seconds = time.process_time() - start
        assert not reply.has_error(), reply.error
        return seconds

    return run


def ratios(blocks: dict[str, Block], turns: int) -> dict[str, tuple[float, float, float]]:
    """Lower quartile, median and upper quartile over turns of each block's time against none."""
    seen: dict[str, list[float]] = {name: [] for name in blocks}
    for turn in range(turns + 1):
        seconds = {name: run() for name, run in blocks.items()}
        if turn:  # The first one warms caches.
            for name, value in seconds.items():
                seen[name].append(value / seconds[NONE])
    return {name: tuple(quantiles(values, n=4)) for name, values in seen.items()}  # type: ignore[misc]


def first_images(data: ImageDataset, count: int) -> ImageDataset:
    """The dataset's first images."""
    return ImageDataset(
        data.name, data.images[:count], data.labels[:count], data.class_names, data.mean, data.std
    )


def main() -> None:
    """Print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--data-root", default=None)
    parser.add_argument("--turns", type=int, default=20)
    arguments = lab.start(parser)
    data, _ = lab.load_datasets(arguments.data_root)
    shape, classes = data.spec.shape, data.spec.num_classes
    networks = {
        "LeNet": LeNet(shape, classes, 12, 3, activation="tanh"),
        "ResNet-8": ResNet8(shape, classes),
    }
    columns: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name, model in networks.items():
        few = first_images(data, 1024 if name == "LeNet" else 256)
        blocks = {d: step_block(model, few, defense) for d, defense in DEFENSES.items()}
        columns[f"{name}, step"] = ratios(blocks, arguments.turns)
    for name, preset in (("LeNet", "lenet"), ("ResNet-8", "resnet8")):
        blocks = {d: round_block(preset, d) for d in DEFENSES}
        columns[f"{name}, round"] = ratios(blocks, arguments.turns)
    lab.print_header("defense", *columns)
    for name in DEFENSES:
        cells = ("{1:.2f} ({0:.2f}–{2:.2f})".format(*column[name]) for column in columns.values())
        lab.print_row(name, *cells)


if __name__ == "__main__":
    main()
