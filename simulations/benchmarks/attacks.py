"""Attack the same gradients with this project's presets and with breaching, in one run.

    python -m simulations.benchmarks.attacks --root FOLDER --network lenet \
        --methods strongest,idlg,breaching:deepleakage@300 --images 16

prints a Markdown table, a row a method as soon as it is done. FOLDER holds ``cifar10_test.npz``
and ``cifar10_train.npz`` (``images`` uint8 N×32×32×3, ``labels``). ``breaching:NAME`` needs
``breaching==0.1.2`` (extra ``benchmark``); ``@N`` sets a method's iterations. One thread.
"""

import argparse
import json
import math
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.attacks import (
    Attack,
    AttackJob,
    GradientInversion,
    LevenbergMarquardt,
    Parallel,
)
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, Observation, ThreatModel
from simulations.benchmarks.gradients import (
    CLASSES,
    NETWORKS,
    NORMALISATION,
    SHAPE,
    load,
    make_network,
    observe,
)
from simulations.benchmarks.peer import run_breaching

if TYPE_CHECKING:
    from flwr_leakage.metrics.perceptual import Lpips

COLUMNS = (
    "method", "PSNR, dB", "median", "worst", "success", "SSIM", "LPIPS", "CPU s", "median CPU s",
    "gradients / CPU min", "wall s", "peak MiB", "iterations",
)  # fmt: skip


def build_attack(name: str, iterations: int) -> Attack:
    """A preset; ``iterations`` above 0 replaces its own or its optimizer's.

    Raises:
        ValueError: iterations are given for a preset that has no such number.
    """
    attack = load_preset(name)
    if not iterations:
        return attack
    if isinstance(attack, LevenbergMarquardt):
        return replace(attack, iterations=iterations)
    if not isinstance(attack, GradientInversion):
        raise ValueError(f"{name} must be a gradient inversion to be given a number of steps.")
    return replace(attack, optimizer=replace(attack.optimizer, iterations=iterations))


