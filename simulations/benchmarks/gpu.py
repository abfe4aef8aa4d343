"""First-order attacks on a GPU beside one thread of the CPU: seconds, and the images they reach.

    python -m simulations.benchmarks.gpu --root FOLDER

prints a Markdown table. Each row attacks one update by the preset ``--preset`` with as many steps
as ``--steps`` says, once through ``GradientMap(model)`` and once through
``GradientMap(model, device="cuda")``, with the same seeds. Networks are untrained, in eval mode;
images are CIFAR-10 test images from number ``--first`` on, enlarged to 64 pixels for ResNet-18 of
width 64. Labels are known. Wall time is of the second of two calls, as the first one loads
kernels. Attacks of second order, scores and tests of membership compute on the CPU wherever a model
lies, and are not part of this table.
"""

import time
from dataclasses import replace
from statistics import fmean

import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import LeNet, ResNet18, initialize
from flwr_leakage.records import Batch, Disclosure, InputSpec, Observation, ThreatModel
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_second_order import observe, psnr

LARGE = InputSpec((3, 64, 64), lab.CLASSES, lab.CIFAR10_MEAN, lab.CIFAR10_STD)


def lenet(seed: int) -> nn.Module:
    """Three convolutions of sigmoids."""
    network = LeNet(lab.SHAPE, lab.CLASSES, num_convolutions=3)
    return initialize(network, "uniform", lab.generator(seed))


ROWS = {
    "LeNet, 32 pixels": (lenet, lab.CIFAR10, (1, 16)),
    "ReLU ConvNet, 32 pixels": (lambda seed: lab.small_convnet(), lab.CIFAR10, (1, 16)),
    "ResNet-18, 64 pixels": (lambda seed: ResNet18(LARGE.shape, lab.CLASSES), LARGE, (1, 8)),
}


def moved(seen: Observation, device: str) -> Observation:
    """Return an observation whose tensors lie on a device."""
    update = replace(
        seen.update, delta={name: value.to(device) for name, value in seen.update.delta.items()}
    )
    assert seen.disclosed.targets is not None
    return replace(
        seen,
        params={name: value.to(device) for name, value in seen.params.items()},
        buffers={name: value.to(device) for name, value in seen.buffers.items()},
        update=update,
        disclosed=Disclosure(targets=seen.disclosed.targets.to(device)),
    )


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.add_argument("--first", type=int, default=lab.REPORTED_FROM)
    parser.add_argument("--preset", default="inverting_gradients")
    parser.add_argument("--steps", type=int, default=100)
    given = lab.start(parser)
    attack = load_preset(given.preset, [f"optimizer.iterations={given.steps}"])
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lab.print_header(
        "network", "images", "CPU, s", f"{name}, s", "ratio", "PSNR, CPU, dB", "PSNR, GPU, dB"
    )
    for row, (make, spec, sizes) in ROWS.items():
        for size in sizes:
            torch.manual_seed(given.seed)  # layers draw their weights from the global stream
            network = make(given.seed).eval()
            pixels = lab.load(given.root, given.split, given.first, size)
            pixels = Batch(F.interpolate(pixels.inputs, spec.shape[1:]), pixels.targets)
            seen, _ = observe(network, lab.normalize(pixels, spec), "clean", 0, given.seed)
            seen = replace(seen, disclosed=Disclosure(targets=pixels.targets))
            seconds, reached = {}, {}
            for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                job = AttackJob(
                    GradientMap(network, device=device), spec, [moved(seen, device)],
                    ThreatModel(labels="known"),
                )  # fmt: skip
                for _ in range(1 if device == "cpu" else 2):
                    began = time.perf_counter()
                    (found,) = attack(job)
                    assert found.batch is not None, found.error
                    images = found.batch.inputs.cpu()
                    seconds[device] = time.perf_counter() - began
                reached[device] = fmean(psnr(images, pixels.inputs, spec))
            there = seconds.get("cuda", float("nan"))
            lab.print_row(
                row, size, f"{seconds['cpu']:.1f}", f"{there:.1f}", f"{seconds['cpu'] / there:.1f}",
                *(f"{reached.get(device, float('nan')):.1f}" for device in ("cpu", "cuda")),
            )  # fmt: skip


if __name__ == "__main__":
    main()
