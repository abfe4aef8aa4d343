"""Every estimator of the scores against dense float64."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from flwr_leakage.operators import AngularJacobian, LinearOperator, SampleJacobian
from flwr_leakage.spectral import (
    Lanczos,
    choose_smallest_eigenvalue,
    largest_eigenvalue,
    last_layer_start,
    smallest_eigenvalue,
    solve_damped,
    spectral_sum,
)
from simulations.benchmarks import lab
from simulations.benchmarks.scores_setup import (
    SETTINGS,
    angular_gram,
    dense_gram,
    krylov_start,
    operator_of,
    prepare,
)

WITHIN = 1e-3


def gram_products_to(operator: LinearOperator, start: Tensor, exact: Tensor) -> list[int]:
    """Products of JJᵀ until each sample's largest Ritz value is within 0.1 %."""
    process = Lanczos(operator, start)
    needed = [0] * operator.num_blocks
    while not all(needed):
        process.step()
        top = process.ritz()[0][:, -1]
        close = ((top - exact) / exact).abs() <= WITHIN
        needed = [n or process.num_steps * bool(c) for n, c in zip(needed, close, strict=True)]
    return needed


def worst(found: Tensor, exact: Tensor) -> str:
    """Largest relative error over the samples."""
    return f"{float(((found - exact) / exact).abs().max()):.1e}"


def section_accuracy(cifar: str | None, only: str | None) -> None:
    """Every estimator, on one or two images of each network."""
    lab.print_header(
        "model", "quantity", "exact (sample 0)", "worst error", "products", "converged"
    )
    for label, setting in SETTINGS.items():
        if only and only != label:
            continue
        operator = operator_of(*prepare(setting, setting.count, cifar), torch.float64)
        gram = dense_gram(operator)
        exact, vectors = torch.linalg.eigh(gram)
        condition = float((exact[:, -1] / exact[:, 0].clamp_min(1e-300)).max())
        lab.print_row(label, "λmax/λmin", f"{condition:.1e}", "", "", "")
        for row in chain(
            _maxima(operator, exact, torch.linalg.eigvalsh(angular_gram(operator, gram))),
            _influences(operator, exact, vectors),
            _traces(operator, exact),
            _minima(operator, exact[:, 0]),
        ):
            lab.print_row(label, *row)


Row = tuple[object, ...]


def _maxima(operator: SampleJacobian, exact: Tensor, exact_angular: Tensor) -> Iterator[Row]:
    share = operator.last_layer()
    start = last_layer_start(operator, share, lab.generator())
    for quantity, op, reference in (
        ("λmax", operator, exact[:, -1]),
        ("ang_max", AngularJacobian(operator, operator.value), exact_angular[:, -1]),
    ):
        value = f"{float(reference[0]):.4g}"
        at12 = largest_eigenvalue(op, start, 0.0, 12).estimate.value
        spent = f"24 + {share.products} of the last layer"
        yield f"{quantity}, 12 JJᵀ products", value, worst(at12, reference), spent, ""
        found = largest_eigenvalue(op, start, WITHIN).estimate
        converged = bool(found.converged.all())
        error = worst(found.value, reference)
        spent = f"{found.products} + {share.products} of the last layer"
        yield f"{quantity}, tolerance 1e-3", value, error, spent, converged


def _influences(operator: SampleJacobian, exact: Tensor, vectors: Tensor) -> Iterator[Row]:
    g = operator.value
    noise = torch.randn(operator.num_outputs, generator=lab.generator(1), dtype=torch.float64)
    kept = g.abs() >= g.abs().quantile(0.9, dim=1, keepdim=True)
    for kind, delta in (
        ("Gaussian δ", noise[None].expand_as(g)),
        ("pruned δ", torch.where(kept, 0.0, -g)),
    ):
        projected = torch.einsum("snk,sn->sk", vectors, operator.rmatvec(delta))
        for damping in (1e-3, 1e-6):
            reference = (projected / (exact + damping * exact[:, -1:])).norm(dim=1)
            solved = solve_damped(operator, delta, (damping,), 1e-3, max_steps=1500)
            yield (
                f"I²F, {kind}, ε = {damping:g} λmax",
                f"{float(reference[0]):.4g}",
                worst(solved.norms[:, 0], reference),
                solved.products,
                bool(solved.converged.all()),
            )


