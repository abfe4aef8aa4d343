"""``strongest`` beside every other preset: is it ever worse than the best of them?

    python -m simulations.benchmarks.attacks_portfolio --root FOLDER --output rows.jsonl

runs every preset on every case, with ``--seconds`` of the CPU for each target (``strongest`` with
those of its own). A preset that is a part of ``strongest`` is not run again where that ran it: its
row is the part's own answer. No preset is run where ``strongest`` comes to 120 dB, beyond which
nothing is measured. ``breaching:NAME`` among the presets takes single steps, with as many
iterations as fit into ``--seconds``. The command appends a row to ``--output`` as soon as it is
known, and prints the table of all rows in that file; rows that are there are not run again, so that
an interrupted call goes on. A
case is NETWORK/BATCH/SETTING:

* ``lenet`` (sigmoid), ``relu`` (three convolutions of stride 1, 2, 2), ``mlp`` (two hidden layers
  of 256) and ``pool`` (two convolutions with max pooling), untrained, or ``-trained`` for three
  epochs on 4,000 training images;
* samples in the update;
* ``clean``, ``noise-X`` (Gaussian, X of the update's norm), ``pruned-X`` (a share X of all entries)
  or ``steps-N`` (N local steps on the whole batch, learning rate 0.05).

Weights are drawn from ``--seed``, images are CIFAR-10 test images from ``--first`` on, others for
every case, averaged to ``--size`` pixels a side; labels are inferred. One thread.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks import Attack, AttackJob, Strongest
from flwr_leakage.attacks.base import ProgressCallback
from flwr_leakage.attacks.presets import load_preset, preset_names
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import MLP, LeNet, initialize
from flwr_leakage.records import Batch, InputSpec, Observation, Reconstruction, ThreatModel
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_deep import affordable, attacking
from simulations.benchmarks.attacks_second_order import observe, psnr

OWN = "strongest"

CAP = 119.9
"""PSNR in dB that no preset can pass by more than rounding."""

CASES = (
    "lenet/1/clean", "lenet/2/clean", "lenet/4/clean", "lenet/8/clean", "lenet/1/noise-1e-2",
    "lenet/1/pruned-0.9", "lenet/1/steps-3", "lenet-trained/1/clean", "relu/1/clean",
    "relu/2/clean", "relu/4/clean", "relu/8/clean", "relu/1/noise-1e-2", "relu/1/pruned-0.9",
    "relu/1/steps-3", "relu-trained/1/clean", "relu-trained/2/clean", "mlp/1/clean", "mlp/4/clean",
    "mlp/8/clean", "mlp/4/noise-1e-3", "mlp/1/pruned-0.9", "mlp/2/steps-3", "pool/1/clean",
    "pool/2/clean", "pool/1/noise-1e-2", "pool/1/pruned-0.9", "pool/1/steps-3",
    "pool-trained/1/clean",
)  # fmt: skip


def load(root: Path, split: str, first: int, count: int, size: int) -> Batch:
    """Images of CIFAR-10, averaged to a size that divides 32."""
    pixels = lab.load(root, split, first, count)
    return Batch(F.avg_pool2d(pixels.inputs, 32 // size).contiguous(), pixels.targets)


def max_pool_network(shape: lab.Shape) -> nn.Module:
    """A small CNN as tutorials write it."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * shape[1] * shape[2], lab.CLASSES),
    )  # fmt: skip


def make_network(name: str, spec: InputSpec, root: Path, seed: int) -> nn.Module:
    """A network of the table, untrained or trained."""
    kind, _, trained = name.partition("-")
    torch.manual_seed(seed)  # layers draw their weights from the global stream
    if kind == "lenet":
        network: nn.Module = LeNet(spec.shape, lab.CLASSES, num_convolutions=3)
        network = initialize(network, "uniform", lab.generator(seed))
    elif kind == "mlp":
        network = MLP(spec.shape, lab.CLASSES, (256, 256))
    else:
        network = {"relu": lab.small_convnet, "pool": max_pool_network}[kind](spec.shape)
    if trained:
        images = lab.normalize(load(root, "train", 0, 4000, spec.shape[1]), spec)
        rate = 1.0 if kind == "lenet" else 0.05  # sigmoids are slow
        optimizer = torch.optim.SGD(network.parameters(), rate, momentum=0.9)
        for _ in range(3):
            lab.train(network, optimizer, lab.shuffled(images, 64))
    return network.eval()


@dataclass(frozen=True)
class Noted:
    """An attack that notes what it answered, and in how many CPU seconds."""

    attack: Attack
    answers: list[tuple[Reconstruction, float]]

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """The attack's own answers."""
        with lab.Stopwatch() as watch:
            results = self.attack(job, progress)
        self.answers.append((results[0], watch.seconds))
        return results