def run_preset(
    name: str,
    network: nn.Module,
    spec: InputSpec,
    observations: list[Observation],
    iterations: int,
    together: bool,
    workers: int,
) -> tuple[list[Tensor | None], list[float], list[int]]:
    """Reconstructions, CPU seconds and iterations, one target at a time or all together.

    With several workers the targets are shared among processes, and each result tells its time.
    """
    attack, gradient_map = build_attack(name, iterations), GradientMap(network)
    if workers > 1:
        attack = Parallel(attack, workers, chunk=-(-len(observations) // workers))
    found: list[Tensor | None] = []
    seconds: list[float] = []
    taken: list[int] = []
    for group in [observations] if together else [[o] for o in observations]:
        began = time.process_time()
        results = attack(AttackJob(gradient_map, spec, group, ThreatModel()))
        if workers > 1:
            seconds += [r.stats["cpu_seconds"] for r in results]
        else:
            seconds += [(time.process_time() - began) / len(group)] * len(group)
        found += [None if r.batch is None else r.batch.inputs for r in results]
        taken += [int(r.stats.get("iterations", 0)) for r in results]
        print(
            f"{name}: {len(found)} done, objective {results[-1].objective:.1e}, "
            f"{seconds[-1]:.1f} CPU s {results[-1].error}",
            file=sys.stderr,
            flush=True,
        )
    return found, seconds, taken


def psnr(found: Tensor | None, pixels: Tensor, spec: InputSpec) -> float:
    """Peak signal-to-noise ratio in dB; 0 where nothing was found, 120 at most."""
    if found is None:
        return 0.0
    error = (spec.denormalize(found).clamp(0, 1) - pixels).square().mean()
    return float(-10 * error.clamp_min(1e-12).log10())


def reset_peak_memory() -> None:
    """Forget the process's peak, where the system can (Linux)."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def peak_memory() -> float:
    """Peak resident MiB since the last reset; since the process's start where none is kept."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(
    found: list[Tensor | None], pixels: Tensor, spec: InputSpec, lpips: "Lpips | None"
) -> dict[str, list[float]]:
    """PSNR, SSIM and, with trained weights at hand, LPIPS of every target."""
    # Here, as worker processes import this file too and measure nothing.
    from flwr_leakage.metrics.pixel import ssim

    seen = torch.stack(
        [
            torch.zeros(spec.shape) if f is None else spec.denormalize(f.cpu()[0]).clamp(0, 1)
            for f in found
        ]
    ).float()
    pairs = zip(found, pixels, strict=True)
    return {
        "psnr": [psnr(None if f is None else f.cpu(), p, spec) for f, p in pairs],
        "ssim": ssim(seen, pixels).tolist(),
        "lpips": lpips.distance(seen, pixels).tolist() if lpips else [math.nan] * len(found),
    }


def table_row(row: dict[str, Any], success: float) -> str:
    """One line of the Markdown table."""
    values, seconds = row["psnr"], row["cpu_seconds"]
    cells = (
        row["method"],
        f"{statistics.fmean(values):.1f} ± {statistics.pstdev(values):.1f}",
        f"{statistics.median(values):.1f}",
        f"{min(values):.1f}",
        f"{sum(v >= success for v in values)} of {len(values)}",
        f"{statistics.fmean(row['ssim']):.3f}",
        f"{statistics.fmean(row['lpips']):.4f}",
        f"{sum(seconds):.0f}",
        f"{statistics.median(seconds):.2f}",
        f"{60 * len(values) / sum(seconds):.1f}",
        f"{row['wall_seconds']:.0f}",
        f"{row['peak_mib']:.0f}",
        f"{statistics.median(row['iterations']):g}" if row["iterations"] else "",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Read the command line, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--network", choices=NETWORKS, default="lenet")
    parser.add_argument("--methods", default="strongest,idlg,breaching:deepleakage")
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--pixels", action="store_true", help="models take pixels, unnormalised")
    parser.add_argument("--together", action="store_true", help="all targets in one call")
    parser.add_argument("--workers", type=int, default=1, help="processes, with --together")
    parser.add_argument("--success", type=float, default=40.0, help="from this PSNR on, in dB")
    parser.add_argument("--seed", type=int, default=0, help="of the network's weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lpips-backbone", default=None, help="SqueezeNet 1.1 weights")
    parser.add_argument("--output", type=Path, default=None, help="JSON lines, a row a method")
    given = parser.parse_args()
    torch.set_num_threads(1)
    spec = InputSpec(SHAPE, CLASSES, *(((0.0,) * 3, (1.0,) * 3) if given.pixels else NORMALISATION))
    pixels, labels = load(given.root, given.split, given.first, given.images)
    inputs, classes = spec.normalize(pixels).to(given.device), labels.to(given.device)
    network = make_network(given.network, spec, given.root, given.seed).to(given.device)
    gradient_map = GradientMap(network)
    observations = [
        observe(gradient_map, inputs[i : i + 1], classes[i : i + 1], i) for i in range(len(inputs))
    ]
    lpips = None
    if given.lpips_backbone:
        from flwr_leakage.metrics.perceptual import Lpips

        lpips = Lpips("squeeze", given.lpips_backbone)
    print(
        f"\n{given.network}, {given.images} CIFAR-10 {given.split} images from {given.first}, "
        f"{'pixels' if given.pixels else 'normalised'}, weights of seed {given.seed}, labels "
        f"inferred, success from {given.success:g} dB, {given.device}, one thread, "
        f"{'together' if given.together else 'one by one'}, workers: {given.workers}"
        ".\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for method in given.methods.split(","):
        reset_peak_memory()
        began = time.perf_counter()
        taken: list[int] = []
        name, _, steps = method.partition("@")
        iterations = int(steps or 0)
        if name.startswith("breaching:"):
            source = name.removeprefix("breaching:")
            found, seconds = run_breaching(source, network, spec, observations, iterations)
        else:
            found, seconds, taken = run_preset(
                name, network, spec, observations, iterations, given.together, given.workers
            )
        row = {
            "method": method,
            "network": given.network,
            "cpu_seconds": seconds,
            "wall_seconds": time.perf_counter() - began,
            "peak_mib": peak_memory(),
            "iterations": taken,
            **measure(found, pixels, spec, lpips),
        }
        print(table_row(row, given.success), flush=True)
        if given.output is not None:
            with given.output.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
