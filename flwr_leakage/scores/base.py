"""What every score is, and how several of them are computed for one client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import Budget, BudgetExhausted, within
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.samples import shared_work


@runtime_checkable
class Score(Protocol):
    """A risk of every sample of a client's round, computed without an attack."""

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """Measure; one score may return several quantities that share their work."""
        ...


def compute_scores(
    scores: Mapping[str, Score] | Sequence[Score],
    gradient_map: GradientMap,
    exposure: Exposure,
    generator: torch.Generator,
    budget: Budget | None = None,
    samples: Sequence[int] | None = None,
) -> list[Measurement]:
    """Compute all scores of one exposure; it changes neither the exposure nor the model.

    A score that fails, or that the budget does not last for, gives one measurement without
    values whose notes hold the reason; the others go on.

    Args:
        scores: by name, or in order.
        gradient_map: of the client's model and loss.
        exposure: the client's round.
        generator: for all random draws.
        budget: for all scores together, spent in order; ``None`` is no limit.
        samples: indices of those to score, in ascending order, see ``select_samples``; the
            others get no number. ``None`` is all.
    """
    if isinstance(scores, Mapping):
        named = list(scores.items())
    else:
        named = [(type(score).__name__, score) for score in scores]
    count = len(exposure.private)
    chosen = tuple(range(count)) if samples is None else tuple(samples)
    if sorted(set(chosen)) != list(chosen) or not set(chosen) <= set(range(count)):
        raise ValueError(f"samples must be ascending indices below {count}, got {chosen}.")
    measurements: list[Measurement] = []
    with within(budget or Budget()) as meter, shared_work(chosen):
        for name, score in named:
            spent = meter.products
            try:
                measurements += score(gradient_map, exposure, generator)
            except Exception as error:  # a broken score must not stop a client's round
                stopped = isinstance(error, BudgetExhausted)
                reason = f"{'not computed' if stopped else type(error).__name__}: {error}"
                measurements.append(
                    Measurement(
                        name,
                        (None,) * len(chosen),
                        "",
                        "",
                        (reason,) * len(chosen),
                        meter.products - spent,
                    )
                )
    return [_spread(measured, chosen, count) for measured in measurements]


def _spread(measured: Measurement, chosen: tuple[int, ...], count: int) -> Measurement:
    """Put the values of the chosen samples in their places among all."""
    if len(chosen) == count:
        return measured
    values: list[float | None] = [None] * count
    notes = ["not selected for scoring in this round"] * count
    for place, index in enumerate(chosen):
        values[index] = measured.values[place]
        notes[index] = measured.notes[place] if measured.notes else ""
    return replace(measured, values=tuple(values), notes=tuple(notes))
