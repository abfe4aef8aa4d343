"""The papers' procedures beside this package's: one sample, float32 as published.

The procedures are written from the papers' text, their iteration counts are those of the papers
or of the I²F authors' published code: 100 power iterations, 2,000 steps of gradient descent; 1,000
power iterations for λmin. A product is one ``matvec`` or ``rmatvec``. A product of JJᵀ by central
finite differences takes two gradients and two pullbacks and counts as four.
"""

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import AngularJacobian, SampleJacobian
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral import (
    choose_smallest_eigenvalue,
    largest_eigenvalue,
    solve_damped,
)
from flwr_leakage.spectral.estimate import normalize_rows
from simulations.benchmarks import lab
from simulations.benchmarks.scores_setup import (
    SETTINGS,
    Spectra,
    angular_gram,
    dense_gram,
    krylov_start,
    operator_of,
    prepare,
)

POWER_ITERATIONS, SHIFTED_ITERATIONS, DESCENT_STEPS = 100, 1000, 2000
DAMPINGS = (1e-1, 1e-2, 1e-3, 1e-6)

Row = tuple[object, ...]
Product = Callable[[Tensor], Tensor]


def section_papers(cifar: str | None, only: str | None) -> None:
    """Products, CPU seconds and error of each, and how many times fewer products."""
    lab.print_header(
        "model", "quantity", "procedure", "products", "CPU s", "relative error", "fewer products"
    )
    for label, setting in SETTINGS.items():
        if only and only != label:
            continue
        model, batch = prepare(setting, 1, cifar)
        single = operator_of(model, batch, torch.float32)
        double = operator_of(model, batch, torch.float64)
        curvature = matching_curvature(GradientMap(model), batch, single.value)
        if setting.name == "ResNet18":
            # The dense JJᵀ and gradient descent take a ResNet many minutes.
            start = krylov_start(double)
            top, angular_top = (
                float(largest_eigenvalue(op, start, 1e-9, 200).estimate.value)
                for op in (double, AngularJacobian(double, double.value))
            )
            for row in chain(
                _maxima(single, top, angular_top, curvature),
                _influence(single, converged_influence(double, top), top, (1e-3,)),
            ):
                lab.print_row(label, *row)
            continue
        gram = dense_gram(double)
        exact, vectors = torch.linalg.eigh(gram)
        angular = torch.linalg.eigvalsh(angular_gram(double, gram))
        for row in chain(
            _maxima(single, float(exact[0, -1]), float(angular[0, -1]), curvature),
            _minimum(double, exact, curvature("L2")),
            _influence(
                single, dense_influence(double, exact, vectors), float(exact[0, -1]), DAMPINGS
            ),
        ):
            lab.print_row(label, *row)


def matching_curvature(
    gradient_map: GradientMap, batch: Batch, observed: Tensor
) -> Callable[[str], Product]:
    """Return v ↦ Hv of an attack's loss at the truth, by a central difference of its gradient."""

    def loss(inputs: Tensor, kind: str) -> Tensor:
        shaped = Batch(inputs.reshape(batch.inputs.shape), batch.targets)
        found = ravel(gradient_map(gradient_map.params, shaped))[None]
        if kind == "L2":
            return 0.5 * ((found - observed) ** 2).sum()
        return 1 - F.cosine_similarity(found, observed).sum()

    def product(v: Tensor, kind: str) -> Tensor:
        step = 1e-3 / float(v.norm())
        sides = []
        for sign in (1, -1):
            moved = (batch.inputs.flatten(1) + sign * step * v).detach().requires_grad_()
            sides.append(torch.autograd.grad(loss(moved, kind), moved)[0])
        return (sides[0] - sides[1]) / (2 * step)

    return lambda kind: lambda v: product(v, kind)


def power_iteration(
    product: Product, num_inputs: int, iterations: int, shift: float = 0.0
) -> tuple[float, float]:
    """The eigenvalue of H, or of ``shift`` I − H where there is a shift, and CPU seconds."""
    start = torch.randn(1, num_inputs, generator=lab.generator(), dtype=torch.float64)
    v = normalize_rows(start.float())[0]
    with lab.Stopwatch() as clock:
        for _ in range(iterations):
            image = shift * v - product(v) if shift else product(v)
            value = float((v * image).sum())
            v = normalize_rows(image)[0]
    return (shift - value if shift else value), clock.seconds


def _maxima(
    operator: SampleJacobian,
    top: float,
    angular_top: float,
    curvature: Callable[[str], Product],
) -> Iterator[Row]:
    start = krylov_start(operator)
    for quantity, op, kind, reference in (
        ("λmax", operator, "L2", top),
        ("ang_max", AngularJacobian(operator, operator.value), "cosine", angular_top),
    ):
        with lab.Stopwatch() as clock:
            found = largest_eigenvalue(op, start, 1e-2).estimate
        error = abs(float(found.value) / reference - 1)
        seconds = f"{clock.seconds:.3f}"
        yield quantity, "**Lanczos**", found.products, seconds, f"{error:.1e}", ""
        for name, product, count in (
            ("exact products", op.gram, 2 * POWER_ITERATIONS),
            ("finite differences", curvature(kind), 4 * POWER_ITERATIONS),
        ):
            value, spent = power_iteration(product, op.num_inputs, POWER_ITERATIONS)
            yield (
                quantity,
                f"power iteration × {POWER_ITERATIONS}, {name}",
                count,
                f"{spent:.2f}",
                f"{value / reference - 1:+.1e}",
                f"{count / found.products:.0f}×",
            )


