"""Define the interface of optimizers that minimise many independent objectives, and Adam.

Each objective has a row of its own in the matrix (R, D) of points.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.values import require

Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Map from points (A, D), and the numbers (A,) of the rows that they belong to, to the values
(A,) and gradients (A, D) of these rows' objectives."""

Report = Callable[[int, Tensor], None]
"""Function that is told the number of the iteration and the best value (R,) of each row so far."""


@dataclass(frozen=True)
class Minimum:
    """The best points that an optimizer found for R independent objectives, one in each row.

    Attributes:
        points: (R, D) points.
        values: (R,) the objectives there; infinite for a row without a finite value.
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
    """Minimise R independent objectives of D variables each, together.

    Every objective has its own row of variables, with its own step size and line search. So the
    result equals that of minimising row by row. Finished rows are no longer evaluated.
    """

    @property
    def iterations(self) -> int:
        """Largest number of steps that the optimizer takes for an objective."""
        ...

    def __call__(
        self,
        evaluate: Evaluate,
        start: Tensor,
        project: Callable[[Tensor], Tensor] | None = None,
        report: Report | None = None,
        budget: Budget = UNLIMITED,
    ) -> Minimum:
        """Return the best points found for R objectives, one in each row.

        Args:
            evaluate: map from points (A, D) and their rows' numbers (A,) to values (A,) and
                gradients (A, D).
            start: (R, D) the points to start from.
            project: map from points to feasible points; ``None`` if all are feasible.
            report: function that is told each iteration's number and the best values (R,) so far.
            budget: the CPU time. Once it is spent, the best points so far are returned.
        """
        ...


def of_one(function: Callable[[Tensor], Tensor]) -> Evaluate:
    """Return the objective of a single row, as optimizers take it.

    ``function`` maps the row's variables (D,) to a differentiable scalar.
    """

    def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = torch.func.grad_and_value(function)(points[0])
        return value[None], gradient[None]

    return evaluate


class FirstValues:
    """An objective that records the first value of each of its rows.

    Optimizers first evaluate their start, so that the recorded value is the objective at the start.
    Papers call the difference between this value and the best value the loss drop.

    Args:
        evaluate: the objective: a map from points (A, D) and their rows' numbers (A,) to values
            (A,) and gradients (A, D).
        count: number R of rows.

    Attributes:
        values: the first value of each row; NaN before its first evaluation.
    """

    def __init__(self, evaluate: Evaluate, count: int) -> None:
        self._evaluate = evaluate
        self.values = [math.nan] * count

    def __call__(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (A,) and gradients (A, D) at points (A, D); record each row's first value.

        ``rows`` (A,) are the numbers of the rows that the points belong to.
        """
        found, gradients = self._evaluate(points, rows)
        if any(math.isnan(value) for value in self.values):
            for row, value in zip(rows.tolist(), found.tolist(), strict=True):
                if math.isnan(self.values[row]):
                    self.values[row] = value
        return found, gradients


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015) for many objectives, with optional signed gradients.

    Signed gradients are those of Geiping et al. (2020). Each objective has its own row.

    Attributes:
        iterations: number of steps, ≥ 1.
        learning_rate: the learning rate of the first step, > 0.
        sign: the part of the gradient that is used: ``none`` (all of it), ``hard`` (its sign only)
            or ``soft`` (its tanh, in units of the row's mean absolute gradient).
        decay: decay of the learning rate: ``none``, ``step`` (a tenth after each of 3/8, 5/8 and
            7/8 of all steps) or ``cosine`` (to zero).
        tolerance: value of an objective at which its row is finished.
    """

    iterations: int = 1000
    learning_rate: float = 0.1
    sign: Literal["none", "hard", "soft"] = "none"
    decay: Literal["none", "step", "cosine"] = "none"
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        require(self, "be at least 1", "iterations")
        require(self, "be positive", "learning_rate")
        if self.sign not in ("none", "hard", "soft"):
            raise ValueError(f"sign must be 'none', 'hard' or 'soft', got {self.sign!r}.")
        if self.decay not in ("none", "step", "cosine"):
            raise ValueError(f"decay must be 'none', 'step' or 'cosine', got {self.decay!r}.")

    def rate(self, step: int) -> float:
        """Return the learning rate of Adam's step with the given number, counted from 0."""
        fraction = step / self.iterations
        if self.decay == "step":
            return self.learning_rate * 0.1 ** sum(fraction >= k / 8 for k in (3, 5, 7))
        if self.decay == "cosine":
            return self.learning_rate * 0.5 * (1 + math.cos(math.pi * fraction))
        return self.learning_rate

    def __call__(
        self,
        evaluate: Evaluate,
        start: Float[Tensor, "R D"],
        project: Callable[[Tensor], Tensor] | None = None,
        report: Report | None = None,
        budget: Budget = UNLIMITED,
    ) -> Minimum:
        """Return the best points that Adam found for R objectives, one in each row.

        A row ends once its objective is not finite, or at most ``tolerance``. See
        :class:`.Optimizer` for the arguments.
        """
        num_rows, stopped = start.shape[0], False
        rows = torch.arange(num_rows, device=start.device)
        points, kept = start.clone(), start.clone()
        kept_values = start.new_full((num_rows,), math.inf)
        taken = torch.zeros(num_rows, dtype=torch.int64, device=start.device)
        first, second = torch.zeros_like(start), torch.zeros_like(start)
        for step in range(self.iterations + 1):
            values, gradients = evaluate(points, rows)
            taken[rows] += 1
            finite = torch.isfinite(values)
            better = finite & (values < kept_values[rows])
            kept[rows[better]], kept_values[rows[better]] = points[better], values[better]
            if report is not None:
                report(step, kept_values)
            alive = finite & (values > self.tolerance)
            if step == self.iterations or not bool(alive.any()):
                break
            if budget.is_spent:
                stopped = True
                break
            rows, points, gradients = rows[alive], points[alive], self._signed(gradients[alive])
            first[rows] = first[rows].mul_(0.9).add_(gradients, alpha=1 - 0.9)
            second[rows] = second[rows].mul_(0.999).addcmul_(gradients, gradients, value=1 - 0.999)
            mean = first[rows] / (1 - 0.9 ** (step + 1))
            root = (second[rows] / (1 - 0.999 ** (step + 1))).sqrt()
            points = points - self.rate(step) * mean / (root + 1e-8)
            if project is not None:
                points = project(points)
        return Minimum(kept, kept_values, (taken - 1).clamp_min(0), taken, stopped)

    def _signed(self, gradients: Tensor) -> Tensor:
        if self.sign == "hard":
            return gradients.sign()
        if self.sign == "soft":
            unit = gradients.abs().mean(dim=1, keepdim=True).clamp_min(1e-30)
            return torch.tanh(gradients / unit)
        return gradients
