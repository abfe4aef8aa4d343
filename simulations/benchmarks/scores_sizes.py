"""Every score over sizes, by this package and by the papers' procedures, each in its own process.

Ours takes a batch at once; theirs runs sample by sample, as published, on the first samples.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

from simulations.benchmarks import lab
from simulations.benchmarks.scores_procedures import (
    Entry,
    Found,
    Quantity,
    find_references,
    ours,
    run_to,
    theirs,
)

KEPT_PAGES = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""glibc keeps freed buffers instead of returning their pages to the system after each product."""

SMALLEST_GOAL = 1e-5
"""Error to which ours is run where theirs is smaller or not known: rounding of float32 is near."""

SIZES = (
    Entry("LeNet", 28, 1, dense=1),
    Entry("LeNet", 28, 8, dense=8, rivals=2),
    Entry("LeNet", 28, 64, dense=8, rivals=2),
    Entry("LeNet", 32, 8, dense=2, rivals=2),
    Entry("LeNet", 224, 4, dampings=(1e-2,)),
    Entry("ConvNet", 32, 8, dense=2, rivals=2, starts=("Jg", "last layer")),
    Entry("ConvNet", 224, 1, dampings=(1e-2,), shifted=100, starts=("Jg", "last layer")),
    Entry("ResNet18", 32, 1, dense=1, dampings=(1e-2,)),
    Entry("ResNet18", 32, 8, dampings=(1e-2,), shifted=100),
    Entry("ResNet18", 64, 1, dampings=(1e-2,), shifted=100),
    Entry("ResNet18", 224, 1, dampings=(1e-2,), descent=200, shifted=100),
    Entry("ResNet18", 32, 1, width=64, dampings=(1e-2,), shifted=100),
)


Row = tuple[object, ...]
T = TypeVar("T")


def section_sizes(cifar: str | None, only: str | None) -> None:
    """Products, CPU seconds, peak memory and worst error of each score, ours and theirs."""
    lab.print_header(
        *("model, input, batch", "quantity", "ours", "products", "CPU s", "MiB", "error"),
        *("the papers'", "products", "CPU s", "MiB", "error"),
        *("fewer products", "less CPU time"),
    )
    os.environ.update(KEPT_PAGES)
    lab.print_row("an empty process", *[""] * 4, f"{isolated(int)[1]:.0f}", *[""] * 8)
    for entry in SIZES:
        if not only or only == entry.label:
            for row in _rows(entry, cifar):
                lab.print_row(entry.label, *row)


def section_pages(cifar: str | None, only: str | None) -> None:
    """λmax of ResNets where the allocator returns freed buffers to the system or keeps them."""
    lab.print_header("model, input, batch", "freed buffers", "CPU s of λmax a sample", "peak MiB")
    for entry in SIZES:
        if entry.name != "ResNet18" or only not in (None, entry.label):
            continue
        for state in ("returned", "kept"):
            for name, value in KEPT_PAGES.items():
                os.environ.pop(name, None)
                if state == "kept":
                    os.environ[name] = value
            found, peak = isolated(ours, entry, cifar, "λmax")
            lab.print_row(entry.label, state, f"{found.seconds:.2f}", f"{peak:.0f}")


def isolated(procedure: Callable[..., T], *arguments: object) -> tuple[T, float]:
    """Run a procedure in a fresh process; its result, and the peak of memory in MiB."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_with_peak, procedure, *arguments).result()


def _with_peak(procedure: Callable[..., T], *arguments: object) -> tuple[T, float]:
    torch.set_num_threads(1)
    result = procedure(*arguments)
    return result, lab.peak_memory()


def _rows(entry: Entry, cifar: str | None) -> Iterator[Row]:
    references = isolated(find_references, entry, cifar)[0]
    quantities: tuple[Quantity, ...] = ("λmax", "ang_max", "λmin", *entry.dampings)
    for quantity in quantities:
        exact = references[quantity]
        starts = entry.starts if quantity in ("λmax", "ang_max") else ("Jg",)
        mine = [isolated(ours, entry, cifar, quantity, start) for start in starts]
        for differences in RIVALS.get(quantity, (False,)):
            rival, peak = isolated(theirs, entry, cifar, quantity, differences, references["λmax"])
            for start, (own, own_peak) in zip(starts, mine, strict=True):
                if quantity == "λmin":
                    told, equal = compare_smallest(rival, own, exact)
                else:
                    error = rival.error(exact) if rival.complete else None
                    told = "not known" if error is None else f"{error:.1e}"
                    goal = max(error or 0.0, SMALLEST_GOAL)
                    same = exact[: entry.rivals]
                    equal = isolated(run_to, entry, cifar, quantity, goal, same, start)[0]
                yield (
                    *(_name(quantity), own.procedure, own.spent, f"{own.seconds:.3g}"),
                    *(f"{own_peak:.0f}", _own_error(own, exact), rival.procedure, rival.products),
                    *(f"{rival.seconds:.3g}", f"{peak:.0f}", told),
                    f"{rival.products / equal.products:.3g}×" if equal else "",
                    f"{rival.seconds / equal.seconds:.3g}×" if equal else "",
                )


RIVALS: Mapping[Quantity, tuple[bool, ...]] = {
    "λmax": (True, False),
    "ang_max": (True, False),
    "λmin": (True,),
}
"""Whether products are finite differences, for each of the papers' procedures."""


def _name(quantity: Quantity) -> str:
    return quantity if isinstance(quantity, str) else f"I²F, ε = {quantity:g} λmax"


def _own_error(mine: Found, exact: Sequence[float]) -> str:
    if not mine.complete:
        return f"unresolved: ≤ {max(mine.values):.2g}"
    return f"{mine.error(exact):.1e}" if exact else "converged, no reference"


def compare_smallest(rival: Found, mine: Found, exact: Sequence[float]) -> tuple[str, Found | None]:
    """How far off their λmin is, and our run if ours is nearer.

    Without a reference: what our value, no smaller than λmin, proves of theirs.
    """
    if not exact:
        value, bound = rival.values[0], mine.values[0]
        if value < 0:
            return "no reference; negative", None
        proven = f"; ≥ {value / bound:.3g} × the value" if value > bound else ""
        return "no reference" + proven, None
    ratios = [value / true for value, true in zip(rival.values, exact, strict=False)]
    told = f"{max(ratios, key=lambda ratio: abs(ratio - 1)):.3g} × the value"
    nearer = mine.complete and mine.error(exact) <= rival.error(exact)
    return told, mine if nearer else None
