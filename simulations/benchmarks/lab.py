"""What all benchmarks share: images, networks, training, updates, attacks, measures, tables.

Images below 100 of a file are for development (settings may be chosen on them), those from 100 on
for reporting. Files are ``cifar10_train.npz`` and ``cifar10_test.npz`` with arrays ``images``
(uint8, N×32×32×3) and ``labels``.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.attacks import Attack, AttackJob
from flwr_leakage.comparison.compare import format_spread
from flwr_leakage.data import ImageDataset, embedded_mnist, npz_dataset
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.models import MLP, ConvNet, LeNet, initialize
from flwr_leakage.operators import LinearOperator
from flwr_leakage.records import (
    Batch,
    Disclosure,
    Exposure,
    InputSpec,
    LeakageRecord,
    LocalSchedule,
    Measurement,
    Observation,
    Reconstruction,
    ThreatModel,
    Update,
)
from flwr_leakage.scores import default_scores
from flwr_leakage.scores.compute import compute_scores

if TYPE_CHECKING:
    from flwr_leakage.metrics import Evaluator, Lpips
    from flwr_leakage.simulation.experiment import Experiment

Shape = tuple[int, int, int]

SHAPE, CLASSES = (3, 32, 32), 10
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR10 = InputSpec(SHAPE, CLASSES, CIFAR10_MEAN, CIFAR10_STD)
REPORTED_FROM = 100
NETWORKS = ("lenet", "lenet4", "relu", "relu-trained")


# The command line


def command(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring as it is written."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    """Options of what reads CIFAR-10 and draws a network's weights."""
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument("--seed", type=int, default=0, help="of the network's weights")


def add_window(parser: argparse.ArgumentParser, images: int = 16) -> None:
    """Options of which images are attacked."""
    help_first = f"below {REPORTED_FROM} for development, from there on for reporting"
    parser.add_argument("--first", type=int, default=0, help=help_first)
    parser.add_argument("--images", type=int, default=images)


def start(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; all tables are of one thread."""
    torch.set_num_threads(1)
    return parser.parse_args()


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the option of how many processes share the cases, for machines with more cores."""
    parser.add_argument("--processes", type=int, default=1, help="of one thread each")


def run_all(
    run: Callable[..., None], cases: Sequence[tuple[Any, ...]], given: argparse.Namespace
) -> None:
    """Call ``run`` with the arguments of each case, in as many processes as the user asked for.

    Each case has a process of its own, so that no cache of one speeds up another.
    """
    if given.processes == 1:
        for case in cases:
            run(*case)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.processes, context, max_tasks_per_child=1) as pool:
        for future in [pool.submit(_run_alone, run, case) for case in cases]:
            future.result()


