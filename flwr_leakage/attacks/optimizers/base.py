"""What an optimizer of many rows is given, and what it returns."""

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
        points: (R, D).
        values: (R,); infinite where no finite value was met.
        iterations: (R,) steps taken.
        evaluations: (R,) gradients computed.
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
    minimising row by row. Rows that are finished are not evaluated any more.
    """

    @property
    def iterations(self) -> int:
        """The most steps that a row may take."""
        ...

    def __call__(
        self,
        evaluate: Evaluate,
        start: Tensor,
        project: Callable[[Tensor], Tensor] | None = None,
        report: Report | None = None,
        budget: Budget = UNLIMITED,
    ) -> Minimum:
        """Minimise from ``start`` (R, D); ``project`` maps points onto the feasible set.

        Once the budget is spent, it ends with the best points that it has.
        """
        ...


class FirstValues:
    """An objective that remembers each row's value at the first point where it was asked for.

    An optimizer asks at its start first, so that this is where the objective begins: a paper's
    loss drop is the first value less the best one.

    Args:
        evaluate: what is asked.
        count: R, the rows.

    Attributes:
        values: one a row; NaN until it is asked.
    """

    def __init__(self, evaluate: Evaluate, count: int) -> None:
        self._evaluate = evaluate
        self.values = [math.nan] * count

    def __call__(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """See ``Evaluate``."""
        found, gradients = self._evaluate(points, rows)
        if any(math.isnan(value) for value in self.values):
            for row, value in zip(rows.tolist(), found.tolist(), strict=True):
                if math.isnan(self.values[row]):
                    self.values[row] = value
        return found, gradients
