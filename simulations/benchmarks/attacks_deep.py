"""Attack gradients of deep ReLU networks with this project's presets and with breaching.

    python -m simulations.benchmarks.attacks_deep --root FOLDER --network resnet18 \
        --methods breaching:invertinggradients,breaching:modern,feature_recursion --iterations 300

lays every method's schedule over 300 iterations (``feature_recursion`` has its own). With
``--seconds`` instead, a short trial measures what an iteration costs, and every method gets as
many as fit into those CPU seconds an image. It prints a Markdown table, and appends a JSON line
an image to ``--output``, so that methods may be run apart. One thread, one image at a time;
``--together`` attacks all images in one call. The folder holds ``cifar10_test.npz`` and
``cifar10_train.npz``; the methods of ``breaching`` need ``breaching==0.1.2`` (extra
``benchmark``).
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.attacks import AttackJob, GradientInversion
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ConvNet, ResNet18
from flwr_leakage.records import InputSpec, Observation, ThreatModel
from simulations.benchmarks.attacks import (
    CLASSES,
    NORMALISATION,
    SHAPE,
    load,
    observe,
    psnr,
    run_breaching,
)

TRIAL = 6  # iterations that measure an iteration's cost


@dataclass(frozen=True)
class Outcome:
    """What one method made of some targets.

    Attributes:
        found: inputs, or ``None`` where the attack failed.
        seconds: CPU seconds a target.
        iterations: steps a target.
    """

    found: Sequence[Tensor | None]
    seconds: Sequence[float]
    iterations: int


def make_network(name: str, statistics: str, spec: InputSpec, root: Path, seed: int) -> nn.Module:
    """An untrained network in eval mode.

    ``fresh`` running statistics are those that BatchNorm starts with, mean 0 and variance 1;
    ``calibrated`` ones the averages over 1,000 training images, in batches of 100.
    """
    torch.manual_seed(seed)
    network: nn.Module = (ConvNet if name == "convnet" else ResNet18)(SHAPE, CLASSES)
    if statistics == "calibrated":
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # a plain average
        inputs = spec.normalize(load(root, "train", 1000, 1000)[0])
        with torch.no_grad():
            for batch in inputs.split(100):
                network.train()(batch)
    return network.eval()


def run_preset(
    name: str, network: nn.Module, spec: InputSpec, targets: Sequence[Observation], iterations: int
) -> Outcome:
    """A preset of this project; a gradient inversion's schedule laid over ``iterations``."""
    attack, gradient_map = load_preset(name), GradientMap(network)
    if isinstance(attack, GradientInversion):
        attack = replace(attack, optimizer=replace(attack.optimizer, iterations=iterations))
    began = time.process_time()
    results = attack(AttackJob(gradient_map, spec, targets, ThreatModel()))
    seconds = (time.process_time() - began) / len(targets)
    found = [None if result.batch is None else result.batch.inputs for result in results]
    return Outcome(found, [seconds] * len(targets), iterations)


def run_method(
    name: str, network: nn.Module, spec: InputSpec, targets: Sequence[Observation], iterations: int
) -> Outcome:
    """A preset, or a configuration of breaching."""
    if not name.startswith("breaching:"):
        return run_preset(name, network, spec, targets, iterations)
    source = name.removeprefix("breaching:")
    found, seconds = run_breaching(source, network, spec, list(targets), iterations)
    return Outcome(found, seconds, iterations)


def affordable(attack: Callable[[int], Outcome], budget: float) -> int:
    """Iterations that fit into ``budget`` CPU seconds a target, by two short trials."""
    attack(1)  # the first call pays for what later ones reuse
    short, longer = (sum(attack(count).seconds) for count in (1, 1 + TRIAL))
    return max(1, round((budget - short) / ((longer - short) / TRIAL)))


def main() -> None:
    """Read the command line, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--network", choices=["convnet", "resnet18"], default="resnet18")
    parser.add_argument("--statistics", choices=["fresh", "calibrated"], default="fresh")
    parser.add_argument("--methods", default="breaching:invertinggradients,feature_recursion")
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=53.0, help="CPU seconds an image")
    parser.add_argument("--iterations", type=int, default=0, help="instead of --seconds")
    parser.add_argument("--together", action="store_true", help="all targets in one call")
    parser.add_argument("--output", type=Path, help="JSON lines, appended")
    parser.add_argument("--seed", type=int, default=0, help="of the network's weights")
    given = parser.parse_args()
    torch.set_num_threads(1)
    spec = InputSpec(SHAPE, CLASSES, *NORMALISATION)
    pixels, labels = load(given.root, given.split, given.first, given.images)
    network = make_network(given.network, given.statistics, spec, given.root, given.seed)
    gradient_map, inputs = GradientMap(network), spec.normalize(pixels)
    targets = [
        observe(gradient_map, inputs[i : i + 1], labels[i : i + 1], i) for i in range(len(inputs))
    ]
    print(
        f"\n{given.network}, {given.statistics} statistics, {given.images} CIFAR-10 {given.split} "
        f"images from {given.first}, weights of seed {given.seed}, labels inferred, one thread, "
        f"{'together' if given.together else 'one by one'}.\n"
    )
    print("| method | iterations | CPU s | iterations / CPU s | mean PSNR | median | worst |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for method in given.methods.split(","):
        groups = [targets] if given.together else [[target] for target in targets]
        iterations = given.iterations or affordable(
            lambda count, method=method, group=groups[0]: run_method(  # type: ignore[misc]
                method, network, spec, group, count
            ),
            given.seconds,
        )
        values: list[float] = []
        seconds: list[float] = []
        for group in groups:
            outcome = run_method(method, network, spec, group, iterations)
            for found, spent in zip(outcome.found, outcome.seconds, strict=True):
                index = len(values)
                values.append(psnr(found, pixels[index : index + 1], spec))
                seconds.append(spent)
                row = {
                    **{k: str(v) for k, v in vars(given).items() if k not in ("root", "output")},
                    "method": method,
                    "image": given.first + index,
                    "iterations": iterations,
                    "psnr": values[-1],
                    "cpu_seconds": spent,
                }
                if given.output is not None:
                    with given.output.open("a") as file:
                        file.write(json.dumps(row) + "\n")
        print(
            f"| {method} | {iterations} | {np.mean(seconds):.1f} "
            f"| {iterations / np.mean(seconds):.2f} | {np.mean(values):.1f} ± {np.std(values):.1f} "
            f"| {np.median(values):.1f} | {np.min(values):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
