"""Define the interface of scores, and the base of scores that treat each sample separately."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
from flwr_leakage.spectral import CONFIDENCE, Estimate, sampling_error

UNDEFENDED = "δ = 0: nothing was hidden, a perfect attacker recovers this sample exactly"
FLAT = "J = 0: there is nothing to invert"


@runtime_checkable
class Score(Protocol):
    """A risk of every sample of a client's round, computed without an attack."""

    def __call__(self, client: ClientSamples, seed: int) -> list[Measurement]:
        """Return one measurement for each quantity; the first one counts the products of all.

        Args:
            client: the model's gradient map, the exposure of the samples to be scored, and what
                scores share. It stays as it is, but for the work that it keeps.
            seed: the seed of the score's own random draws.

        Returns:
            Measurements with one value for each sample of ``client.exposure``, in its order.
        """
        ...


@dataclass(frozen=True)
class Column:
    """One quantity of S samples, as a score computes it.

    Attributes:
        name: the field's name of the quantity.
        values: (S,); NaN or infinity where there is no number.
        unit: ``1``, ``model input``, …
        direction: the meaning of a larger value.
        notes: one for each sample, or none at all: why there is no number, or how to read it.
        errors: (S,) half the width of the error bar, in ``unit``; NaN where it is unknown, ``None``
            where nothing is said.
        states: one for each sample, or none at all, see ``Measurement``. A sample that gets no
            number is ``unresolved`` unless its state is a bound.
    """

    name: str
    values: Float[Tensor, " S"]
    unit: str
    direction: Direction
    notes: Sequence[str] = ()
    errors: Float[Tensor, " S"] | None = None
    states: Sequence[State] = ()


@dataclass(frozen=True, kw_only=True)
class SampleScore(ABC):
    """A score that looks at every sample on its own: a subclass defines ``measure``.

    As many samples are treated at a time as fit into memory. A sample without a finite gradient, or
    that training never used, gets no number but the reason; so does a value that is not finite.
    Products are counted. A sample's value does not depend on the samples beside it, as long as
    ``measure`` treats all rows alike and draws for each row from that row's generator.

    Example:
        >>> @dataclass(frozen=True)
        ... class GradientPeak(SampleScore):
        ...     def measure(self, problem, draws):
        ...         peaks = problem.gradients.abs().amax(1)
        ...         return [Column("gradient_peak", peaks, "1", "larger leaks more")]

    Attributes:
        point: ``defended``: the samples as they entered training; ``private``: those before the
            defense encoded them, see ``ClientSamples.problems``.
        precision: the floating-point type of all computations.
        memory_bytes: how much memory the samples that are treated together may take.
    """

    point: Point = "defended"
    precision: Precision = "float32"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    @abstractmethod
    def measure(self, problem: SampleProblem, draws: Draws) -> Sequence[Column]:
        """Return the quantities of S samples, the same ones for all samples of a round.

        Args:
            problem: the problem of the samples.
            draws: one generator for each of them.
        """

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Return the bytes that ``measure`` takes for one sample, beside its gradient's graph."""
        return 0

    def __call__(self, client: ClientSamples, seed: int) -> list[Measurement]:
        """Return one measurement for each quantity; the first one counts the products of all."""
        before = client.meter.products
        num_inputs = client.exposure.private.inputs[:1].numel()
        num_parameters = sum(value.numel() for value in client.exposure.params.values())
        extra = self.extra_bytes(num_inputs, num_parameters)
        windows = []
        places: list[int] = []
        for problem in client.problems(self.point, self.precision, self.memory_bytes, extra):
            columns = self.measure(problem, problem.generators(seed))
            windows.append([_measured(column, problem) for column in columns])
            places += problem.indices
        products = client.meter.products - before
        order = [places.index(index) for index in client.exposure.indices]
        joined = [_join(parts, order) for parts in zip(*windows, strict=True)]
        return [replace(m, products=0 if i else products) for i, m in enumerate(joined)]


