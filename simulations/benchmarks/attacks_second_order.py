"""Second-order attacks where the exact ones end: noise, pruning, local steps, batches.

    python -m simulations.benchmarks.attacks_second_order --root FOLDER \
        --networks relu,relu-trained --settings noise-1e-3,noise-1e-2,pruned-0.5,pruned-0.9,steps-3

prints a Markdown table, a row for each network, setting and method. The first of ``--methods`` is a
preset with a budget of its own, as exact attacks are; every other one gets the same CPU time, by
laying its schedule over as many iterations as fit (a short trial measures an iteration).
``breaching:NAME`` needs ``breaching==0.1.2`` (extra ``benchmark``) and takes single steps only.
Weights are drawn from ``--seeds``, images are CIFAR-10 test images from ``--first`` on, others for
every seed; labels are inferred. Noise is this project's defense in units of the update's norm, or
(``rows-1e-2``) of each tensor's root mean square; pruning is of the whole update; ``steps-3`` are
three steps on one image (``steps-3@0.2`` at a rate of 0.2 in place of 0.05), ``batch-4`` is one
step on four.

``--bounds N`` adds, for the first N images of a cell, what the linearised Bayesian posterior would
reach (:mod:`simulations.benchmarks.limits`). Pruned entries count as Gaussian with variance τ²/3.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from flwr_leakage.attacks.inversion.gauss_newton import GaussNewton
from flwr_leakage.attacks.one_by_one import ExactAttack
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.defenses.noise import GaussianNoise
from flwr_leakage.defenses.pruning import GradientPruning
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.metrics.matching import match_samples
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    Update,
)
from simulations.benchmarks.attacks_deep import affordable, attacking
from simulations.benchmarks.lab import CIFAR10, load, make_network, run_attack
from simulations.benchmarks.limits import linearised_limit

STEP = 0.05
"""Learning rate of several local steps, where the setting tells none."""


def observe(
    network: nn.Module, batch: Batch, setting: str, index: int, seed: int
) -> tuple[Observation, Tensor | None]:
    """What the server sees under a setting, and the noise's σ of every entry, if there is any."""
    kind, _, value = setting.partition("-")
    gradient_map = GradientMap(network)
    params, buffers = gradient_map.params, gradient_map.buffers
    schedule = LocalSchedule(1.0, batch_size=len(batch))
    if kind == "steps":
        steps, _, rate = value.partition("@")
        schedule = LocalSchedule(float(rate or STEP), int(steps), len(batch))
    delta = local_update(gradient_map, params, batch, schedule, buffers)
    delta = {name: change.detach() for name, change in delta.items()}
    update = Update(delta, buffers, schedule, len(batch))
    generator, draws = torch.Generator().manual_seed(seed), Reproducible.from_seed(seed)
    noise = None
    if kind == "noise":
        rms = float(ravel(delta).square().mean().sqrt())
        noise = torch.full_like(ravel(delta), float(value) * rms)
        update = GaussianNoise(float(value), relative_to="norm").on_update(update, draws)
    elif kind == "rows":
        sizes = {k: float(value) * v.square().mean().sqrt() for k, v in delta.items()}
        noise = torch.cat([size.expand(delta[k].numel()) for k, size in sizes.items()])
        noised = {
            k: v + sizes[k] * torch.randn(v.shape, generator=generator) for k, v in delta.items()
        }
        update = Update(noised, buffers, schedule, len(batch))
    elif kind == "pruned":
        update = GradientPruning(float(value)).on_update(update, draws)
    return Observation(1, index, params, buffers, update), noise


def psnr(found: Tensor | None, pixels: Tensor, spec: InputSpec) -> list[float]:
    """In dB, of every private image, assigned by the least squared error; 0 for none found."""
    if found is None:
        return [0.0] * len(pixels)
    images = spec.denormalize(found).clamp(0, 1)
    matched = images[match_samples(pixels, images)]
    errors = (matched - pixels).square().flatten(1).mean(1).clamp_min(1e-12)
    return [float(value) for value in -10 * errors.log10()]


