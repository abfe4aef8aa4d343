"""The twelve tracks, and how their updates are made from public images."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from flwr_leakage._conf import load_part
from flwr_leakage.defenses import Defense, LocalRound
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, Observation
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_second_order import observe
from simulations.benchmarks.portfolio_cases import Target, load, make_target
from simulations.challenge.folder import Frozen, Secret

TRACKS = {
    "lenet": "lenet/1/clean",
    "lenet-trained-batch": "tanh-trained/4/clean",
    "quickstart-trained": "quickstart-trained/1/clean",
    "quickstart-batch": "quickstart/4/clean",
    "quickstart-steps": "quickstart/4/steps-4",
    "relu-trained": "relu-trained/1/clean",
    "relu-pruned": "relu/1/pruned-0.9",
    "relu-noise": "relu/1/noise-1e-2",
    "mlp-digits": "mlp/8/clean/mnist",
    "mlp-fashion": "mlp/32/clean/fashion_mnist",
    "pool-trained-pair": "pool-trained/2/clean/fashion_mnist",
    "resnet18-trained": "resnet18-trained/1/clean",
}
"""For each track, the case (:mod:`.portfolio_cases`) that its updates are made by."""

UPDATES = 5
"""Number of updates in a track."""

POOL = 100
"""Number of test images among which an original is looked for."""


def starts(first: int) -> dict[str, int]:
    """Return the first image of each track, one track's images behind another's.

    Args:
        first: the first image of the first track; trained networks learn from those before 4,000.
    """
    found: dict[str, int] = {}
    for track, case in TRACKS.items():
        found[track] = first
        first += UPDATES * int(case.split("/")[1])
    return found


def updates(
    track: str, root: Path, first: int, seed: int, defense: str = "none"
) -> Iterator[tuple[Frozen, Secret]]:
    """Return the updates of a track, with what their server does not know.

    A trained network is the same in all updates of a track; others have weights of their own.

    Args:
        track: one of ``TRACKS``.
        root: the folder of the images.
        first: the first image of the track, of those that no trained network learned from.
        seed: of weights and of defenses.
        defense: the name of a defense that each client applies besides.

    Raises:
        ValueError: the defense needs what a client of one update does not have.
    """
    case = TRACKS[track]
    name, count, setting, *rest = case.split("/")
    target = make_target(case, root, "train", first, seed)
    dataset, factor = rest[0] if rest else "cifar10", 1 if "quickstart" in name else 2
    pool = load(root, "test", 0, POOL, factor, dataset).inputs
    for number in range(UPDATES):
        if number:
            begin = first + number * int(count)
            if name.endswith("-trained"):
                pixels = load(root, "train", begin, int(count), factor, dataset)
                samples = lab.normalize(pixels, target.spec)
                seen, _ = observe(target.network, samples, setting, begin, seed + number)
                target = replace(target, pixels=pixels, seen=seen)
            else:
                target = make_target(case, root, "train", begin, seed + number)
        seen = replace(target.seen, server_round=number + 1, client_id=0)
        if defense != "none":
            seen = _defended(target, seen, load_part("defense", defense), seed + number)
        kind = name.partition("-")[0]
        yield Frozen(track, kind, target.spec, seen), Secret(target.pixels, pool)


def _defended(target: Target, seen: Observation, defense: Defense, seed: int) -> Observation:
    """Return the update as a client with a defense sends it.

    Raises:
        ValueError: the defense changes the samples that the client trains on.
    """
    gradient_map, samples = GradientMap(target.network), lab.normalize(target.pixels, target.spec)
    draws = Reproducible.from_seed(seed, purpose="defense")
    encoded: Batch = defense.on_batch(samples, target.spec.num_classes, draws)
    if not torch.equal(encoded.inputs, samples.inputs):
        raise ValueError("a defense that mixes samples is none of a frozen update.")
    local_round = LocalRound(gradient_map, seen.params, seen.buffers, samples, encoded)
    return replace(seen, update=defense.on_update(seen.update, draws, local_round))
