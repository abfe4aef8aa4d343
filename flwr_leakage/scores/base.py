"""Define the interface of scores, and a base class of scores that treat samples separately."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from scipy.special import gammaincinv, stdtrit
from torch import Tensor

from flwr_leakage.per_sample import ClientSamples, Point, Precision, SampleProblem
from flwr_leakage.per_sample.client import DEFAULT_MEMORY_BYTES
from flwr_leakage.randomness import Draws
from flwr_leakage.records import NUMBERS, Direction, Measurement, State
from flwr_leakage.spectral import CONFIDENCE, DampedSolution, Estimate, sampling_error

UNDEFENDED = "δ = 0: nothing was hidden, a perfect attacker recovers this sample exactly"
FLAT = "J = 0: there is nothing to invert"

BLANKS = {"values": None, "errors": None, "states": "unresolved"}
"""The entries of a sample without a score, by the measurement's field."""


@runtime_checkable
class Score(Protocol):
    """A measure of the risk of every sample of a client's round, computed without an attack."""

    def __call__(self, client: ClientSamples, seed: int) -> list[Measurement]:
        """Return one measurement for each quantity, with one value for each sample of
        ``client.exposure``, in order. The first measurement's ``products`` is the number of
        Jacobian products of all. ``client`` is not changed, except that it may store results for
        other scores. ``seed`` is the seed of the score's random draws.
        """
        ...


@dataclass(frozen=True)
class Column:
    """The values of one quantity for S samples, as a score computes them.

    Attributes:
        name: the name of the quantity, such as ``lambda_max``.
        values: (S,) the values; NaN or infinity where there is no number.
        unit: the unit, such as ``1`` or ``model input``.
        direction: the meaning of a larger value.
        notes: a text for each sample on its value, or on why there is none; an empty sequence for
            no notes.
        errors: (S,) half the width of each error bar, in ``unit``, NaN where unknown; or ``None``.
        states: how the values may be read, see ``Measurement``: a state for each sample; or one
            state for all samples with a number; or empty. A sample without a number becomes
            ``unresolved``, unless its own state in a sequence is a bound.
    """

    name: str
    values: Float[Tensor, " S"]
    unit: str
    direction: Direction
    notes: Sequence[str] = ()
    errors: Float[Tensor, " S"] | None = None
    states: State | Sequence[State] = ()

    @property
    def own_states(self) -> Sequence[State]:
        """Return for each sample whether its value is exact, a bound, or unresolved; an empty
        sequence if the score gives no states.
        """
        if isinstance(self.states, str):
            return states_of(self.values, self.states)
        return self.states


