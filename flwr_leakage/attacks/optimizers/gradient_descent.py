"""Plain gradient descent over many rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.optimizers.base import Evaluate, Minimum, Report


@dataclass(frozen=True)
class GradientDescent:
    """Minimise by x ← x − rate · ∇f(x), the plain SGD of papers on the convergence of attacks.

    It diverges along every direction of curvature λ with rate · λ > 2, so that no rate suits all
    targets. A row ends once its objective is no longer finite.

    Attributes:
        iterations: number of steps, ≥ 1.
        learning_rate: factor of the objective's gradient in units of the normalised input, > 0.
        keep: ``best`` returns the iterate with the least objective, ``last`` the last one.
        tolerance: objective at which a row is finished.
    """

    iterations: int = 1000
    learning_rate: float = 0.1
    keep: Literal["best", "last"] = "best"
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}.")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}.")
        if self.keep not in ("best", "last"):
            raise ValueError(f"keep must be 'best' or 'last', got {self.keep!r}.")

    def __call__(
        self,
        evaluate: Evaluate,
        start: Float[Tensor, "R D"],
        project: Callable[[Tensor], Tensor] | None = None,
        report: Report | None = None,
        budget: Budget = UNLIMITED,
    ) -> Minimum:
        """Return the minima of R objectives from ``start`` (R, D); see :class:`.Optimizer`."""
        num_rows = start.shape[0]
        rows = torch.arange(num_rows, device=start.device)
        points, kept = start.clone(), start.clone()
        kept_values = start.new_full((num_rows,), math.inf)
        taken = torch.zeros(num_rows, dtype=torch.int64, device=start.device)
        stopped = False
        for step in range(self.iterations + 1):
            values, gradients = evaluate(points, rows)
            taken[rows] += 1
            finite = torch.isfinite(values)
            better = finite & ((values < kept_values[rows]) | (self.keep == "last"))
            kept[rows[better]], kept_values[rows[better]] = points[better], values[better]
            if report is not None:
                report(step, num_rows - len(rows), kept_values)
            alive = finite & (values > self.tolerance)
            if step == self.iterations or not bool(alive.any()):
                break
            if budget.is_spent:
                stopped = True
                break
            rows, points = rows[alive], points[alive]
            points = points - self.learning_rate * gradients[alive]
            if project is not None:
                points = project(points)
        return Minimum(kept, kept_values, (taken - 1).clamp_min(0), taken, stopped)