def run(
    method: str,
    network: nn.Module,
    spec: InputSpec,
    seen: Observation,
    iterations: int,
) -> tuple[Tensor | None, float, str]:
    """Inputs, CPU seconds and what the attack says."""
    if iterations:
        outcome = attacking(method, network, spec)([seen], iterations)
        return outcome.found[0], outcome.seconds[0], f"{iterations} iterations"
    (result,), seconds = run_attack(load_preset(method), GradientMap(network), spec, [seen])
    if result.batch is None:
        return None, seconds, result.error
    stats = {k: v for k, v in result.stats.items() if isinstance(v, int | float | str)}
    return result.batch.inputs, seconds, json.dumps({**stats, "objective": result.objective})


def main() -> None:
    """Read the command line, run, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--networks", default="relu,relu-trained")
    parser.add_argument(
        "--settings", default="clean,noise-1e-3,noise-1e-2,pruned-0.5,pruned-0.9,steps-3"
    )
    parser.add_argument("--methods", default="gauss_newton,inverting_gradients")
    parser.add_argument("--seeds", default="100,101", help="of the weights")
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--targets", type=int, default=4, help="of each seed")
    parser.add_argument("--bounds", type=int, default=0, help="of the first targets of a cell")
    parser.add_argument("--seconds", type=float, default=0.0, help="0: those of the first method")
    parser.add_argument("--output", type=Path, help="JSON lines, appended")
    given = parser.parse_args()
    torch.set_num_threads(1)
    spec = CIFAR10
    seeds = [int(seed) for seed in given.seeds.split(",")]
    print(
        f"\nCIFAR-10 {given.split} images from {given.first}, weights of seeds {given.seeds}, "
        "labels inferred, one thread.\n"
    )
    print("| network | setting | method | n | mean PSNR, dB | median | worst | CPU s | bound, dB |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in given.networks.split(","):
        networks = [make_network(name, spec, given.root, seed) for seed in seeds]
        for setting in given.settings.split(","):
            _cell(given, spec, name, list(zip(seeds, networks, strict=True)), setting)


def _cell(
    given: argparse.Namespace,
    spec: InputSpec,
    name: str,
    networks: Sequence[tuple[int, nn.Module]],
    setting: str,
) -> None:
    """All rows of one network and setting."""
    count = int(setting.partition("-")[2]) if setting.startswith("batch") else 1
    cases = []
    for position, (seed, network) in enumerate(networks):
        for target in range(given.targets):
            first = given.first + count * (position * given.targets + target)
            truth = load(given.root, given.split, first, count)
            pixels, batch = truth.inputs, Batch(spec.normalize(truth.inputs), truth.targets)
            seen, noise = observe(network, batch, setting, first, seed)
            cases.append((seed, network, first, batch, pixels, seen, noise))
    bounds = [
        linearised_limit(network, spec, batch, seen, noise).psnr
        for _, network, _, batch, _, seen, noise in cases[: given.bounds]
    ]
    budget = given.seconds
    for method in given.methods.split(","):
        if method.startswith("breaching:") and setting.startswith("steps"):
            print(f"| {name} | {setting} | {method} | not run | | | | | |", flush=True)
            continue
        iterations = 0
        attack = None if ":" in method else load_preset(method)
        if not isinstance(attack, GaussNewton | ExactAttack):
            _, network, _, _, _, seen, _ = cases[0]
            iterations = affordable(attacking(method, network, spec), [seen], budget)
        values, seconds = [], []
        for seed, network, first, _, pixels, seen, _ in cases:
            found, spent, said = run(method, network, spec, seen, iterations)
            each = psnr(found, pixels, spec)
            values += each
            seconds.append(spent)
            if given.output is not None:
                row = {"network": name, "setting": setting, "method": method, "seed": seed}
                row |= {"image": first, "psnr": each, "cpu_seconds": spent, "said": said}
                with given.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        budget = budget or float(np.mean(seconds))
        bound = f"{np.mean(bounds):.1f} ({len(bounds)})" if bounds else ""
        print(
            f"| {name} | {setting} | {method} | {len(values)} | {np.mean(values):.1f} "
            f"| {np.median(values):.1f} | {np.min(values):.1f} | {np.mean(seconds):.1f} "
            f"| {bound} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
