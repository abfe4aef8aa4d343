"""Attack the same gradients with this project's presets and with breaching, in one run.

    python -m simulations.benchmarks.attacks --root FOLDER --network lenet \
        --methods strongest,idlg,breaching:deepleakage@300 --images 16

prints a Markdown table, a row a method as soon as it is done. FOLDER holds ``cifar10_test.npz``
and ``cifar10_train.npz`` (``images`` uint8 N×32×32×3, ``labels``). ``breaching:NAME`` needs
``breaching==0.1.2`` (extra ``benchmark``); ``@N`` sets a method's iterations. One thread.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from flwr_leakage.attacks import Attack, GradientInversion, Parallel
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, Observation
from simulations.benchmarks import lab
from simulations.benchmarks.peer import run_breaching

COLUMNS = (
    "method", "PSNR, dB", "median", "worst", "success", "SSIM", "LPIPS", "CPU s", "median CPU s",
    "gradients / CPU min", "wall s", "peak MiB", "iterations",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one method made of some targets, an entry a target.

    Attributes:
        found: inputs, or ``None`` where the attack failed.
        seconds: of the CPU.
        iterations: steps taken; empty where the method does not tell.
    """

    found: list[Tensor | None]
    seconds: list[float]
    iterations: list[int]


def build_attack(name: str, iterations: int) -> Attack:
    """A preset; ``iterations`` above 0 replaces its own or its optimizer's.

    Raises:
        ValueError: iterations are given for a preset that has no such number.
    """
    attack = load_preset(name)
    if not iterations:
        return attack
    if not isinstance(attack, GradientInversion):
        raise ValueError(f"{name} must be a gradient inversion to be given a number of steps.")
    return replace(attack, optimizer=replace(attack.optimizer, iterations=iterations))


def run_method(
    name: str,
    network: nn.Module,
    spec: InputSpec,
    observations: Sequence[Observation],
    iterations: int,
    together: bool,
    workers: int = 1,
) -> Outcome:
    """Attack one target at a time or all together, by a preset of this project or by breaching.

    With several workers the targets are shared among processes, and each result tells its time.
    """
    source = name.removeprefix("breaching:")
    if source != name:
        peer, spent_each = run_breaching(source, network, spec, list(observations), iterations)
        return Outcome(peer, spent_each, [])
    attack, gradient_map = build_attack(name, iterations), GradientMap(network)
    if workers > 1:
        attack = Parallel(attack, workers, chunk=-(-len(observations) // workers))
    outcome = Outcome([], [], [])
    for group in [observations] if together else [[o] for o in observations]:
        results, spent = lab.run_attack(attack, gradient_map, spec, group)
        seconds = [spent / len(group)] * len(group)
        if workers > 1:
            seconds = [r.stats["cpu_seconds"] for r in results]
        outcome.found.extend(None if r.batch is None else r.batch.inputs for r in results)
        outcome.seconds.extend(seconds)
        outcome.iterations.extend(int(r.stats.get("iterations", 0)) for r in results)
        print(
            f"{name}: {len(outcome.found)} done, objective {results[-1].objective:.1e}, "
            f"{seconds[-1]:.1f} CPU s {results[-1].error}",
            file=sys.stderr,
            flush=True,
        )
    return outcome


def table_row(row: dict[str, Any], success: float) -> tuple[str, ...]:
    """The cells of a method."""
    values, seconds = row["psnr"], row["cpu_seconds"]
    return (
        row["method"],
        lab.spread(values, 1),
        f"{statistics.median(values):.1f}",
        f"{min(values):.1f}",
        f"{sum(v >= success for v in values)} of {len(values)}",
        f"{statistics.fmean(row['ssim']):.3f}",
        f"{statistics.fmean(row['lpips']):.4f}" if row["lpips"] else "–",
        f"{sum(seconds):.0f}",
        f"{statistics.median(seconds):.2f}",
        f"{60 * len(values) / sum(seconds):.1f}",
        f"{row['wall_seconds']:.0f}",
        f"{row['peak_mib']:.0f}",
        f"{statistics.median(row['iterations']):g}" if row["iterations"] else "",
    )


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    lab.add_window(parser)
    parser.add_argument("--network", choices=lab.NETWORKS, default="lenet")
    parser.add_argument("--methods", default="strongest,idlg,breaching:deepleakage")
    parser.add_argument("--pixels", action="store_true", help="models take pixels, unnormalised")
    parser.add_argument("--together", action="store_true", help="all targets in one call")
    parser.add_argument("--workers", type=int, default=1, help="processes, with --together")
    parser.add_argument("--success", type=float, default=40.0, help="from this PSNR on, in dB")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lpips-backbone", default=None, help="SqueezeNet 1.1 weights")
    parser.add_argument("--output", type=Path, default=None, help="JSON lines, a row a method")
    given = lab.start(parser)
    spec = InputSpec(lab.SHAPE, lab.CLASSES) if given.pixels else lab.CIFAR10
    pixels = lab.load(given.root, given.split, given.first, given.images)
    samples = lab.normalize(pixels, spec)
    samples = Batch(samples.inputs.to(given.device), samples.targets.to(given.device))
    network = lab.make_network(given.network, spec, given.root, given.seed).to(given.device)
    observations = lab.observe_each(GradientMap(network), samples)
    lpips = None
    if given.lpips_backbone:
        from flwr_leakage.metrics.perceptual import Lpips

        lpips = Lpips("squeeze", given.lpips_backbone)
    print(
        f"\n{given.network}, {lab.describe_window(given.split, given.first, given.images)}, "
        f"{'pixels' if given.pixels else 'normalised'}, weights of seed {given.seed}, labels "
        f"inferred, success from {given.success:g} dB, {given.device}, one thread, "
        f"{'together' if given.together else 'one by one'}, workers: {given.workers}.\n"
    )
    lab.print_header(*COLUMNS)
    for method in given.methods.split(","):
        lab.reset_peak_memory()
        began = time.perf_counter()
        name, _, steps = method.partition("@")
        outcome = run_method(
            name, network, spec, observations, int(steps or 0), given.together, given.workers
        )
        row = {
            "method": method,
            "network": given.network,
            "cpu_seconds": outcome.seconds,
            "wall_seconds": time.perf_counter() - began,
            "peak_mib": lab.peak_memory(),
            "iterations": outcome.iterations,
            **lab.compare(outcome.found, pixels.inputs, spec, lpips),
        }
        lab.print_row(*table_row(row, given.success))
        if given.output is not None:
            with given.output.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