def _measured(column: Column, problem: SampleProblem) -> Measurement:
    """Replace a number by a reason if its sample is unsound or its value is not finite."""
    count = len(problem)
    bars = column.values.new_full((count,), math.nan) if column.errors is None else column.errors
    given = (column.values.shape, bars.shape, len(column.notes), len(column.states))
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
        problem.notes,
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
        for value, unsound, state in zip(values, problem.notes, column.states, strict=False)
    ]
    return Measurement(
        column.name,
        tuple(values),
        column.unit,
        column.direction,
        tuple(notes),
        errors=() if column.errors is None else tuple(errors),
        states=tuple(states),
    )


def _join(parts: Sequence[Measurement], order: Sequence[int]) -> Measurement:
    """Return one quantity of all samples, in order, from the quantities of each window."""
    names = {part.name for part in parts}
    if len(names) > 1:
        raise ValueError(f"measure must give the same quantities of all samples, got {names}.")

    def joined(name: str) -> tuple[Any, ...]:
        entries = [entry for part in parts for entry in getattr(part, name)]
        return tuple(entries[place] for place in order) if entries else ()

    notes = joined("notes")
    return replace(
        parts[0],
        values=joined("values"),
        notes=notes if any(notes) else (),
        errors=joined("errors"),
        states=joined("states"),
    )


def notes_where(condition: Bool[Tensor, " S"], text: str) -> list[str]:
    """Return ``text`` for the samples for which the condition holds, and nothing for others."""
    return [text if holds else "" for holds in condition.tolist()]


def first_notes(*notes: Sequence[str]) -> list[str]:
    """Return, for each sample, the first of its notes that is not empty."""
    return [next((note for note in own if note), "") for own in zip(*notes, strict=True)]


def states_of(values: Float[Tensor, " S"], state: State) -> list[State]:
    """Return the state of all samples but of those without a number, which are unresolved."""
    return [state if number else "unresolved" for number in values.isfinite().tolist()]


def root_error(values: Float[Tensor, " S"], errors: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
    """Return half the width of the error bar of √v, from that of v, without linearisation."""
    root = values.sqrt()
    return torch.maximum(
        (values + errors).sqrt() - root, root - (values - errors).clamp_min(0).sqrt()
    )


def mean_of_squares(draws: Float[Tensor, "n S"]) -> tuple[Tensor, Tensor]:
    """Return the mean of n ≥ 2 squared lengths of random vectors, and half its 99 % bar.

    Squares are skewed: few draws see too small a variance too often. So the variance is raised to
    the value that it exceeds in 5 % of the cases, and the bar is that of a χ² variable; see
    ``sampling_error``.
    """
    count = len(draws)
    mean = draws.mean(0)
    raised = (count - 1) / float(2 * gammaincinv((count - 1) / 2, 0.05))
    return mean, mean * sampling_error(mean, raised * draws.var(0) / count)


def mean_with_error(draws: Float[Tensor, "n S"]) -> tuple[Tensor, Tensor]:
    """Return the mean of n draws, and half its 99 % bar by Student's t; NaN for n = 1."""
    count = len(draws)
    mean = draws.mean(0)
    if count == 1:
        return mean, torch.full_like(mean, torch.nan)
    width = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) / count**0.5
    return mean, width * draws.std(0)


class Numbers(NamedTuple):
    """Values, errors and states of an estimate, one for each of S samples; see ``Column``."""

    values: Float[Tensor, " S"]
    notes: list[str]
    errors: Float[Tensor, " S"]
    states: list[State]


def numbers_of(estimate: Estimate, bound: str, quantity: str = "") -> Numbers:
    """Read an estimate. A value that did not converge becomes NaN, and its state a bound.

    Args:
        estimate: one for each of S samples.
        bound: how to read a value that did not converge: ``at least``, ``at most``, or nothing
            where it is no bound.
        quantity: the estimated quantity, where the measurement is of another one.
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