def _traces(operator: SampleJacobian, exact: Tensor) -> Iterator[Row]:
    for damping in (1e-2, 1e-3):
        reference = (1 / (exact + damping * exact[:, -1:])).sum(1)
        trace = spectral_sum(
            operator, lambda x, top, d=damping: 1 / (x + d * top), lab.generator(2), 10
        ).estimate
        yield (
            f"Σ1/(λ+ε), ε = {damping:g} λmax, 10 probes",
            f"{float(reference[0]):.4g}",
            worst(trace.value, reference),
            trace.products,
            f"own error ≤ {float(trace.residual.max()):.1%}",
        )


def _minima(operator: SampleJacobian, exact: Tensor) -> Iterator[Row]:
    value = f"{float(exact[0]):.3g}"
    lanczos = smallest_eigenvalue(operator, lab.generator(3), 1e-2, 400).estimate
    chosen = choose_smallest_eigenvalue(operator, lab.generator(3), max_steps=400)
    for name, found in (
        ("Lanczos ≤ 400 steps", lanczos),
        (f"chooser: {chosen.method}", chosen),
    ):
        resolved = [bool(c) for c in found.converged]
        yield f"λmin, {name}", value, worst(found.value, exact), found.products, resolved


def section_maxima(cifar: str | None, only: str | None) -> None:
    """JJᵀ products to 0.1 %: 8 images (2 of a ResNet) × 3 draws of the weights."""
    lab.print_header(
        "model",
        "quantity",
        "start",
        "median",
        "largest",
        "within 12",
        "largest error at 12",
        "last-layer products",
        "CPU ms a sample to a tolerance of 1e-3",
    )
    for label, setting in SETTINGS.items():
        if only and only != label:
            continue
        # A ResNet takes CPU minutes for each image.
        count = 8 if setting.name != "ResNet18" else 2
        runs: dict[tuple[str, str], list[Maximum]] = {}
        for seed in range(3):
            operator = operator_of(*prepare(setting, count, cifar, seed), torch.float64)
            for name, op in (
                ("λmax", operator),
                ("ang_max", AngularJacobian(operator, operator.value)),
            ):
                exact = largest_eigenvalue(op, krylov_start(operator), 1e-9, 200).estimate.value
                for start in ("Jg", "last layer"):
                    run = _maximum(operator, op, exact, start)
                    runs.setdefault((name, start), []).append(run)
        for (name, start), found in runs.items():
            needed = sorted(n for run in found for n in run.needed)
            share = f"{sum(n <= 12 for n in needed)} of {len(needed)}"
            error = f"{max(run.error for run in found):.1e}"
            spent = " ".join(str(run.share_products) for run in found)
            seconds = sum(run.seconds for run in found) / len(needed)
            lab.print_row(
                label,
                name,
                start,
                needed[len(needed) // 2],
                needed[-1],
                share,
                error,
                spent,
                f"{1e3 * seconds:.1f}",
            )


@dataclass(frozen=True)
class Maximum:
    """One draw of the weights: JJᵀ products of each image, and what they cost with the start."""

    needed: list[int]
    error: float
    share_products: int
    seconds: float


def _maximum(operator: SampleJacobian, op: LinearOperator, exact: Tensor, kind: str) -> Maximum:
    spent = 0
    with lab.Stopwatch() as clock:
        if kind == "Jg":
            start = krylov_start(operator)
        else:
            share = operator.last_layer()
            start = last_layer_start(operator, share, lab.generator())
            spent = share.products // 2
        largest_eigenvalue(op, start, WITHIN)
    at12 = largest_eigenvalue(op, start, 0.0, 12).estimate.value
    error = float(((exact - at12) / exact).max())
    return Maximum(gram_products_to(op, start, exact), error, spent, clock.seconds)
