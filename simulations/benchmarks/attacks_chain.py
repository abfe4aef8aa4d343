"""Images of whole batches from one update: exact features of every sample, then all images jointly.

    python -m simulations.benchmarks.attacks_chain --root FOLDER --output rows.jsonl \
        --cases quickstart/1,quickstart/4,quickstart/32,head/2,head/4,head/8

attacks batches of CIFAR-10 test images, from number 100 on, with ``--methods``: the first is a
preset with a budget of its own, every other one gets its CPU time, by laying its schedule over as
many iterations as fit (``breaching:NAME`` needs ``breaching==0.1.2``). A case is NETWORK/BATCH:
``quickstart`` is the network of Flower's PyTorch quickstart, ``head`` three convolutions and a
linear layer. ``--epochs`` has one entry a draw: of training on 4,000 training images, 0 for none.
Weights and batches are drawn from ``--first-seed`` on, others for every draw. Labels are inferred,
nothing but the update is known. One thread.

``batch_images:sharp`` goes on with each unit blurred by its own doubt, for batches of two.

``--bounds N`` adds, for the first N draws of a case, the mean of the Gaussian posterior at the true
masks and maxima, for noise of 1e-3 of each tensor: what the equations tell if all switches were
known. It is no limit for attacks with a better prior of images. It uses the truth, and no attack
sees it.

A row is appended to ``--output`` once it is known; rows that are there are not run again. The
table is that of all rows in the file.
"""

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.attacks.problem import pose
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.whole_batch.batch_images import BatchImages
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, Observation, ThreatModel
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_batches import (
    TRAINING,
    UNSEEN,
    Case,
    conv_head,
    load,
    observe,
    quickstart,
    train,
)
from simulations.benchmarks.attacks_deep import affordable, attacking
from simulations.benchmarks.attacks_second_order import psnr

NETWORKS = {"quickstart": quickstart, "head": conv_head}
SPEC = InputSpec(lab.SHAPE, lab.CLASSES, (0.5,) * 3, (0.5,) * 3)
OWN_SHARP = "batch_images:sharp"
SHARP = ("batch_images", ("sharpening.unknowns=7000", "sharpening.steps=40"))
GENEROUS = 1.3
"""Short trials overestimate an iteration: the others get no less time than they are due."""

NOISE, ITERATIONS = 1e-3, 300  # of the bound


def draw(
    root: Path, name: str, size: int, seed: int, epochs: int, first: int = UNSEEN
) -> tuple[nn.Module, Batch, Observation]:
    """A network, a batch in pixels, and its update."""
    torch.manual_seed(seed)
    network = NETWORKS[name](SPEC)
    if epochs:
        pixels, labels = load(root, "cifar10", "train")
        train(network, Batch(SPEC.normalize(pixels), labels)[:TRAINING], epochs)
    pixels, labels = load(root, "cifar10", "test")
    if first + size > len(labels):
        raise ValueError(f"--first-image must be at most {len(labels) - size}, got {first}.")
    chosen = torch.randperm(len(labels) - first, generator=lab.generator(seed))[:size] + first
    truth = Batch(pixels[chosen], labels[chosen])
    case = Case(name, NETWORKS[name], "cifar10", size)
    seen = observe(GradientMap(network), Batch(SPEC.normalize(truth.inputs), truth.targets), case)
    return network, truth, seen