def _minimum(double: SampleJacobian, exact: Tensor, product: Product) -> Iterator[Row]:
    reference, top = float(exact[0, 0]), float(exact[0, -1])
    with lab.Stopwatch() as clock:
        least = choose_smallest_eigenvalue(double, lab.generator(), max_steps=400)
    error = abs(float(least.value) / reference - 1)
    state = "" if bool(least.converged.all()) else ", unresolved: bound"
    name = f"**{least.method}**{state}"
    yield "λmin", name, least.products, f"{clock.seconds:.2f}", f"{error:.1e}", ""
    value, spent = power_iteration(product, double.num_inputs, SHIFTED_ITERATIONS, shift=top)
    yield (
        "λmin",
        f"power iteration on λmax I − H × {SHIFTED_ITERATIONS}, finite differences",
        4 * SHIFTED_ITERATIONS,
        f"{spent:.2f}",
        f"{value / reference:.3g} × the value",
        "",
    )


Reference = Callable[[Tensor, float], float]
"""(δ, ε/λmax) ↦ ‖(JJᵀ + εI)⁻¹Jδ‖."""


def dense_influence(operator: SampleJacobian, exact: Tensor, vectors: Tensor) -> Reference:
    """From the dense spectrum of JJᵀ."""
    spectra = Spectra(exact, vectors)
    return lambda delta, damping: float(
        spectra.influence(operator.rmatvec(delta.double()), damping)
    )


def converged_influence(operator: SampleJacobian, top: float) -> Reference:
    """From LSQR in float64 to 1e-6."""
    largest = torch.tensor([top], dtype=torch.float64)
    return lambda delta, damping: float(
        solve_damped(operator, delta.double(), (damping,), 1e-6, 1500, largest).norms
    )


def _influence(
    single: SampleJacobian, reference_of: Reference, top: float, dampings: tuple[float, ...]
) -> Iterator[Row]:
    delta = torch.randn(single.value.shape, generator=lab.generator(1))
    for damping in dampings:
        quantity = f"I²F, ε = {damping:g} λmax"
        reference = reference_of(delta, damping)
        descended, spent = descend(single, delta, top, damping)
        theirs = abs(descended / reference - 1)
        count = 2 * DESCENT_STEPS + 1
        with lab.Stopwatch() as clock:
            solved = solve_damped(single, delta, (damping,), 1e-2, 1500)
        ours = abs(float(solved.norms) / reference - 1)
        seconds = f"{clock.seconds:.3f}"
        yield quantity, "**LSQR to 1 %**", solved.products, seconds, f"{ours:.1e}", ""
        goal = max(theirs, 1e-5)
        # Where the error stays below the goal, not where it crosses zero.
        tried = range(1, (solved.products - 1) // 2 + 50)
        errors = [abs(_after(single, delta, damping, n) / reference - 1) for n in tried]
        steps = 1 + max((n for n, e in zip(tried, errors, strict=True) if e > goal), default=0)
        with lab.Stopwatch(single) as clock:
            equal = abs(_after(single, delta, damping, steps) / reference - 1)
        seconds = f"{clock.seconds:.3f}"
        name = "**LSQR to gradient descent's error**"
        yield quantity, name, clock.products, seconds, f"{equal:.1e}", ""
        yield (
            quantity,
            f"gradient descent × {DESCENT_STEPS}",
            count,
            f"{spent:.2f}",
            f"{descended / reference - 1:+.1e}",
            f"{count / solved.products:.0f}×; at equal error {count / clock.products:.0f}×",
        )


def _after(operator: SampleJacobian, delta: Tensor, damping: float, steps: int) -> float:
    return float(solve_damped(operator, delta, (damping,), 0.0, steps).norms)


def descend(
    operator: SampleJacobian,
    delta: Tensor,
    top: float,
    damping: float,
    steps: int = DESCENT_STEPS,
) -> tuple[float, float]:
    """‖x‖ after gradient descent on ½‖Jᵀx − δ‖² + ε/2 ‖x‖² from noise, and CPU seconds.

    The step is 1/(λmax + ε), the best that is safe for every J; λmax is a gift here.
    """
    target = operator.rmatvec(delta)
    solution = torch.randn(target.shape, generator=lab.generator(2))
    with lab.Stopwatch() as clock:
        for _ in range(steps):
            slope = operator.gram(solution) + damping * top * solution - target
            solution = solution - slope / (top * (1 + damping))
    return float(solution.norm()), clock.seconds