@dataclass(frozen=True, kw_only=True)
class SampleScore(ABC):
    """A base class of scores that treat every sample separately; a subclass defines ``measure``.

    As many samples are processed at a time as fit into memory. A sample gets a reason in place of a
    number if its gradient or its value is not finite, or if no training step used it. A sample's
    value does not depend on the other samples, provided that ``measure`` computes each row alone
    and draws for it from its own generator.

    Example:
        >>> @dataclass(frozen=True)
        ... class GradientPeak(SampleScore):
        ...     def measure(self, problem, draws):
        ...         peaks = problem.gradients.abs().amax(1)
        ...         return [Column("gradient_peak", peaks, "1", "larger leaks more")]

    Attributes:
        point: ``defended`` to score the samples as they entered training; ``private`` to score them
            as they were before the defense encoded them.
        precision: the floating-point type of all computations.
        memory_bytes: the most bytes that the samples processed together may take.
    """

    point: Point = "defended"
    precision: Precision = "float32"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    @abstractmethod
    def measure(self, problem: SampleProblem, draws: Draws) -> Sequence[Column]:
        """Return the quantities of S samples, the same quantities in all calls of a round.

        Args:
            problem: the samples with their gradients, perturbations and Jacobians.
            draws: one random generator for each sample.
        """

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Return the bytes that ``measure`` needs for one sample, beside its gradient's graph.

        Args:
            num_inputs: the number N of a sample's inputs.
            num_parameters: the number P of the model's parameters.
        """
        return 0

    def __call__(self, client: ClientSamples, seed: int) -> list[Measurement]:
        """Return a measurement for each quantity. The first one's ``products`` counts those of
        all.
        """
        before = client.meter.products
        num_inputs = client.exposure.private.inputs[:1].numel()
        num_parameters = sum(value.numel() for value in client.exposure.params.values())
        extra = self.extra_bytes(num_inputs, num_parameters)
        places = {index: place for place, index in enumerate(client.exposure.indices)}
        windows = []
        for problem in client.problems(self.point, self.precision, self.memory_bytes, extra):
            columns = self.measure(problem, problem.generators(seed))
            own = [places[index] for index in problem.indices]
            windows.append([(own, measured(column, problem.notes)) for column in columns])
        products = client.meter.products - before
        merged = [merge(groups, {}, len(client)) for groups in zip(*windows, strict=True)]
        return [replace(m, products=0 if i else products) for i, m in enumerate(merged)]


def measured(column: Column, against: Sequence[str]) -> Measurement:
    """Return a column as a measurement. ``against`` holds for each sample the reason why its number
    must be left out, or an empty text. A number that is not finite is replaced by a reason, too.

    Raises:
        ValueError: the column's entries are not one for each sample.
    """
    count = len(against)
    bars = column.values.new_full((count,), math.nan) if column.errors is None else column.errors
    given = (column.values.shape, bars.shape, len(column.notes), len(column.own_states))
    if given[:2] != ((count,), (count,)) or not {*given[2:]} <= {0, count}:
        raise ValueError(
            f"values, errors, notes and states of {column.name} must have one entry for each of "
            f"{count} samples, got {tuple(given[0])}, {tuple(given[1])}, {given[2]} and {given[3]}."
        )
    values: list[float | None] = []
    errors: list[float | None] = []
    notes: list[str] = []
    for value, error, unsound, note in zip(
        column.values.tolist(),
        bars.tolist(),
        against,
        column.notes or [""] * count,
        strict=True,
    ):
        number = math.isfinite(value)
        sound = number and not unsound
        values.append(value if sound else None)
        errors.append(error if sound and math.isfinite(error) else None)
        notes.append(unsound or note or ("" if number else f"no number: {value}"))
    states = [
        "unresolved" if unsound or (value is None and state in NUMBERS) else state
        for value, unsound, state in zip(values, against, column.own_states, strict=False)
    ]
    return Measurement(
        column.name,
        tuple(values),
        column.unit,
        column.direction,
        tuple(notes) if any(notes) else (),
        errors=() if column.errors is None else tuple(errors),
        states=tuple(states),
    )


def merge(
    groups: Sequence[tuple[Sequence[int], Measurement]], left_out: Mapping[int, str], count: int
) -> Measurement:
    """Return one quantity's measurement of all ``count`` samples, merged from those of groups of
    samples. ``groups`` are pairs of the samples' indices and their measurement. ``left_out`` holds,
    by index, the reason why a sample was not scored.

    Raises:
        ValueError: the measurements are of different quantities.
    """
    names = {found.name for _, found in groups}
    if len(names) > 1:
        raise ValueError(f"measure must give the same quantities of all samples, got {names}.")

    def column(name: str, blanks: list[Any]) -> tuple[Any, ...]:
        for places, found in groups:
            for place, value in zip(places, getattr(found, name), strict=False):
                blanks[place] = value
        return tuple(blanks)

    scored = {place for places, _ in groups for place in places}
    reasons = ["" if place in scored else left_out[place] for place in range(count)]
    notes = column("notes", reasons)
    merged: dict[str, Any] = {"notes": notes if any(notes) else ()}
    for name, blank in BLANKS.items():
        if any(getattr(found, name, ()) for _, found in groups):
            merged[name] = column(name, [blank] * count)
    products = sum(found.products for _, found in groups)
    # If the score failed for a group, its measurement has no unit, so that another group's is
    # preferred.
    model = next((found for _, found in groups if found.unit), groups[0][1])
    return replace(model, products=products, **merged)


def notes_where(condition: Bool[Tensor, " S"], text: str) -> list[str]:
    """Return a list with ``text`` for samples for which the condition holds, else empty texts."""
    return [text if holds else "" for holds in condition.tolist()]


def first_notes(*notes: Sequence[str]) -> list[str]:
    """Return for each sample the first note that is not empty, from several lists of notes."""
    return [next((note for note in own if note), "") for own in zip(*notes, strict=True)]


def states_of(values: Float[Tensor, " S"], state: State) -> list[State]:
    """Return ``state`` for every sample with a finite value, and ``unresolved`` for the others."""
    return [state if number else "unresolved" for number in values.isfinite().tolist()]


def root_error(values: Float[Tensor, " S"], errors: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Return half the width of the error bar of √v, max(√(v + e) − √v, √v − √(v − e)), with e half
    the width of the error bar of v.
    """
    root = values.sqrt()
    return torch.maximum(
        (values + errors).sqrt() - root, root - (values - errors).clamp_min(0).sqrt()
    )


