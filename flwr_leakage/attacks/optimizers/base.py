"""The interface of optimizers of many rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(points (A, D), rows (A,)) ↦ values (A,) and gradients (A, D) of those rows' objectives."""

Report = Callable[[int, int, Tensor], None]
"""(iteration, finished rows, best values (R,)) ↦ None."""


@dataclass(frozen=True)
class Minimum:
    """The best points found for R rows.

    Attributes:
        points: (R, D) points.
        values: (R,) objectives; infinite for a row without a finite value.
        iterations: (R,) number of steps taken.
        evaluations: (R,) number of gradients computed.
        stopped: whether the budget was spent before all rows were finished.
    """

    points: Float[Tensor, "R D"]
    values: Float[Tensor, " R"]
    iterations: Int[Tensor, " R"]
    evaluations: Int[Tensor, " R"]
    stopped: bool = False


@runtime_checkable
class Optimizer(Protocol):
    """Minimises R independent objectives of D variables each, together.

    Every row has its own step size and line search, so that the result equals that of
    minimising row by row. Finished rows are not evaluated any more.
    """

    @property
    def iterations(self) -> int:
        """Largest number of steps of a row."""
        ...

    def __call__(
        self,
        evaluate: Evaluate,
        start: Tensor,
        project: Callable[[Tensor], Tensor] | None = None,
        report: Report | None = None,
        budget: Budget = UNLIMITED,
    ) -> Minimum:
        """Return the best points from ``start`` (R, D); ``project`` maps to the feasible set.

        Once the budget is spent, the optimizer ends with its best points so far.
        """
        ...


class FirstValues:
    """An objective that records each row's first value.

    Optimizers first evaluate their start, so that this is the objective there. The loss drop of
    papers is the first value minus the best one.

    Args:
        evaluate: the objective.
        count: number R of rows.

    Attributes:
        values: the first value of each row; NaN before its first evaluation.
    """

    def __init__(self, evaluate: Evaluate, count: int) -> None:
        self._evaluate = evaluate
        self.values = [math.nan] * count

    def __call__(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and gradients; see ``Evaluate``."""
        found, gradients = self._evaluate(points, rows)
        if any(math.isnan(value) for value in self.values):
            for row, value in zip(rows.tolist(), found.tolist(), strict=True):
                if math.isnan(self.values[row]):
                    self.values[row] = value
        return found, gradients
