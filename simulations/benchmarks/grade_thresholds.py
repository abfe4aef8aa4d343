r"""Where the grades of a report begin, measured by identification.

    python -m simulations.benchmarks.grade_thresholds --root FOLDER --backbone FILE \
        --first 100 --images 10

spoils images of CIFAR-10 and MNIST in known ways and by attacks that end early or see noise, and
asks three judges which of 101 candidates each result shows: the nearest by squared error, by SSIM
and by LPIPS (SqueezeNet). The candidates are the original and 100 other test images; a blind guess
is right once in 101. A judge never sees the number that a grade is made of in its own test: PSNR's
thresholds are judged by LPIPS and SSIM, those of SSIM by LPIPS and squared error.

It prints how often the judges are right by PSNR and SSIM above the blind guess, the thresholds that
follow from it, and the error rates of the grades. ``--first`` below 100 is for development.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import flwr_leakage
from flwr_leakage.attacks import GradientInversion
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Lpips
from flwr_leakage.metrics.perceptual import prepare_images
from flwr_leakage.metrics.pixel import mse, psnr, ssim
from flwr_leakage.models import LeNet, initialize
from flwr_leakage.records import Batch, InputSpec
from flwr_leakage.report.grades import GRADES, grade
from simulations.benchmarks import lab

# isort: split
from torchvision.transforms.functional import gaussian_blur

POOL, POOL_FROM = 100, 500
"""The other candidates: test images that are never spoilt."""
JUDGES = ("error", "ssim", "lpips")
NOISE = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
BLUR = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0)
CONTRAST = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
MIXED = (0.9, 0.75, 0.6, 0.5, 0.4, 0.25)
STAGES = ((10, 0.0), (30, 0.0), (100, 0.0), (100, 0.1), (100, 0.5), (100, 2.0))
"""Iterations of the attack, and noise on the gradient relative to its own size."""


@dataclass(frozen=True)
class Spoilt:
    """One spoilt image.

    Attributes:
        dataset: where it is from.
        how: what was done to it.
        nearer: its PSNR above that of the blind guess, dB.
        structure: its SSIM above that of the blind guess.
        lpips: to the original.
        right: by judge, whether it picks the original.
    """

    dataset: str
    how: str
    nearer: float
    structure: float
    lpips: float
    right: dict[str, bool]

    @property
    def grade(self) -> str:
        """By the report's rule from the margins alone: ``exact`` counts as ``recognisable``."""
        return grade(self.nearer, 0.0, self.structure, 0.0) or ""


def spoil(
    images: Batch, others: Tensor, guess: Tensor, spec: InputSpec
) -> Iterator[tuple[str, Tensor]]:
    """Yield what was done, and the spoilt images in the order of the originals."""
    generator, pixels = lab.generator(1), images.inputs
    for std in NOISE:
        noise = torch.randn(pixels.shape, generator=generator)
        yield f"noise {std:g}", (pixels + std * noise).clamp(0, 1)
    for std in BLUR:
        yield f"blur {std:g}", gaussian_blur(pixels, [15, 15], [std, std])
    for share in CONTRAST:
        noise = 0.1 * torch.randn(pixels.shape, generator=generator)
        yield f"contrast {share:g}", (guess + share * (pixels - guess) + noise).clamp(0, 1)
    for share in MIXED:
        yield f"mixed {share:g}", share * pixels + (1 - share) * others
    yield "blind guess", guess.expand_as(pixels)
    network = initialize(LeNet(spec.shape, spec.num_classes), "uniform", lab.generator(1))
    samples = lab.normalize(images, spec)
    for iterations, noise_size in STAGES:
        stopped = _attacked(network, samples, spec, iterations, noise_size)
        yield f"attack {iterations}, noise {noise_size:g}", stopped