def mean_of_squares(draws: Float[Tensor, "n S"]) -> tuple[Tensor, Tensor]:
    """Return the mean (S,) of n ≥ 2 squared lengths of random vectors, and half its 99 % error bar
    (S,). The bar is that of a χ² variable; see ``sampling_error``. For its variance the one-sided
    95 % upper limit is taken, as few draws of a skewed distribution mostly underestimate the
    variance.
    """
    count = len(draws)
    mean = draws.mean(0)
    raised = (count - 1) / float(2 * gammaincinv((count - 1) / 2, 0.05))
    return mean, mean * sampling_error(mean, raised * draws.var(0) / count)


def mean_with_error(draws: Float[Tensor, "n S"]) -> tuple[Tensor, Tensor]:
    """Return the mean of n draws, and half its 99 % error bar by Student's t (NaN for n = 1), each
    (S,).
    """
    count = len(draws)
    mean = draws.mean(0)
    if count == 1:
        return mean, torch.full_like(mean, torch.nan)
    width = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) / count**0.5
    return mean, width * draws.std(0)


class Numbers(NamedTuple):
    """Values, notes, errors and states of an estimate for each of S samples; see ``Column``."""

    values: Float[Tensor, " S"]
    notes: list[str]
    errors: Float[Tensor, " S"]
    states: list[State]

    def column(self, name: str, unit: str, direction: Direction) -> Column:
        """Return the estimate as the column of a quantity of this name, unit and direction."""
        return Column(name, self.values, unit, direction, self.notes, self.errors, self.states)


def nothing_hidden(problem: SampleProblem) -> Numbers:
    """Return the reconstruction error zero, with the state ``exact`` and a note, for each sample of
    ``problem``, if no perturbation hides any of them.
    """
    zeros = torch.zeros(len(problem), dtype=torch.float64)
    return Numbers(zeros, [UNDEFENDED] * len(problem), zeros, states_of(zeros, "exact"))


def damped_norms(
    problem: SampleProblem, solved: DampedSolution, place: int, tolerance: float, max_steps: int
) -> Numbers:
    """Return ‖x‖/√N of each sample's solution x (N,) of (JJᵀ + εI)x = Jδ, the influence of its
    perturbation δ. J is the Jacobian of the sample's gradient, and ε the damping of index ``place``
    in ``solved``. A norm that did not converge to ``tolerance`` in ``max_steps`` steps of LSQR
    becomes NaN, and its note gives a lower bound.
    """
    root = problem.operator.num_inputs**0.5
    done, norms = solved.converged[:, place], solved.norms[:, place] / root
    least = (solved.lower_bounds[:, place] / root).tolist()
    missed = [
        "" if sure else f"unresolved: at least {value:.3g} after {max_steps} steps"
        for sure, value in zip(done.tolist(), least, strict=True)
    ]
    notes = first_notes(notes_where(problem.undefended, UNDEFENDED), missed)
    states: list[State] = ["within tolerance" if sure else "lower bound" for sure in done.tolist()]
    values = torch.where(done, norms, torch.nan)
    return Numbers(values, notes, values * tolerance, states)


def numbers_of(estimate: Estimate, bound: str, quantity: str = "") -> Numbers:
    """Return an estimate for S samples as values, notes, errors and states. A value that did not
    converge becomes NaN, and its note gives the estimate as a bound, with the quantity's name
    unless ``quantity`` is empty. ``bound`` says which bound such an estimate is: ``at least`` gives
    the state ``lower bound``, ``at most`` the state ``upper bound``, and any other text
    ``unresolved``.
    """
    subject = f"{quantity} {bound}".strip()
    missed: dict[str, State] = {"at least": "lower bound", "at most": "upper bound"}
    notes: list[str] = []
    states: list[State] = []
    for value, converged in zip(estimate.value.tolist(), estimate.converged.tolist(), strict=True):
        said = f"{subject} {value:.3g} ({estimate.method})".strip()
        notes.append("" if converged else f"unresolved: {said}")
        states.append("within tolerance" if converged else missed.get(bound, "unresolved"))
    values = torch.where(estimate.converged, estimate.value, torch.nan)
    return Numbers(values, notes, (estimate.residual * estimate.value).abs(), states)