def bound(network: nn.Module, truth: Batch, seen: Observation) -> float:
    """Mean PSNR of the posterior mean at the true switches, in dB."""
    problem = pose(GradientMap(network), SPEC, seen, ThreatModel()).to(torch.float64)
    model, _ = BatchImages().equations(problem, lab.generator())
    likelihood = model.likelihood(None)
    inputs = SPEC.normalize(truth.inputs).double()
    # The samples in the order in which their features were found.
    own = model.features(problem.params, inputs).clamp_min(0)
    inputs = inputs[torch.cdist(model.known.values, own).argmin(1)]
    here = Linearization(partial(model.gradient, blur=0.0, precise=True), inputs)
    sizes = (likelihood.noise * 1e6 * NOISE)[likelihood.tensors]
    prior, weights = ImagePrior.of(SPEC), sizes.square().reciprocal()

    def product(flat: Tensor) -> Tensor:
        image = here.push(prior.push(flat.reshape(inputs.shape)))
        return prior.pull(here.pull(weights * image)).flatten() + flat

    right = prior.pull(here.pull(weights * here.push(inputs - prior.grey)))
    mean, _ = conjugate_gradients(product, right.flatten(), 1e-6, ITERATIONS)
    found = SPEC.clamp(prior.inputs(mean.reshape(inputs.shape))).float()
    return statistics.fmean(psnr(found, truth.inputs, SPEC))


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended")
    parser.add_argument("--cases", default="quickstart/1,quickstart/4,quickstart/32,head/2,head/4")
    parser.add_argument("--methods", default="batch_images")
    parser.add_argument("--epochs", default="0,1,3,5", help="of training, one entry a draw")
    parser.add_argument("--first-seed", type=int, default=120)
    parser.add_argument("--first-image", type=int, default=UNSEEN, help="of the test file")
    parser.add_argument("--bounds", type=int, default=0, help="of the first draws of a case")
    given = lab.start(parser)
    rows = _rows(given.output)
    for name in given.cases.split(","):
        kind, _, size = name.partition("/")
        for number, epochs in enumerate(int(each) for each in given.epochs.split(",")):
            seed = given.first_seed + number
            case = {"case": name, "seed": seed, "epochs": epochs}
            methods = given.methods.split(",") + ["bound"] * (number < given.bounds)
            done = {row["method"]: row for row in rows if case.items() <= row.items()}
            if done.keys() >= set(methods):
                continue
            network, truth, seen = draw(
                given.root, kind, int(size), seed, epochs, given.first_image
            )
            for method in methods:
                if method in done:
                    continue
                budget = done[methods[0]]["seconds"] if method != methods[0] else 0.0
                row = case | {"method": method} | _attack(method, network, truth, seen, budget)
                done[method] = row
                rows.append(row)
                with given.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    _print(rows)


def _attack(
    method: str, network: nn.Module, truth: Batch, seen: Observation, budget: float
) -> dict[str, Any]:
    """PSNR of every image, CPU seconds, labels that are right, and what the attack says."""
    if method == "bound":
        return {"psnr": [bound(network, truth, seen)], "seconds": 0.0}
    if budget and method != OWN_SHARP:
        attack = attacking(method, network, SPEC)
        iterations = round(GENEROUS * affordable(attack, [seen], budget))
        outcome = attack([seen], iterations)
        values = psnr(outcome.found[0], truth.inputs, SPEC)
        return {"psnr": values, "seconds": outcome.seconds[0], "iterations": iterations}
    preset = load_preset(*SHARP) if method == OWN_SHARP else load_preset(method)
    (result,), seconds = lab.run_attack(preset, GradientMap(network), SPEC, [seen])
    said = {k: v for k, v in result.stats.items() if isinstance(v, int | float | str)}
    if result.batch is None:
        values = psnr(None, truth.inputs, SPEC)
        return {"psnr": values, "seconds": seconds, "said": result.error}
    values = psnr(result.batch.inputs, truth.inputs, SPEC)
    right = sorted(result.batch.targets.tolist()) == sorted(truth.targets.tolist())
    return {"psnr": values, "seconds": seconds, "labels": right, "said": said}


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _print(rows: list[dict[str, Any]]) -> None:
    print(
        "| case | method | batches | mean PSNR of each, dB (epochs) | mean | worst image | CPU s |"
    )
    print("|---|---|---|---|---|---|---|")
    for case, method in dict.fromkeys((row["case"], row["method"]) for row in rows):
        own = [row for row in rows if (row["case"], row["method"]) == (case, method)]
        means = [statistics.fmean(row["psnr"]) for row in own]
        each = ", ".join(
            f"{mean:.1f} ({row['epochs']})" for mean, row in zip(means, own, strict=True)
        )
        worst = min(min(row["psnr"]) for row in own)
        seconds = statistics.fmean(row["seconds"] for row in own)
        print(
            f"| {case} | {method} | {len(own)} | {each} | {statistics.fmean(means):.1f} "
            f"| {worst:.1f} | {seconds:.1f} |"
        )


if __name__ == "__main__":
    main()
