"""Attack one image through the networks that torchvision has, by ``strongest`` or one preset.

    python -m simulations.benchmarks.attacks_torchvision --root FOLDER --seed 100 --first 100 \
        --output FILE

prints a Markdown row a network and draw: PSNR, the attack that gave the answer, CPU seconds, and
what the attacks that read features said. Networks are untrained and in eval mode, with as many
outputs as CIFAR-10 has classes. ``--networks`` also takes those of :data:`NARROW`, of 11 to 12
million parameters. An image of 64 × 64 pixels is put together from four test images,
so that no pixel is interpolated; its label is that of the first. ``--size 32`` takes one image.
``--limit`` adds how many directions of the image the gradient tells, and the PSNR that it allows to
first order (:mod:`simulations.benchmarks.limits`). That takes as many products as the image has
values: 1 to 20 CPU minutes at 32 × 32 pixels. ``--output`` keeps a JSON line a row with what every
attack said, and rows that are there are not run again. One thread.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.attacks import Strongest
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec
from simulations.benchmarks import lab
from simulations.benchmarks.limits import linearised_limit

# isort: split
from torchvision import models

NETWORKS = (
    "resnet18", "resnet34", "alexnet", "vgg11_bn", "squeezenet1_1", "densenet121", "mobilenet_v2",
    "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "shufflenet_v2_x1_0",
    "regnet_y_400mf",
)  # fmt: skip


def _narrow(name: str, inputs: int, width: int) -> nn.Module:
    """One of torchvision's networks with a head of one hidden layer."""
    network = models.get_model(name, num_classes=lab.CLASSES)
    hidden, last = nn.Linear(inputs, width), nn.Linear(width, lab.CLASSES)
    network.classifier = nn.Sequential(hidden, nn.ReLU(), last)
    return network


NARROW: dict[str, Callable[[], nn.Module]] = {
    "alexnet_narrow": lambda: _narrow("alexnet", 256 * 6 * 6, 1024),
    "vgg11_bn_narrow": lambda: _narrow("vgg11_bn", 512 * 7 * 7, 64),
    "vit_small": lambda: models.VisionTransformer(64, 8, 6, 6, 384, 1536, num_classes=lab.CLASSES),
}
"""AlexNet and VGG-11 with narrow heads, and a vision transformer for 64 × 64 pixels, whose head
starts at zero, as torchvision's do."""

READERS = ("analytic", "exact_batch", "feature_matching", "feature_recursion")
"""The attacks that read features from a gradient, whose words are printed."""


def mosaic(tiles: Tensor) -> Tensor:
    """One image (1, C, 2 H, 2 W) of four (4, C, H, W), row by row."""
    upper, lower = (torch.cat(list(pair), dim=-1) for pair in (tiles[:2], tiles[2:]))
    return torch.cat([upper, lower], dim=-2)[None]


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.add_argument("--first", type=int, default=0, help="test image of the first draw")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--draws", type=int, default=1, help="each with weights and an image")
    parser.add_argument("--method", default="strongest", help="or another preset")
    parser.add_argument("--seconds", type=float, default=120.0, help="CPU budget of strongest")
    parser.add_argument("--size", type=int, choices=(32, 64), default=64, help="pixels of a side")
    parser.add_argument("--limit", action="store_true", help="that the gradient sets, beside")
    parser.add_argument("--output", type=Path, help="JSON lines, appended")
    given = lab.start(parser)
    spec = InputSpec((3, given.size, given.size), lab.CLASSES, lab.CIFAR10.mean, lab.CIFAR10.std)
    attack = load_preset(given.method)
    if isinstance(attack, Strongest):
        attack = replace(attack, max_seconds=given.seconds)
    kept = given.output.read_text().splitlines() if given.output and given.output.exists() else []
    done = {(line["network"], line["seed"]) for line in map(json.loads, kept)}
    tiles_each = (given.size // 32) ** 2
    columns = ("network", "seed", "PSNR", "told", "limit", "misfit", "attack", "CPU s")
    lab.print_header(*columns, "what reads features said")
    for name in given.networks.split(","):
        for draw in range(given.draws):
            seed = given.seed + draw
            if (name, seed) in done:
                continue
            torch.manual_seed(seed)
            narrow = NARROW.get(name)
            network = narrow() if narrow else models.get_model(name, num_classes=lab.CLASSES)
            network.eval()
            tiles = lab.load(given.root, given.split, given.first + tiles_each * draw, tiles_each)
            image = mosaic(tiles.inputs) if tiles_each > 1 else tiles.inputs
            pixels = Batch(image, tiles.targets[:1])
            samples = lab.normalize(pixels, spec)
            gradient_map = GradientMap(network)
            observation = lab.observe(gradient_map, samples)
            (found,), seconds = lab.run_attack(
                attack, gradient_map, spec, [observation], seed=given.seed
            )
            psnr = lab.psnr(
                None if found.batch is None else found.batch.inputs, pixels.inputs, spec
            )
            by = "none" if found.batch is None else str(found.stats.get("attack", given.method))
            said = {part.name: str(part) for part in found.parts}
            limit = linearised_limit(network, spec, samples, observation) if given.limit else None
            line = {
                "network": name,
                "seed": seed,
                "psnr": psnr,
                "limit": None if limit is None else asdict(limit),
                "attack": by,
                "cpu_seconds": seconds,
                "error": found.error,
                "objective": found.objective,
                "stage": str(found.stats.get("stage", "")),
                "words": said,
            }
            if given.output is not None:
                with given.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            read = "; ".join(said[each] for each in READERS if each in said)
            lab.print_row(
                name,
                seed,
                f"{psnr:.1f}",
                "" if limit is None else f"{limit.told:,} of {limit.unknowns:,}",
                "" if limit is None else f"{limit.psnr:.1f}",
                f"{found.objective:.0e}",
                by,
                f"{seconds:.0f}",
                read,
            )


if __name__ == "__main__":
    main()