def _attacked(
    network: LeNet, samples: Batch, spec: InputSpec, iterations: int, noise: float
) -> Tensor:
    """What the attack has after some iterations on each gradient with noise, in pixels."""
    attack = load_preset("inverting_gradients")
    assert isinstance(attack, GradientInversion)
    stage = replace(attack, optimizer=replace(attack.optimizer, iterations=iterations))
    params = {name: value.detach() for name, value in network.named_parameters()}
    gradient_map, draws = GradientMap(network), lab.generator(2)
    gradients = []
    for i in range(len(samples)):
        gradient = gradient_map(params, samples[i : i + 1])
        gradients.append(
            {
                name: value + noise * _rms(value) * torch.randn(value.shape, generator=draws)
                for name, value in gradient.items()
            }
        )
    targets = [samples.targets[i : i + 1] for i in range(len(samples))]
    answers = flwr_leakage.attack(network, gradients, spec=spec, preset=stage, targets=targets)
    return torch.cat([spec.denormalize(a.batch.inputs).clamp(0, 1) for a in answers if a.batch])


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


@dataclass(frozen=True)
class Perception:
    """LPIPS of one image to many whose features are computed once."""

    lpips: Lpips
    features: list[Tensor]

    @staticmethod
    def of(lpips: Lpips, candidates: Tensor) -> "Perception":
        """Of the candidates (N, C, H, W)."""
        return Perception(lpips, _features(lpips, candidates))

    def distances(self, image: Tensor) -> Tensor:
        """(N,): from one image (1, C, H, W) to each candidate."""
        network = self.lpips.network()
        total = torch.zeros(len(self.features[0]))
        for layer, (own, theirs) in enumerate(
            zip(_features(self.lpips, image), self.features, strict=True)
        ):
            difference = network.lins[layer]((own - theirs) ** 2)
            total += difference.mean((1, 2, 3))
        return total


def _features(lpips: Lpips, images: Tensor) -> list[Tensor]:
    """Unit features of every layer, as LPIPS compares them."""
    network = lpips.network()
    prepared = network.scaling_layer(2 * prepare_images(images, lpips.min_size) - 1)
    with torch.no_grad():
        layers = network.net(prepared)
    return [layer / (layer.norm(dim=1, keepdim=True) + 1e-10) for layer in layers]


def _read_grey(file: Path) -> Batch:
    with np.load(file, allow_pickle=False) as stored:
        pixels = torch.tensor(stored["images"][: POOL_FROM + POOL])[:, None] / 255
        return Batch(pixels, torch.tensor(stored["labels"][: POOL_FROM + POOL]).long())


def measure(dataset: str, root: Path, first: int, count: int, lpips: Lpips) -> list[Spoilt]:
    """Spoil and judge ``count`` images of a dataset."""
    if dataset == "cifar10":
        everything, spec = lab.read_images(root / "cifar10_test.npz"), lab.CIFAR10
    else:
        everything = _read_grey(root / f"{dataset}_test.npz")
        spec = InputSpec((1, 28, 28), 10, (0.1307,), (0.3081,))
    images = everything[first : first + count]
    others = everything.inputs[first + count : first + 2 * count]
    pool = everything.inputs[POOL_FROM : POOL_FROM + POOL]
    guess = everything.inputs.mean(0, keepdim=True)
    blind_psnr = psnr(guess.expand_as(images.inputs), images.inputs)
    blind_ssim = ssim(guess.expand_as(images.inputs), images.inputs)
    perceived = [Perception.of(lpips, torch.cat([one[None], pool])) for one in images.inputs]
    found = []
    for how, spoilt in spoil(images, others, guess, spec):
        nearer = (psnr(spoilt, images.inputs) - blind_psnr).tolist()
        alike = ssim(spoilt, images.inputs).tolist()
        for i in range(count):
            candidates = torch.cat([images.inputs[i : i + 1], pool])
            one = spoilt[i : i + 1]
            many = one.expand_as(candidates)
            seen = perceived[i].distances(one)
            right = {
                "error": int(mse(many, candidates).argmin()) == 0,
                "ssim": int(ssim(many, candidates).argmax()) == 0,
                "lpips": int(seen.argmin()) == 0,
            }
            structure = alike[i] - float(blind_ssim[i])
            found.append(Spoilt(dataset, how, nearer[i], structure, float(seen[0]), right))
    return found


