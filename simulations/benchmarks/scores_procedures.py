"""A score by this package and by the papers' procedure, of one network and batch of images."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import AngularJacobian, SampleJacobian
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral import (
    choose_smallest_eigenvalue,
    largest_eigenvalue,
    last_layer_start,
    solve_damped,
)
from simulations.benchmarks import lab
from simulations.benchmarks.scores_papers import (
    DESCENT_STEPS,
    POWER_ITERATIONS,
    SHIFTED_ITERATIONS,
    descend,
    matching_curvature,
    power_iteration,
)
from simulations.benchmarks.scores_setup import (
    Spectra,
    angular_gram,
    build_model,
    dense_gram,
    krylov_start,
    load_batch,
    operator_of,
)

MOST_STEPS = 128

Quantity = str | float
"""``λmax``, ``ang_max``, ``λmin``, or the ε/λmax of an I²F."""


@dataclass(frozen=True)
class Entry:
    """A network and the batch that it is scored on.

    Attributes:
        name: as ``build_model`` names it.
        size: pixels a side.
        count: samples.
        width: of a ResNet.
        dense: samples, the first ones, that have a dense float64 JJᵀ for a reference; none: λmin
            has no reference, and this package is not granted a dense route to it either.
        rivals: samples, the first ones, on which the papers' procedures run.
        dampings: ε/λmax.
        descent: steps of gradient descent that are run, of 2,000.
        shifted: iterations for λmin that are run, of 1,000.
        starts: of ours for λmax and ang_max, ``Jg`` or ``last layer``.
    """

    name: str
    size: int
    count: int
    width: int = 16
    dense: int = 0
    rivals: int = 1
    dampings: tuple[float, ...] = (1e-2, 1e-3)
    descent: int = DESCENT_STEPS
    shifted: int = SHIFTED_ITERATIONS
    starts: tuple[str, ...] = ("Jg",)

    @property
    def label(self) -> str:
        """As ``--only`` names it."""
        width = f" w{self.width}" if self.name == "ResNet18" else ""
        return f"{self.name}{width} {self.size} b{self.count}"

    def prepare(self, cifar: str | None) -> tuple[nn.Module, Batch]:
        """The network with random weights, and the images."""
        channels = 1 if (self.name, self.size) == ("LeNet", 28) else 3
        shape: lab.Shape = (channels, self.size, self.size)
        model = build_model(self.name, shape, self.width)
        return model, load_batch(shape, self.count, cifar)


References = Mapping[Quantity, Sequence[float]]
"""Values of the first samples in float64; those of ``λmin`` may be missing."""


@dataclass(frozen=True)
class Found:
    """What a procedure found for the first samples.

    Attributes:
        procedure: its name.
        values: of each sample.
        products: for a sample.
        seconds: of the CPU, for a sample.
        shares: products of the last layer's share of J, for a sample, besides.
        complete: whether it ran to its end and takes its values for resolved.
    """

    procedure: str
    values: tuple[float, ...]
    products: int
    seconds: float
    shares: int = 0
    complete: bool = True

    @property
    def spent(self) -> str:
        """All products, told."""
        return f"{self.products}" + f" + {self.shares} of the last layer" * bool(self.shares)

    def error(self, exact: Sequence[float]) -> float:
        """Worst relative error over the samples that have a reference."""
        pairs = zip(self.values, exact, strict=False)
        return max(abs(value / reference - 1) for value, reference in pairs)


def find_references(entry: Entry, cifar: str | None) -> References:
    """In float64: dense where the entry has it, else Lanczos to 1e-9 and LSQR to 1e-6."""
    model, batch = entry.prepare(cifar)
    operator = operator_of(model, batch, torch.float64)
    start = krylov_start(operator)
    delta = _delta(operator)
    tops = largest_eigenvalue(operator, start, 1e-9, 200).estimate.value
    angular = AngularJacobian(operator, operator.value)
    found: dict[Quantity, Tensor] = {
        "λmax": tops,
        "ang_max": largest_eigenvalue(angular, start, 1e-9, 200).estimate.value,
        "λmin": tops[:0],
    }
    found |= {
        d: solve_damped(operator, delta, (d,), 1e-6, 1500, tops).norms[:, 0] for d in entry.dampings
    }
    if entry.dense:
        some = operator_of(model, batch[: entry.dense], torch.float64)
        gram = dense_gram(some)
        spectra = Spectra(*torch.linalg.eigh(gram))
        projected = some.rmatvec(delta[: entry.dense])
        dense: dict[Quantity, Tensor] = {
            "λmax": spectra.eigenvalues[:, -1],
            "ang_max": torch.linalg.eigvalsh(angular_gram(some, gram))[:, -1],
            "λmin": spectra.eigenvalues[:, 0],
        }
        dense |= {d: spectra.influence(projected, d) for d in entry.dampings}
        found = {q: torch.cat([dense[q], found[q][entry.dense :]]) for q in found}
    return {quantity: tuple(values.tolist()) for quantity, values in found.items()}


def _delta(operator: SampleJacobian) -> Tensor:
    """The same Gaussian δ for every sample."""
    draw = torch.randn(1, operator.num_outputs, generator=lab.generator(1))
    return draw.to(operator.dtype).expand_as(operator.value)


def ours(entry: Entry, cifar: str | None, quantity: Quantity, start: str = "Jg") -> Found:
    """Estimate by this package, for the whole batch."""
    precision = torch.float64 if quantity == "λmin" else torch.float32
    operator = operator_of(*entry.prepare(cifar), precision)
    if quantity == "λmin":
        return _smallest(operator, bool(entry.dense))
    return estimate(operator, quantity, start)


def _smallest(operator: SampleJacobian, dense: bool) -> Found:
    most = (400, operator.num_inputs) if dense else (100, 0)
    with lab.Stopwatch() as clock:
        found = choose_smallest_eigenvalue(operator, lab.generator(), 1e-2, *most)
    values, seconds = tuple(found.value.tolist()), clock.seconds / operator.num_blocks
    complete = bool(found.converged.all())
    return Found(found.method, values, found.products, seconds, complete=complete)


def estimate(
    operator: SampleJacobian, quantity: Quantity, start: str = "Jg", steps: int | None = None
) -> Found:
    """λmax, ang_max or I²F at a tolerance of 1 %, or after so many steps, whatever the error."""
    tolerance = 1e-2 if steps is None else 0.0
    shares = 0
    with lab.Stopwatch() as clock:
        if isinstance(quantity, float):
            solved = solve_damped(operator, _delta(operator), (quantity,), tolerance, steps or 1500)
            name, products = "LSQR", solved.products
            values, converged = solved.norms[:, 0], solved.converged
        else:
            op = AngularJacobian(operator, operator.value) if quantity == "ang_max" else operator
            if start == "Jg":
                first = krylov_start(operator)
            else:
                share = operator.last_layer()
                first = last_layer_start(operator, share, lab.generator())
                shares = share.products
            found = largest_eigenvalue(op, first, tolerance, steps or 100).estimate
            name, values, converged = f"Lanczos from {start}", found.value, found.converged
            # Either start has a product of its own: Jg.
            products = found.products + 1
    seconds = clock.seconds / operator.num_blocks
    complete = bool(converged.all())
    return Found(name, tuple(values.tolist()), products, seconds, shares, complete)


def run_to(
    entry: Entry,
    cifar: str | None,
    quantity: Quantity,
    goal: float,
    exact: Sequence[float],
    start: str = "Jg",
) -> Found | None:
    """The cheapest run of ours from which on no error exceeds the goal; none if one always does."""
    operator = operator_of(*entry.prepare(cifar), torch.float32)

    @cache
    def run(steps: int) -> Found:
        return estimate(operator, quantity, start, steps)

    def stays(steps: int) -> bool:
        # An extrapolated value may cross the reference once before it settles there.
        return all(run(steps + more).error(exact) <= goal for more in range(3))

    high = 1
    while not stays(high):
        if high >= MOST_STEPS:
            return None
        high *= 2
    low = high // 2 + 1
    return run(low + bisect_left(range(low, high), True, key=stays))


def theirs(
    entry: Entry, cifar: str | None, quantity: Quantity, differences: bool, tops: Sequence[float]
) -> Found:
    """The papers' procedure, sample by sample, λmax being a gift where it needs it."""
    model, batch = entry.prepare(cifar)
    found = [
        _theirs(entry, model, batch[i : i + 1], quantity, differences, tops[i])
        for i in range(entry.rivals)
    ]
    values, seconds = zip(*found, strict=True)
    run, full = POWER_ITERATIONS, POWER_ITERATIONS
    if isinstance(quantity, float):
        run, full = entry.descent, DESCENT_STEPS
        name, products = "gradient descent", 2 * full + 1
    else:
        if quantity == "λmin":
            run, full = entry.shifted, SHIFTED_ITERATIONS
        kind = "differences" if differences else "exact products"
        name, products = f"power iteration, {kind}", full * (4 if differences else 2)
    if run < full:
        name += f": {run} of {full:,} steps, cost extrapolated"
    mean = sum(seconds) / len(seconds) * full / run
    return Found(name, values, products, mean, complete=run == full)


def _theirs(
    entry: Entry, model: nn.Module, sample: Batch, quantity: Quantity, differences: bool, top: float
) -> tuple[float, float]:
    if differences:
        gradient_map = GradientMap(model)
        observed = ravel(gradient_map(gradient_map.params, sample))[None]
        curvature = matching_curvature(gradient_map, sample, observed)
        product = curvature("cosine" if quantity == "ang_max" else "L2")
        shifted = quantity == "λmin"
        steps = entry.shifted if shifted else POWER_ITERATIONS
        size = sample.inputs.numel()
        return power_iteration(product, size, steps, top if shifted else 0.0)
    operator = operator_of(model, sample, torch.float32)
    if isinstance(quantity, float):
        return descend(operator, _delta(operator), top, quantity, entry.descent)
    angular = quantity == "ang_max"
    op = AngularJacobian(operator, operator.value) if angular else operator
    return power_iteration(op.gram, op.num_inputs, POWER_ITERATIONS)
