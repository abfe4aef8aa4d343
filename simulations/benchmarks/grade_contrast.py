"""What images that show nothing gain where brightness and contrast are free.

    python -m simulations.benchmarks.grade_contrast --root FOLDER

grants every result the one brightness and contrast that suit its original best, and the same to the
blind guess. It prints a Markdown row a data set and a kind of result, for 300 test images from 100
on: PSNR above the fitted blind guess (median, 99th percentile, largest), and how many of the
results the fit raises to “recognisable”. Results that know nothing of their original must not be
raised: noise, the mean image, one flat colour, another image, the nearest of sixteen others,
another image of the same class, the mean of the class. Two kinds do know it: the original at a
tenth of its contrast, and at a fifth with noise.

The original is ranked among all 300 by its likeness up to brightness and contrast; the last column
counts how often it is the likeliest.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.metrics import Reference, identification_ranks
from flwr_leakage.metrics.pixel import fit_brightness_and_contrast, psnr
from flwr_leakage.records import Batch
from flwr_leakage.report.grades import AFFINE_DB
from simulations.benchmarks import lab

COUNT = 300
"""Images a data set."""


def fitted_psnr(found: Tensor, truth: Tensor) -> Tensor:
    """Return PSNR in dB after the best brightness and contrast of each image, at most 120."""
    return psnr(fit_brightness_and_contrast(found, truth), truth).clamp_max(120)


def results(truth: Batch, public: Batch, stream: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield the kinds of results with one image for each original."""
    images, count, shape = truth.inputs, len(truth), truth.inputs.shape
    yield "mean image", public.inputs.mean(0).expand_as(images)
    yield "one flat colour", public.inputs.mean((0, 2, 3), keepdim=True).expand_as(images)
    yield "noise", torch.rand(shape, generator=stream).to(images)
    coarse = torch.rand(count, shape[1], 8, 8, generator=stream)
    smooth = F.interpolate(coarse, shape[2:], mode="bilinear", align_corners=False)
    yield "smooth noise", smooth.to(images)
    yield "another image", images.roll(1, 0)
    others, alike = [], []
    for i in range(count):
        drawn = (i + 1 + torch.randperm(count - 1, generator=stream)[:16]) % count
        near = fitted_psnr(images[drawn], images[i].expand(16, *shape[1:]))
        others.append(images[drawn[near.argmax()]])
        same = [j for j in (truth.targets == truth.targets[i]).nonzero().flatten() if j != i]
        alike.append(images[same[int(torch.randint(len(same), (1,), generator=stream))]])
    yield "nearest of sixteen others", torch.stack(others)
    yield "another of its class", torch.stack(alike)
    means = [public.inputs[public.targets == k].mean(0) for k in range(lab.CLASSES)]
    yield "mean of its class", torch.stack([means[int(k)] for k in truth.targets])
    yield "original, contrast 0.1", 0.5 + 0.1 * (images - 0.5)
    noise = torch.randn(shape, generator=stream).to(images)
    yield "original, contrast 0.2, noise 0.02", 0.5 + 0.2 * (images - 0.5) + 0.02 * noise


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    given = lab.start(parser)
    lab.print_header("data", "result", "median, dB", "99 %", "largest", "raised", "likeliest")
    for name in ("cifar10", "fashion_mnist", "mnist"):
        read = lab.read_images
        truth = read(given.root / f"{name}_test.npz", lab.REPORTED_FROM, COUNT)
        public = read(given.root / f"{name}_train.npz", 0, 4000)
        truth = Batch(truth.inputs.double(), truth.targets)
        public = Batch(public.inputs.double(), public.targets)
        guess = public.inputs.mean(0)
        blind = fitted_psnr(guess.expand_as(truth.inputs), truth.inputs)
        reference = Reference(guess, truth.inputs)
        for kind, found in results(truth, public, lab.generator(lab.REPORTED_FROM)):
            gain = fitted_psnr(found, truth.inputs) - blind
            ranks, _ = identification_ranks(found, truth.inputs, reference, up_to_brightness=True)
            spread = [f"{gain.quantile(q):.1f}" for q in (0.5, 0.99, 1.0)]
            raised = int((gain >= AFFINE_DB).sum())
            lab.print_row(name, kind, *spread, f"{raised} of {COUNT}", int((ranks == 1).sum()))


if __name__ == "__main__":
    main()
