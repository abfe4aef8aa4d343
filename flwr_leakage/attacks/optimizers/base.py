"""What an optimizer of many rows is given, and what it returns."""

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
