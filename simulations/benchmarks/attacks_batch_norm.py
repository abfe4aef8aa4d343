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

    python -m simulations.benchmarks.attacks_batch_norm --root FOLDER --network convnet --width 16 \
        --knowledge sent,withheld --epochs 0 --batches 1:4,4:4 --seed 100 --first 100

attacks by ``--attack``, with inferred labels and other weights for each batch. ``--seconds``
limits its CPU time for each batch:

``sent``       the client sends its buffers, as Flower's clients do
``withheld``   it sends none
"""

import argparse
import copy
import time
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from flwr_leakage.attacks import Adam, AttackJob, GradientInversion
from flwr_leakage.attacks.inversion.objectives import BatchNormStatistics
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Lpips, classifier_utility
from flwr_leakage.models import ResNet18
from flwr_leakage.params import Params
from flwr_leakage.records import (
    Batch,
    BatchNormKnowledge,
    Disclosure,
    InputSpec,
    Reconstruction,
    ThreatModel,
)
from simulations.benchmarks import lab

KNOWLEDGE: dict[str, BatchNormKnowledge] = {
    "exact": "exact",
    "proxy": "exact",
    "running": "running",
    "inferred": "none",
    "sent": "none",
    "withheld": "none",
}
DEFAULT = ("sent", "withheld")
"""Knowledge under which the default attacks."""
PUBLIC = 64  # training images that the attacker holds; the network never sees them
METRICS = {"psnr": 1, "ssim": 3, "lpips_squeeze": 3}
"""Decimals of each."""


def make_network(name: str, width: int) -> nn.Module:
    """ResNet-18, or three convolutions with BatchNorm and ReLU."""
    if name == "resnet18":
        return ResNet18(lab.SHAPE, lab.CLASSES, width)
    return lab.small_convnet(width=width, use_batch_norm=True)


def train_in_train_mode(network: nn.Module, images: Batch, epochs: int) -> None:
    """SGD, so that running statistics are those that a server would hold.

    Every epoch starts without momentum.
    """
    network.train()
    for _ in range(epochs):
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        lab.train(network, optimizer, lab.shuffled(images, 64))


def proxy_statistics(gradient_map: GradientMap, public: Tensor, batch_size: int) -> Params:
    """Statistics of public batches, averaged."""
    parts = [
        gradient_map.statistics(gradient_map.params, batch, gradient_map.buffers)
        for batch in public.split(batch_size)
    ]
    return {name: torch.stack([part[name] for part in parts]).mean(dim=0) for name in parts[0]}


def buffers_after(network: nn.Module, batch: Batch) -> Params:
    """The buffers of a client after one step in train mode."""
    own = copy.deepcopy(network).train()
    with torch.no_grad():
        own(batch.inputs)
    return dict(own.named_buffers())


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.add_argument("--lpips-backbone", help="SqueezeNet's weights; no LPIPS without")
    parser.add_argument("--first", type=int, default=0, help="of the test images that are attacked")
    parser.add_argument("--network", choices=["resnet18", "convnet"], default="resnet18")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--weight", type=float, default=0.02, help="of the statistics' prior")
    parser.add_argument("--relative", action="store_true", help="in units of known deviations")
    parser.add_argument("--epochs", default="0,1,4", help="attack after so many epochs")
    parser.add_argument("--batches", default="4:2,16:1", help="batch size:batches, …")
    parser.add_argument("--knowledge", default="exact,proxy,running,inferred")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--attack", default="strongest", help="preset where it knows sent buffers")
    parser.add_argument("--seconds", type=float, help="CPU time of an observation, at most")
    given = lab.start(parser)
    torch.manual_seed(given.seed)
    spec = lab.CIFAR10
    images = lab.normalize(lab.load(given.root, "train", 0, 5000), spec)
    public, training = images.inputs[-PUBLIC:], images[: -PUBLIC - 100]
    private = lab.normalize(lab.load(given.root, "test", given.first, 600), spec)
    if given.split == "train":  # tuning: images that neither the network nor the attacker holds
        private = images[-PUBLIC - 100 : -PUBLIC]
    lpips = Lpips("squeeze", given.lpips_backbone) if given.lpips_backbone else None
    network, trained = make_network(given.network, given.width), 0
    names = ("epochs", "accuracy", "batch", "statistics", "PSNR", "SSIM", "LPIPS", "n", "CPU s")
    lab.print_header(*names)
    for epochs in map(int, given.epochs.split(",")):
        train_in_train_mode(network, training, epochs - trained)
        trained = epochs
        reached = classifier_utility(network, [private]).accuracy
        gradient_map = GradientMap(network, batch_norm="batch")
        for size, count in (map(int, item.split(":")) for item in given.batches.split(",")):
            for knowledge in given.knowledge.split(","):
                columns: dict[str, list[float]] = {metric: [] for metric in METRICS}
                seconds = []
                for index in range(count):
                    if knowledge in DEFAULT:
                        torch.manual_seed(given.seed + index)
                        network = make_network(given.network, given.width)
                        train_in_train_mode(network, training, epochs)
                        gradient_map = GradientMap(network, batch_norm="batch")
                    batch = private[index * size : (index + 1) * size]
                    found, cpu = attack(
                        network, gradient_map, spec, batch, public, knowledge, given, index
                    )
                    values = lab.evaluate(found, batch, spec, Evaluator(lpips=lpips))
                    for metric in METRICS:
                        columns[metric] += values.get(metric, [])
                    seconds.append(cpu)
                lab.print_row(
                    epochs,
                    f"{100 * reached:.0f} %",
                    size,
                    knowledge,
                    *(lab.spread(columns[metric], digits) for metric, digits in METRICS.items()),
                    len(columns["psnr"]),
                    f"{np.mean(seconds):.0f}",
                )


def attack(
    network: nn.Module,
    gradient_map: GradientMap,
    spec: InputSpec,
    batch: Batch,
    public: Tensor,
    knowledge: str,
    given: argparse.Namespace,
    index: int,
) -> tuple[Reconstruction, float]:
    """The reconstruction of one batch, and CPU seconds."""
    if knowledge in DEFAULT:
        observation = lab.observe(gradient_map, batch, client_id=index)
        if knowledge == "sent":
            update = replace(observation.update, buffers=buffers_after(network, batch))
            observation = replace(observation, update=update)
        began = time.process_time()
        job = AttackJob(
            gradient_map, spec, [observation], ThreatModel(), given.seed, max_seconds=given.seconds
        )
        (found,) = load_preset(given.attack)(job)
        return found, time.process_time() - began
    holder = public if knowledge == "proxy" else batch.inputs
    statistics = proxy_statistics(gradient_map, holder, len(batch))
    disclosed = Disclosure(batch.targets, statistics)
    observation = lab.observe(gradient_map, batch, client_id=index, disclosed=disclosed)
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
    (found,), seconds = lab.run_attack(
        solver, gradient_map, spec, [observation], threat, given.seed
    )
    return found, seconds


if __name__ == "__main__":
    main()