def _run_alone(run: Callable[..., None], case: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    run(*case)


def describe_window(split: str, first: int, count: int) -> str:
    """Which images these are, and what they are for."""
    if first >= REPORTED_FROM:
        purpose = "reporting"
    elif first + count <= REPORTED_FROM:
        purpose = "development"
    else:
        purpose = "development and reporting"
    return f"{count} CIFAR-10 {split} images from {first} ({purpose})"


# Images


def read_images(file: Path, first: int = 0, count: int | None = None) -> Batch:
    """Pixels in [0, 1] and labels; all from ``first`` on without a count, or as many as there are.

    Raises:
        ValueError: there is no image ``first``.
    """
    window = slice(first, None if count is None else first + count)
    with np.load(file, allow_pickle=False) as stored:
        images = stored["images"]
        if not 0 <= first < len(images):
            raise ValueError(
                f"first must be one of the {len(images)} images of {file}, got {first}."
            )
        pixels = torch.tensor(images[window])
        pixels = pixels.reshape(*pixels.shape[:3], -1).permute(0, 3, 1, 2) / 255  # digits have no C
        return Batch(pixels, torch.tensor(stored["labels"][window]).long())


def load(root: Path, split: str, first: int, count: int) -> Batch:
    """Pixels and labels of some CIFAR-10 images."""
    return read_images(root / f"cifar10_{split}.npz", first, count)


def normalize(pixels: Batch, spec: InputSpec) -> Batch:
    """The same images as a model takes them."""
    return Batch(spec.normalize(pixels.inputs), pixels.targets)


def load_datasets(root: str | None) -> tuple[ImageDataset, ImageDataset]:
    """CIFAR-10 from ``root`` for training and testing; without it the embedded MNIST digits."""
    if root is None:
        return embedded_mnist()
    return npz_dataset(root, "cifar10", CIFAR10_MEAN, CIFAR10_STD)


# Networks and their training


def generator(seed: int = 0) -> torch.Generator:
    """A fresh generator."""
    return torch.Generator().manual_seed(seed)


def small_convnet(shape: Shape = SHAPE, width: int = 16, use_batch_norm: bool = False) -> ConvNet:
    """Three 3×3 convolutions (1, 2, 2 times ``width``; strides 1, 2, 2), ReLU, a linear layer."""
    return ConvNet(shape, CLASSES, width, (1, 2, 2), (1, 2, 2), (), use_batch_norm=use_batch_norm)


def make_network(name: str, spec: InputSpec, root: Path, seed: int) -> nn.Module:
    """LeNet with three or four convolutions, the ReLU network or an MLP, untrained or trained."""
    torch.manual_seed(seed)  # layers draw their weights from the global stream
    if name.startswith("lenet"):
        network: nn.Module = LeNet(SHAPE, CLASSES, num_convolutions=4 if name == "lenet4" else 3)
        return initialize(network, "uniform", generator(seed))
    network = MLP(SHAPE, CLASSES, (256, 256)) if name.startswith("mlp") else small_convnet()
    if name.endswith("-trained"):
        images = normalize(load(root, "train", 0, 4000), spec)
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        for _ in range(5):
            train(network, optimizer, shuffled(images, 64))
    return network.eval()


def shuffled(data: Batch, batch_size: int, order: torch.Generator | None = None) -> Iterator[Batch]:
    """Mini-batches of one epoch; without a generator the order is drawn from torch's global one."""
    for chosen in torch.randperm(len(data), generator=order).split(batch_size):
        yield data[chosen]


def train(network: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> None:
    """One step on the mean cross-entropy of each batch."""
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(network(batch.inputs), batch.targets).backward()
        optimizer.step()


# What a server sees, attacks and scores


def observe(
    gradient_map: GradientMap,
    batch: Batch,
    schedule: LocalSchedule | None = None,
    *,
    client_id: int = 0,
    server_round: int = 1,
    disclosed: Disclosure | None = None,
    num_examples: int | None = None,
) -> Observation:
    """What the server sees of an honest client.

    Args:
        gradient_map: of the client's model, with the parameters that the server sent.
        batch: the client's samples.
        schedule: of its local training; the server sees returned less sent parameters, with their
            rounding. Without one, the gradient itself, as of one step with learning rate 1.
        client_id: whose update it is.
        server_round: when it came.
        disclosed: what the client tells besides.
        num_examples: what the client says of its number of samples, if that is another one.
    """
    # Copies: the model may move on, what was seen may not.
    params = {name: value.clone() for name, value in gradient_map.params.items()}
    buffers = gradient_map.buffers
    if schedule is None:
        schedule = LocalSchedule(1.0, batch_size=len(batch))
        gradient = gradient_map(params, batch, buffers)
        delta = {name: -value.detach() for name, value in gradient.items()}
    else:
        trained = local_update(gradient_map, params, batch, schedule, buffers)
        delta = {name: (params[name] + v.detach()) - params[name] for name, v in trained.items()}
    # In eval mode a client returns the buffers that it was sent; in train mode it sends none here.
    returned = {} if gradient_map.uses_batch_statistics else buffers
    update = Update(delta, returned, schedule, num_examples or len(batch))
    return Observation(server_round, client_id, params, buffers, update, disclosed or Disclosure())


def observe_each(gradient_map: GradientMap, samples: Batch) -> list[Observation]:
    """The gradient of every sample, each a client's only one."""
    return [observe(gradient_map, samples[i : i + 1], client_id=i) for i in range(len(samples))]


def run_attack(
    attack: Attack,
    gradient_map: GradientMap,
    spec: InputSpec,
    observations: Sequence[Observation],
    threat: ThreatModel | None = None,
    seed: int = 0,
) -> tuple[list[Reconstruction], float]:
    """Attack all observations in one call; the reconstructions, and CPU seconds of this process."""
    began = time.process_time()
    job = AttackJob(gradient_map, spec, observations, threat or ThreatModel(), seed)
    found = attack(job)
    return found, time.process_time() - began


def run_scores(gradient_map: GradientMap, exposure: Exposure) -> list[Measurement]:
    """A client's default set of scores."""
    results = compute_scores(default_scores(), gradient_map, exposure)
    return [measured for result in results.values() for measured in result]


@dataclass(frozen=True)
class Rounds:
    """A run of Flower in this process.

    Attributes:
        experiment: what was run.
        records: what it wrote.
        cpu_seconds: of everything but building the experiment.
    """

    experiment: "Experiment"
    records: Sequence[LeakageRecord]
    cpu_seconds: float


def run_rounds(overrides: Sequence[str], num_clients: int) -> Rounds:
    """Run the simulation with overrides of the config, quietly, in a folder that is not kept."""
    # Here, as only these tables need Flower.
    import logging

    from rich.console import Console

    from flwr_leakage.flower.launch import run_inline
    from flwr_leakage.simulation.apps import make_client_app, make_server_app
    from flwr_leakage.simulation.build import build
    from flwr_leakage.simulation.config import compose
    from flwr_leakage.tracking import read_run

    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        config = compose(
            ["experiment=equal_clients", *overrides, f"num_clients={num_clients}"], folder
        )
        experiment = build(config)
        server = make_server_app(lambda _: config, Console(quiet=True))
        began = time.process_time()
        run_inline(server, make_client_app(lambda _: build(config)), num_clients)
        seconds = time.process_time() - began
        return Rounds(experiment, read_run(Path(folder)).records, seconds)


# Measures


def psnr(found: Tensor | None, pixels: Tensor, spec: InputSpec) -> float:
    """Peak signal-to-noise ratio in dB; 0 where nothing was found, 120 at most."""
    # Here, as worker processes import this file too and measure nothing.
    from flwr_leakage.metrics import pixel

    if found is None:
        return 0.0
    seen = spec.denormalize(found.detach().cpu()).clamp(0, 1)
    return min(float(pixel.psnr(seen.to(pixels), pixels)), 120.0)


def compare(
    found: Sequence[Tensor | None], pixels: Tensor, spec: InputSpec, lpips: "Lpips | None"
) -> dict[str, list[float]]:
    """PSNR, SSIM and, with trained weights at hand, LPIPS of every target.

    Where nothing was found, PSNR is 0 dB and the others compare with a black image.
    """
    from flwr_leakage.metrics import pixel

    black = torch.zeros(1, *spec.shape)
    seen = torch.cat(
        [black if f is None else spec.denormalize(f.cpu()).clamp(0, 1).float() for f in found]
    )
    return {
        "psnr": [psnr(f, p[None], spec) for f, p in zip(found, pixels, strict=True)],
        "ssim": pixel.ssim(seen, pixels).tolist(),
        "lpips": lpips.distance(seen, pixels).tolist() if lpips else [],
    }


def evaluate(
    reconstruction: Reconstruction, truth: Batch, spec: InputSpec, evaluator: "Evaluator"
) -> dict[str, list[float]]:
    """Every metric of every sample; samples without a reconstruction are left out."""
    evaluation = evaluator.evaluate(reconstruction, truth, spec)
    return {
        m.name: [float(value) for value in m.values if value is not None]
        for m in evaluation.measurements
    }


class Stopwatch:
    """CPU seconds of a block, and the products that an operator spent in it."""

    def __init__(self, operator: LinearOperator | None = None) -> None:
        self.operator = operator

    def __enter__(self) -> "Stopwatch":
        self.products = 0 if self.operator is None else -self.operator.products
        self.seconds = -time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time()
        self.products += 0 if self.operator is None else self.operator.products


def reset_peak_memory() -> None:
    """Forget the process's peak, where the system can (Linux)."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def peak_memory() -> float:
    """Peak resident MiB since the last reset; since the process's start where none is kept.

    Unlike getrusage's, the peak of ``/proc`` does not count the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# Tables


def print_row(*cells: object) -> None:
    """One row of a Markdown table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def print_header(*names: str) -> None:
    """The head of a Markdown table."""
    print_row(*names)
    print_row(*("---" for _ in names))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A whole Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean with its spread, as ``compare`` writes it."""
    return format_spread(list(values), f".{digits}f")
