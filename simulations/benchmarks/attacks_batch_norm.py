"""Attack clients that train with BatchNorm in train mode, with more or less known of statistics.

    python -m simulations.benchmarks.attacks_batch_norm --root FOLDER --lpips-backbone FILE

prints a Markdown row a training epoch, batch size and knowledge, after Huang et al. 2021:

``exact``      the private batch's statistics are a prior (as are those derived from sent buffers)
``proxy``      those of public images, in batches of the same size, are a prior
``running``    the server's running statistics replace those of the candidate, and are a prior
``inferred``   no knowledge: the statistics are those of the candidate

The recipe is that of Huang et al.'s published code, with known labels and the weight of the prior
on statistics tuned on training images. Private images are test
images, public ones training images that the network was not trained on. One thread.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.attacks import Adam, AttackJob, BatchNormStatistics, GradientInversion
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Lpips
from flwr_leakage.models import ConvNet, ResNet18
from flwr_leakage.params import Params
from flwr_leakage.records import (
    Batch,
    BatchNormKnowledge,
    Disclosure,
    InputSpec,
    LocalSchedule,
    Observation,
    Reconstruction,
    ThreatModel,
    Update,
)
from simulations.benchmarks.attacks import CLASSES, NORMALISATION, SHAPE, load

KNOWLEDGE: dict[str, BatchNormKnowledge] = {
    "exact": "exact",
    "proxy": "exact",
    "running": "running",
    "inferred": "none",
}
PUBLIC = 64  # training images that the attacker holds; the network never sees them
METRICS = ("psnr", "ssim", "lpips_squeeze")


def make_network(name: str, width: int) -> nn.Module:
    """ResNet-18, or three convolutions with BatchNorm and ReLU."""
    if name == "resnet18":
        return ResNet18(SHAPE, CLASSES, width)
    return ConvNet(SHAPE, CLASSES, width, (1, 2, 2), (1, 2, 2), ())


def train(network: nn.Module, images: Batch, epochs: int) -> None:
    """SGD in train mode, so that running statistics are those that a server would hold."""
    for _ in range(epochs):
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        for chosen in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(images.inputs[chosen]), images.targets[chosen]).backward()
            optimizer.step()


def accuracy(network: nn.Module, images: Batch) -> float:
    """Share of right answers, in eval mode."""
    with torch.no_grad():
        found = network.eval()(images.inputs).argmax(dim=1)
    network.train()
    return float((found == images.targets).float().mean())


def proxy_statistics(gradient_map: GradientMap, public: Tensor, batch_size: int) -> Params:
    """Statistics of public batches, averaged."""
    parts = [
        gradient_map.statistics(gradient_map.params, batch, gradient_map.buffers)
        for batch in public.split(batch_size)
    ]
    return {name: torch.stack([part[name] for part in parts]).mean(dim=0) for name in parts[0]}


def observe(gradient_map: GradientMap, batch: Batch, statistics: Params, index: int) -> Observation:
    """One plain step of learning rate 1 on the batch."""
    params, buffers = gradient_map.params, gradient_map.buffers
    delta = {k: -v.detach() for k, v in gradient_map(params, batch, buffers).items()}
    schedule = LocalSchedule(1.0, batch_size=len(batch))
    return Observation(
        1,
        index,
        params,
        buffers,
        Update(delta, {}, schedule, len(batch)),
        disclosed=Disclosure(batch.targets, statistics),
    )


def main() -> None:
    """Read the command line, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--lpips-backbone", help="SqueezeNet's weights; no LPIPS without")
    parser.add_argument("--network", choices=["resnet18", "convnet"], default="resnet18")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--weight", type=float, default=0.02, help="of the statistics' prior")
    parser.add_argument("--relative", action="store_true", help="in units of known deviations")
    parser.add_argument("--epochs", default="0,1,4", help="attack after so many epochs")
    parser.add_argument("--batches", default="4:2,16:1", help="batch size:batches, …")
    parser.add_argument("--knowledge", default="exact,proxy,running,inferred")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    spec = InputSpec(SHAPE, CLASSES, *NORMALISATION)
    pixels, labels = load(given.root, "train", 0, 5000)
    images = Batch(spec.normalize(pixels), labels)
    public, training = images.inputs[-PUBLIC:], images[: -PUBLIC - 100]
    pixels, labels = load(given.root, given.split, 0, 600)
    if given.split == "train":  # tuning: images that neither the network nor the attacker holds
        pixels, labels = load(given.root, "train", 5000 - PUBLIC - 100, 100)
    private = Batch(spec.normalize(pixels), labels)
    lpips = Lpips("squeeze", given.lpips_backbone) if given.lpips_backbone else None
    network, trained = make_network(given.network, given.width).train(), 0
    print("| epochs | accuracy | batch | statistics | PSNR | SSIM | LPIPS | n | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for epochs in map(int, given.epochs.split(",")):
        train(network, training, epochs - trained)
        trained = epochs
        reached = accuracy(network, private)
        gradient_map = GradientMap(network, batch_norm="batch")
        for size, count in (map(int, item.split(":")) for item in given.batches.split(",")):
            for knowledge in given.knowledge.split(","):
                rows, seconds = [], []
                for index in range(count):
                    batch = private[index * size : (index + 1) * size]
                    found, cpu = attack(gradient_map, spec, batch, public, knowledge, given, index)
                    measured = Evaluator(lpips=lpips).evaluate(found, batch, spec).measurements
                    values = {m.name: m.values for m in measured if m.name in METRICS}
                    rows.append(np.array([values.get(m, [np.nan] * size) for m in METRICS], float))
                    seconds.append(cpu)
                table = np.concatenate(rows, axis=1)
                cells = [
                    f"{row.mean():.{digits}f} ± {row.std():.{digits}f}"
                    for row, digits in zip(table, (1, 3, 3), strict=True)
                ]
                print(
                    f"| {epochs} | {100 * reached:.0f} % | {size} | {knowledge} | "
                    f"{' | '.join(cells)} | {table.shape[1]} | {np.mean(seconds):.0f} |",
                    flush=True,
                )


def attack(
    gradient_map: GradientMap,
    spec: InputSpec,
    batch: Batch,
    public: Tensor,
    knowledge: str,
    given: argparse.Namespace,
    index: int,
) -> tuple[Reconstruction, float]:
    """The reconstruction of one batch, and CPU seconds."""
    holder = public if knowledge == "proxy" else batch.inputs
    statistics = proxy_statistics(gradient_map, holder, len(batch))
    observation = observe(gradient_map, batch, statistics, index)
    preset = load_preset("huang")
    assert isinstance(preset, GradientInversion)
    assert isinstance(preset.optimizer, Adam)
    solver = replace(
        preset,
        priors={
            **preset.priors,
            "batch_norm_statistics": BatchNormStatistics(given.weight, relative=given.relative),
        },
        optimizer=replace(preset.optimizer, iterations=given.iterations),
    )
    threat = ThreatModel("known", KNOWLEDGE[knowledge])
    began = time.process_time()
    (found,) = solver(AttackJob(gradient_map, spec, [observation], threat, given.seed))
    return found, time.process_time() - began


if __name__ == "__main__":
    main()
