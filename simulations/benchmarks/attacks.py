"""Attack the same gradients with this project's presets and with breaching, in one run.

    python simulations/benchmarks/attacks.py --root ../shared/data --network lenet \
        --methods strongest,idlg,breaching:deepleakage --images 16

prints a Markdown table: PSNR, images at or above 40 dB, CPU and wall seconds an image. It needs
``cifar10_test.npz`` and ``cifar10_train.npz`` (``images`` uint8 N×32×32×3, ``labels``) in the
folder, and ``breaching==0.1.2`` (extra ``benchmark``) for its methods. One thread.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ConvNet, LeNet, initialize
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)

SHAPE, CLASSES = (3, 32, 32), 10
NORMALISATION = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
RELU_NETWORK = {
    "width": 16,
    "channel_multipliers": (1, 2, 2),
    "strides": (1, 2, 2),
    "pool_after": (),
    "use_batch_norm": False,
}


def load(root: Path, split: str, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1] and labels."""
    with np.load(root / f"cifar10_{split}.npz", allow_pickle=False) as file:
        images = torch.tensor(file["images"][first : first + count])
        labels = torch.tensor(file["labels"][first : first + count])
    return images.permute(0, 3, 1, 2).float() / 255, labels


def make_network(name: str, spec: InputSpec, root: Path, seed: int) -> nn.Module:
    """LeNet with three or four convolutions, or the ReLU network, untrained or trained."""
    torch.manual_seed(seed)
    if name.startswith("lenet"):
        network: nn.Module = LeNet(SHAPE, CLASSES, num_convolutions=4 if name == "lenet4" else 3)
        initialize(network, "uniform", torch.Generator().manual_seed(seed))
        return network
    network = ConvNet(SHAPE, CLASSES, **RELU_NETWORK)
    if name == "relu-trained":
        pixels, labels = load(root, "train", 0, 4000)
        inputs = spec.normalize(pixels)
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        for _ in range(5):
            for chosen in torch.randperm(len(inputs)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(network(inputs[chosen]), labels[chosen]).backward()
                optimizer.step()
    return network.eval()


def observe(gradient_map: GradientMap, inputs: Tensor, label: Tensor, index: int) -> Observation:
    """The gradient of one image, as one SGD step of learning rate 1."""
    params, buffers = gradient_map.params, gradient_map.buffers
    gradient = gradient_map(params, Batch(inputs, label), buffers)
    delta = {name: -value.detach() for name, value in gradient.items()}
    return Observation(1, index, params, buffers, Update(delta, buffers, LocalSchedule(1.0), 1))


def run_preset(
    name: str, network: nn.Module, spec: InputSpec, observations: list[Observation], together: bool
) -> tuple[list[Tensor | None], list[float]]:
    """Reconstructions and CPU seconds, one target at a time or all together."""
    attack, gradient_map = load_preset(name), GradientMap(network)
    found: list[Tensor | None] = []
    seconds = []
    groups = [observations] if together else [[o] for o in observations]
    for group in groups:
        began = time.process_time()
        results = attack(gradient_map, spec, group, ThreatModel(), torch.Generator().manual_seed(0))
        seconds += [(time.process_time() - began) / len(group)] * len(group)
        found += [None if r.batch is None else r.batch.inputs for r in results]
        print(
            f"{name}: {len(found)} done, objective {results[-1].objective:.1e}, "
            f"{seconds[-1]:.1f} CPU s {results[-1].error}",
            file=sys.stderr,
            flush=True,
        )
    return found, seconds


def run_breaching(
    name: str,
    network: nn.Module,
    spec: InputSpec,
    observations: list[Observation],
    iterations: int,
) -> tuple[list[Tensor | None], list[float]]:
    """The same gradients through a configuration of breaching; labels inferred by its default."""
    import breaching
    from omegaconf import OmegaConf

    config = breaching.get_attack_config(name)
    if iterations:
        config.optim.max_iterations = iterations
    config.optim.callback = 10**9
    setup = {"device": torch.device("cpu"), "dtype": torch.float32}
    metadata = OmegaConf.create(
        {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "mean": list(spec.mean),
            "std": list(spec.std),
            "normalize": True,
            "modality": "vision",
            "task": "classification",
        }
    )
    found: list[Tensor | None] = []
    seconds = []
    for observation in observations:
        torch.manual_seed(0)
        attacker = breaching.attacks.prepare_attack(
            network, torch.nn.CrossEntropyLoss(), config, setup
        )
        payload = [
            {
                "parameters": list(observation.params.values()),
                "buffers": list(observation.buffers.values()),
                "metadata": metadata,
            }
        ]
        shared = [
            {
                "gradients": [-value for value in observation.update.delta.values()],
                "buffers": None,
                "metadata": {
                    "num_data_points": 1,
                    "labels": None,
                    "local_hyperparams": None,
                },
            }
        ]
        began = time.process_time()
        result, _ = attacker.reconstruct(payload, shared, {}, dryrun=False)
        seconds.append(time.process_time() - began)
        found.append(spec.clamp(result["data"].detach()))
    return found, seconds


def psnr(found: Tensor | None, pixels: Tensor, spec: InputSpec) -> float:
    """Peak signal-to-noise ratio in dB; 0 where nothing was found, 120 at most."""
    if found is None:
        return 0.0
    error = (spec.denormalize(found).clamp(0, 1) - pixels).square().mean()
    return float(-10 * error.clamp_min(1e-12).log10())


def main() -> None:
    """Read the command line, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument(
        "--network", choices=["lenet", "lenet4", "relu", "relu-trained"], default="lenet"
    )
    parser.add_argument("--methods", default="strongest,idlg,breaching:deepleakage")
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--pixels", action="store_true", help="models take pixels, unnormalised")
    parser.add_argument("--together", action="store_true", help="all targets in one call")
    parser.add_argument("--breaching-iterations", type=int, default=0, help="0: its default")
    parser.add_argument("--seed", type=int, default=0, help="of the network's weights")
    given = parser.parse_args()
    torch.set_num_threads(1)
    spec = InputSpec(SHAPE, CLASSES, *(((0.0,) * 3, (1.0,) * 3) if given.pixels else NORMALISATION))
    pixels, labels = load(given.root, given.split, given.first, given.images)
    inputs = spec.normalize(pixels)
    network = make_network(given.network, spec, given.root, given.seed)
    gradient_map = GradientMap(network)
    observations = [
        observe(gradient_map, inputs[i : i + 1], labels[i : i + 1], i) for i in range(len(inputs))
    ]
    print(
        f"\n{given.network}, {given.images} CIFAR-10 {given.split} images from {given.first}, "
        f"{'pixels' if given.pixels else 'normalised'}, weights of seed {given.seed}, labels "
        f"inferred, one thread, {'together' if given.together else 'one by one'}.\n"
    )
    print("| method | mean PSNR | median | worst | ≥ 40 dB | median CPU s | wall s | peak MiB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for method in given.methods.split(","):
        run: Callable[[], tuple[list[Tensor | None], list[float]]]
        if method.startswith("breaching:"):
            source = method.removeprefix("breaching:")
            run = lambda source=source: run_breaching(  # noqa: E731
                source, network, spec, observations, given.breaching_iterations
            )
        else:
            run = lambda method=method: run_preset(  # noqa: E731
                method, network, spec, observations, given.together
            )
        began = time.perf_counter()
        found, seconds = run()
        wall = time.perf_counter() - began
        values = np.array([psnr(f, pixels[i : i + 1], spec) for i, f in enumerate(found)])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| {method} | {values.mean():.1f} ± {values.std():.1f} | {np.median(values):.1f} "
            f"| {values.min():.1f} | {(values >= 40).sum()} of {len(values)} "
            f"| {np.median(seconds):.1f} | {wall:.0f} | {peak:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
