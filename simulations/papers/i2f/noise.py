"""Attacks on gradients with Gaussian noise, which several experiments share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulations.papers.findings import Row
from simulations.papers.i2f.influence import Influence
from simulations.papers.i2f.records import attack_rows, gaussian
from simulations.papers.i2f.victim import Victim, test_images
from simulations.papers.lab import Lab
from simulations.papers.parts import blocks

UNDAMPED_INPUTS = 1024


@dataclass(frozen=True)
class Panel:
    """A panel of a figure: who is attacked how, and for how long.

    Attributes:
        victim: the network and its data.
        attack: ``DGL`` or ``GS``.
        iterations: of the attack.
    """

    victim: Victim
    attack: str
    iterations: int

    def __str__(self) -> str:
        return f"{self.victim} {self.attack}"


@dataclass(frozen=True)
class Noise:
    """Which gradients are perturbed by how much.

    Attributes:
        variances: of the noise on each entry.
        images: successive test images.
        first: the first of them; below 100 for development, from there on for reporting.
        seeds: of weights, noise and starts; each has all images.
        dampings: absolute ε of I²F; 0 is the undamped one (ε = 1e-6 λmax), which takes hundreds of
            products and is left out of images of more than 1,024 values. I_lb is always there.
    """

    variances: Sequence[float]
    images: int
    first: int
    seeds: Sequence[int]
    dampings: Sequence[float] = (0.0, 0.1, 1.0, 10.0)

    def __post_init__(self) -> None:
        for name in ("variances", "seeds", "dampings"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


def noise_rows(lab: Lab, panel: Panel, noise: Noise) -> list[Row]:
    """One row for each image, seed and variance; a part is a block of a seed, kept for all I²F."""
    shared = replace(lab, part=replace(lab.part, folder=lab.part.folder.with_name("i2f")))
    found: list[Row] = []
    alone = [
        replace(noise, seeds=(seed,), first=first, images=images)
        for seed in noise.seeds
        for first, images in blocks(noise.first, noise.images)
    ]
    for part in alone:
        (seed,) = part.seeds

        def compute(part: Noise = part, seed: int = seed) -> list[Row]:
            network = panel.victim.build(lab, seed).to(lab.device)
            batch, spec = test_images(lab, panel.victim.data, part.first, part.images)
            influence = Influence(network, batch)
            return attack_rows(
                network,
                batch,
                spec,
                influence,
                gaussian(influence, part.variances, seed, part.first),
                panel.attack,
                panel.iterations,
                seed,
                part.first,
                tuple(damping for damping in part.dampings if damping > 0),
                undamped=0 in part.dampings and batch.inputs[0].numel() <= UNDAMPED_INPUTS,
                lpips=lab.lpips,
            )

        settings = {"panel": panel, "noise": part}
        found += [
            {"panel": str(panel), "variance": float(str(row["perturbation"])), **row}
            for row in shared.rows(f"{panel}, seed {seed}", settings, compute)
        ]
    return found
