"""Attacks on gradients of a network at several epochs of its training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simulations.papers.findings import Row
from simulations.papers.i2f.influence import Influence
from simulations.papers.i2f.records import attack_rows, gaussian
from simulations.papers.i2f.victim import images_of_classes
from simulations.papers.lab import Lab
from simulations.papers.training import Recipe


@dataclass(frozen=True)
class TrainedVictim:
    """A network that is trained first, with the papers' SGD.

    Attributes:
        network: a class of ``flwr_leakage.models``.
        data: a name that ``Lab.data`` knows.
        epochs: the epochs at which it is attacked, 0 for before training.
        training: further arguments of ``Recipe``.
    """

    network: str
    data: str
    epochs: Sequence[int]
    training: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.network} {self.data}"

    def recipe(self, seed: int) -> Recipe:
        """How it is trained: for as many epochs as the last of ``epochs``."""
        scheme = "uniform" if self.network == "LeNet" else "default"
        settings = {"initialization": scheme, **self.training}
        last = max(self.epochs)
        kept = tuple(self.epochs)
        return Recipe(self.network, self.data, last, seed, checkpoints=kept, **settings)


def trained_rows(
    lab: Lab,
    victim: TrainedVictim,
    attack: str,
    iterations: int,
    variance: float,
    each: int,
    first: int,
    seed: int,
    epochs: Sequence[int] | None = None,
) -> list[Row]:
    """One row for each image and epoch, all images of an epoch attacked together.

    Args:
        lab: trains, and keeps finished parts.
        victim: the network.
        attack: ``DGL`` or ``GS``.
        iterations: of the attack.
        variance: of the noise.
        each: test images of every class.
        first: the first test image that may be taken.
        seed: of training, noise and starts.
        epochs: some of the victim's; all by default.
    """
    trained = lab.train(victim.recipe(seed))
    found: list[Row] = []
    for epoch in victim.epochs if epochs is None else epochs:
        network = trained.models[epoch]

        def compute(network: Any = network) -> list[Row]:
            batch, spec = images_of_classes(lab, victim.data, first, each)
            influence = Influence(network, batch)
            deltas = gaussian(influence, (variance,), seed, first)
            return attack_rows(
                network, batch, spec, influence, deltas, attack, iterations, seed, first
            )

        settings = {
            "victim": replace(victim, epochs=tuple(victim.epochs)),
            "attack": [attack, iterations, variance, each, first],
            "seed": seed,
            "epoch": epoch,
        }
        rows = lab.rows(f"{victim} {attack}, seed {seed}, epoch {epoch}", settings, compute)
        extra: Row = {"epoch": epoch, "accuracy": trained.accuracy[epoch]}
        found += [{**row, **extra} for row in rows]
    return found


@dataclass(frozen=True)
class FairnessPanel:
    """One network under one attack.

    Attributes:
        victim: attacked at all of its epochs, or at the last one.
        attack: ``DGL`` or ``GS``.
        iterations: of the attack.
    """

    victim: TrainedVictim
    attack: str
    iterations: int

    def __str__(self) -> str:
        return f"{self.victim} {self.attack}"


@dataclass(frozen=True)
class TrainedStudy:
    """Attacks on the noised gradients of trained networks.

    Attributes:
        panels: networks with the epochs at which they are attacked, and attacks.
        each: test images of every class in a block.
        first: the first test image that may be taken.
        seeds: of training, noise and starts.
        variance: of the noise.
        blocks: of images, each from 100 images after the former; a part is one.
    """

    panels: Sequence[FairnessPanel]
    each: int
    first: int
    seeds: Sequence[int]
    variance: float = 1e-3
    blocks: int = 1

    def rows(
        self, lab: Lab, panel: FairnessPanel, epochs: Sequence[int] | None = None
    ) -> list[Row]:
        """The rows of a panel for all seeds and blocks, at some of its epochs or at all."""
        settings = (panel.victim, panel.attack, panel.iterations, self.variance, self.each)
        return [
            row
            for seed in self.seeds
            for block in range(self.blocks)
            for row in trained_rows(lab, *settings, self.first + 100 * block, seed, epochs)
        ]
