"""What every score is, and how several of them are computed for one client."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import Budget, BudgetExhausted, within
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.samples import shared_work


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
    """
    if isinstance(scores, Mapping):
        named = list(scores.items())
    else:
        named = [(type(score).__name__, score) for score in scores]
    measurements: list[Measurement] = []
    with within(budget or Budget()) as meter, shared_work():
        for name, score in named:
            spent = meter.products
            try:
                measurements += score(gradient_map, exposure, generator)
            except BudgetExhausted as exhausted:
                reason = f"not computed: {exhausted}"
                measurements.append(_without_values(name, exposure, reason, meter.products - spent))
            except Exception as error:  # a broken score must not stop a client's round
                reason = f"{type(error).__name__}: {error}"
                measurements.append(_without_values(name, exposure, reason, meter.products - spent))
    return measurements


def _without_values(name: str, exposure: Exposure, reason: str, products: int) -> Measurement:
    count = len(exposure.private)
    return Measurement(name, (None,) * count, "", "", (reason,) * count, products)