def run_preset(name: str, job: AttackJob) -> dict[str, tuple[Tensor | None, float, bool, str]]:
    """Inputs, CPU seconds, whether the budget ended it and what it said; of its parts, too."""
    attack = load_preset(name)
    parts: dict[str, Noted] = {}
    if isinstance(attack, Strongest):
        parts = {key: Noted(part, []) for key, part in attack.attacks.items()}
        attack = replace(attack, attacks=parts)
    whole = Noted(attack, [])
    whole(job)
    answers = {}
    for key, noted in {name: whole, **parts}.items():
        for result, seconds in noted.answers:
            found = None if result.batch is None else result.batch.inputs
            said = result.summary or result.error or str(result.stats.get("stage", ""))
            answers[key] = (found, seconds, "stopped" in result.stats, said)
    return answers


def run_peer(
    name: str,
    network: nn.Module,
    spec: InputSpec,
    seen: Observation,
    setting: str,
    seconds: float,
) -> tuple[Tensor | None, float, bool, str]:
    """A configuration of breaching with as many iterations as take about ``seconds``."""
    if setting.startswith("steps"):
        return None, 0.0, False, "takes single steps"
    attack = attacking(name, network, spec)
    outcome = attack([seen], affordable(attack, [seen], seconds))
    return outcome.found[0], outcome.seconds[0], False, ""


def run_case(case: str, position: int, names: Sequence[str], given: argparse.Namespace) -> None:
    """Attack one case by some presets, and append a row for each."""
    kind, count, setting = case.split("/")
    spec = replace(lab.CIFAR10, shape=(3, given.size, given.size))
    network = make_network(kind, spec, given.root, given.seed)
    first = given.first + 8 * position
    truth = load(given.root, "test", first, int(count), given.size)
    batch = lab.normalize(truth, spec)
    seen, _ = observe(network, batch, setting, first, given.seed)
    gradient_map = GradientMap(network)
    answers: dict[str, tuple[Tensor | None, float, bool, str]] = {}
    own_psnr = 0.0
    for name in names:
        if name in answers:
            pass
        elif OWN in answers and own_psnr >= CAP:
            continue
        elif name.startswith("breaching:"):
            answers[name] = run_peer(name, network, spec, seen, setting, given.seconds or 10.0)
        else:
            limit = None if name == OWN else given.seconds
            job = AttackJob(gradient_map, spec, [seen], ThreatModel(), max_seconds=limit)
            answers |= run_preset(name, job)
        found, seconds, stopped, said = answers[name]
        values = psnr(found, truth.inputs, spec)
        if name == OWN:
            own_psnr = sum(values) / len(values)
        row = {
            "case": case,
            "image": first,
            "size": given.size,
            "seed": given.seed,
            "preset": name,
            "psnr": sum(values) / len(values),
            "cpu_seconds": seconds,
            "stopped": stopped,
            "said": said,
        }
        with given.output.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """All rows so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def print_table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """A row a case with all presets run, and how far ``strongest`` is from the best of them."""
    lab.print_header(
        "case", "strongest, dB", "CPU s", "chosen", "best preset", "its dB", "CPU s", "difference"
    )
    complete = worse = 0
    for case in CASES:
        each = {row["preset"]: row for row in rows if row["case"] == case}
        if OWN not in each:
            continue
        own = each[OWN]
        if own["psnr"] < CAP and not all(name in each for name in names):
            continue
        others = [each[name] for name in names if name in each] or [own]
        best = max(others, key=lambda row: float(row["psnr"]))
        difference = own["psnr"] - best["psnr"]
        complete, worse = complete + 1, worse + (difference < -0.5)
        chosen = own["said"].partition(" chosen")[0] + (", budget spent" if own["stopped"] else "")
        lab.print_row(
            case, f"{own['psnr']:.1f}", f"{own['cpu_seconds']:.1f}", chosen, best["preset"],
            f"{best['psnr']:.1f}", f"{best['cpu_seconds']:.1f}", f"{difference:+.1f}",
        )  # fmt: skip
    print(f"\n{worse} of {complete} cases more than 0.5 dB below the best of the others.")


def main() -> None:
    """Read the command line, run what is missing, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.set_defaults(seed=100)
    parser.add_argument("--first", type=int, default=100, help="below 100 for development")
    parser.add_argument("--size", type=int, choices=[8, 16, 32], default=16)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--presets", default=",".join(n for n in preset_names() if n != OWN))
    parser.add_argument("--seconds", type=float, default=None, help="of the CPU, for each target")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended")
    given = lab.start(parser)
    presets = given.presets.split(",")
    for case in given.cases.split(","):
        done = {row["preset"]: row for row in read_rows(given.output) if row["case"] == case}
        missing = [name for name in (OWN, *presets) if name not in done]
        solved = OWN in done and done[OWN]["psnr"] >= CAP
        if missing and not solved:
            run_case(case, CASES.index(case), missing, given)
    print_table(read_rows(given.output), presets)


if __name__ == "__main__":
    main()