def curve(found: list[Spoilt], name: str, edges: tuple[float, ...]) -> list[str]:
    """How often each judge is right, by a margin above the blind guess, as Markdown rows."""
    rows = [f"| {name} above blind | n | {' | '.join(JUDGES)} |", "|---" * 5 + "|"]
    for low, high in zip((-1e9, *edges), (*edges, 1e9), strict=True):
        inside = [s for s in found if low <= getattr(s, name) < high]
        if inside:
            shares = (sum(s.right[j] for s in inside) / len(inside) for j in JUDGES)
            told = " | ".join(f"{100 * share:.0f} %" for share in shares)
            span = f"{low:g} to {high:g}".replace("-1e+09 to", "below").replace(
                "to 1e+09", "and up"
            )
            rows.append(f"| {span} | {len(inside)} | {told} |")
    return rows


def threshold(found: list[Spoilt], name: str, judges: tuple[str, ...], precision: float) -> float:
    """The least margin from which on each judge is right on a share of ``precision``."""
    ordered = sorted(found, key=lambda s: getattr(s, name), reverse=True)
    least, right = float("inf"), dict.fromkeys(judges, 0)
    window = max(30, len(found) // 50)  # of equal margins, so that the easy ones do not carry it
    for i, one in enumerate(ordered):
        for judge in judges:
            right[judge] += one.right[judge] - (
                ordered[i - window].right[judge] if i >= window else 0
            )
        if i >= window - 1:
            if min(right.values()) < precision * window:
                break
            least = getattr(one, name)
    return least


def report(found: list[Spoilt]) -> None:
    """Print curves, thresholds and error rates."""
    print("\n".join(curve(found, "nearer", (-6, -3, -1.5, 0, 0.75, 1.5, 3, 4.5, 6, 9, 12, 18))))
    print()
    print("\n".join(curve(found, "structure", (-0.1, 0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8))))
    print()
    for precision in (0.1, 0.5, 0.8, 0.9, 0.95):
        decibels = threshold(found, "nearer", ("ssim", "lpips"), precision)
        structure = threshold(found, "structure", ("error", "lpips"), precision)
        print(f"right on {precision:.0%}: from {decibels:.2f} dB, from {structure:.3f} of SSIM")
    print(f"\n| grade | n | {' | '.join(JUDGES)} | all three | none |\n" + "|---" * 7 + "|")
    for name in GRADES:
        inside = [s for s in found if s.grade == name]
        if inside:
            shares = [sum(s.right[j] for s in inside) / len(inside) for j in JUDGES]
            shares.append(sum(all(s.right.values()) for s in inside) / len(inside))
            shares.append(sum(not any(s.right.values()) for s in inside) / len(inside))
            told = " | ".join(f"{100 * share:.1f} %" for share in shares)
            print(f"| {name} | {len(inside)} | {told} |")


def main() -> None:
    """Measure and print."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    lab.add_window(parser, images=30)
    parser.add_argument("--backbone", help="SqueezeNet's features")
    parser.add_argument("--datasets", nargs="+", default=["cifar10", "mnist"])
    parser.add_argument("--save", type=Path, help="a file for every number")
    parser.add_argument("--load", type=Path, help="a file that was saved, to be told again")
    given = lab.start(parser)
    everything: list[Spoilt] = []
    if given.load:
        everything = [Spoilt(**row) for row in json.loads(given.load.read_text())]
    for dataset in given.datasets:
        if not given.load:
            lpips = Lpips("squeeze", given.backbone)
            everything += measure(dataset, given.root, given.first, given.images, lpips)
        found = [one for one in everything if one.dataset == dataset]
        print(f"\n### {dataset}: {len(found)} results\n")
        report(found)
    print(f"\n### all: {len(everything)} results\n")
    report(everything)
    if given.save:
        given.save.write_text(json.dumps([vars(one) for one in everything]))


if __name__ == "__main__":
    main()
