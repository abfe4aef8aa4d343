"""Pictures of the pages that a person reads: desktop and phone, light and dark, and on paper.

    python -m simulations.benchmarks.report_pictures FOLDER [--root DATA] [--only default killed …]

runs what each page is about, where FOLDER does not hold it yet, and writes FOLDER/pages/NAME_*.png
and NAME.pdf. It tells what the browser complains of, and what is cut on a narrow screen. It needs
Debian's Chromium; ``cifar10``, ``four`` and ``below`` need the npz files in DATA.
"""

import argparse
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from flwr_leakage.comparison import compare, write_comparison
from flwr_leakage.report import write_report
from flwr_leakage.tracking.jsonl import RECORDS_FILE
from simulations.benchmarks import report_size
from simulations.benchmarks.chromium import Page, browse

SMALL = ("num_clients=3", "num_rounds=2", "partition.sizes=[1,4,100]", "score=none", "what_if=null")
CIFAR10 = (
    "dataset=cifar10_npz", "model=convnet_small", "partition=iid", "num_clients=2", "num_rounds=2",
    "client.num_examples=8", "client.batch_size=4", "client.num_steps=2", "threat.labels=known",
    "score=none",
)  # fmt: skip
FOUR = (  # one CIFAR-10 image a client on LeNet, all else as by default
    "dataset=cifar10_npz", "model=lenet", "partition=iid", "num_clients=4", "num_rounds=1",
    "client.num_examples=1", "seed=100",
)  # fmt: skip
BELOW = (*FOUR, "what_if=null", "attack=inverting_gradients", "attack.optimizer.iterations=1")
SWEEP = ("-m", "defense=none,pruning", "seed=0,1", *SMALL)
WIDTHS = {"desktop": 1280, "phone": 390}
NARROW = (320, 390)
"""Widths at which nothing may be cut that does not scroll in a box of its own."""


def simulate(folder: Path, *overrides: str) -> Path:
    """Run an audit into a folder, unless it is there."""
    if not folder.exists():
        where = "hydra.sweep.dir" if "-m" in overrides else "hydra.run.dir"
        command = [sys.executable, "-m", "flwr_leakage.simulation", *overrides, f"{where}={folder}"]
        subprocess.run(command, check=True)
    return folder


def killed(folder: Path, whole: Path) -> Path:
    """What is left of a run that was killed while it wrote."""
    if not folder.exists():
        shutil.copytree(whole, folder)
        records = folder / RECORDS_FILE
        content = records.read_bytes()
        records.write_bytes(content[: len(content) // 2])
    return folder


def long(folder: Path) -> Path:
    """A generated run of 100 rounds of 100 clients, with 1,000 attacked images."""
    if not folder.exists():
        report_size.generate(folder, 100, 100)
    return folder


def pages(folder: Path, root: Path | None) -> dict[str, Callable[[], Path]]:
    """By name, what makes a page and says where it is."""

    def comparison() -> Path:
        runs = simulate(folder / "sweep", *SWEEP)
        return write_comparison(compare([runs]), runs / "comparison.html")

    def report(make: Callable[[], Path]) -> Callable[[], Path]:
        return lambda: write_report(make())

    found = {
        "default": report(lambda: simulate(folder / "default")),
        "no_attack": report(lambda: simulate(folder / "no_attack", "attack=none", *SMALL)),
        "refused": report(lambda: simulate(folder / "refused", "attack=analytic", *SMALL)),
        "killed": report(lambda: killed(folder / "killed", simulate(folder / "default"))),
        "long": report(lambda: long(folder / "long")),
        "sweep": comparison,
    }
    if root is not None:
        data = f"dataset.root={root}"
        found |= {
            "cifar10": report(lambda: simulate(folder / "cifar10", *CIFAR10, data)),
            "four": report(lambda: simulate(folder / "four", *FOUR, data)),
            "below": report(lambda: simulate(folder / "below", *BELOW, data)),
        }
    return found


def photograph(page: Page, address: str, target: Path) -> None:
    """Write the pictures of one page, and what is printed of it."""
    for (size, width), scheme in itertools.product(WIDTHS.items(), ("light", "dark")):
        page.show(address, width, scheme=scheme)  # type: ignore[arg-type]
        page.evaluate("document.querySelectorAll('img').forEach((i) => { i.loading = 'eager'; })")
        target.with_name(f"{target.name}_{size}_{scheme}.png").write_bytes(page.picture())
    target.with_suffix(".pdf").write_bytes(page.pdf())
    for width in NARROW:
        page.show(address, width)
        page.complaints += [f"at {width} px: {cut}" for cut in page.cut_off()]


def main() -> None:
    """Make the pages, then the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, help="folder of the npz files of CIFAR-10")
    parser.add_argument("--only", nargs="+", help="names of pages")
    given = parser.parse_args()
    makers = pages(given.folder.resolve(), given.root and given.root.resolve())
    chosen = {name: make() for name, make in makers.items() if name in (given.only or makers)}
    target = given.folder / "pages"
    target.mkdir(parents=True, exist_ok=True)
    with browse() as page:
        for name, path in chosen.items():
            page.complaints.clear()
            photograph(page, path.resolve().as_uri(), target / name)
            print(f"{name}: {', '.join(page.complaints) or 'no complaint'}")


if __name__ == "__main__":
    main()
