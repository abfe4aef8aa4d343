"""Minimise the sum of absolute residuals by Gauss–Newton, for networks with ReLUs.

If a step takes a unit of a ReLU wrongly to be on or off, some of the linearised equations are
wrong. Least absolute residuals leave these equations unmet, and meet the others.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.inversion.jacobian import Jacobian, gram_seconds, has_kinks
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.labels.assumed import (
    AutomaticLabels,
    LabelInference,
    answer,
    assume_targets,
)
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, follow
from flwr_leakage.attacks.starts import Grey, Initialisation
from flwr_leakage.records import Reconstruction
from flwr_leakage.spectral.cholesky import gram
from flwr_leakage.values import require

REWEIGHTINGS = 5
"""Number of reweighted least-squares problems in a step. More come nearer to the least sum of
absolute residuals, and take longer. In each, the limit below which residuals have equal weights is
half of that in the one before."""


@dataclass(frozen=True)
class LeastAbsolute(OneByOne):
    """An attack that minimises ``Σ_j |g_j(x) − g*_j|``, for networks with ReLUs or max pooling.

    g_j(x) is entry j of the gradient of images x, and g*_j of the observed one. A mask says which
    units of a ReLU are on. Near the private images few masks are wrong, but a wrong mask causes
    large errors in the equations of its unit. Least squares would spread these errors over all
    pixels. The least sum of absolute values leaves the wrong equations unmet and meets the others
    (Candès & Tao 2005), so that fewer masks are wrong in the next step. Each step of Gauss–Newton
    solves reweighted least squares (Holland & Welsch 1977) with the dense Jacobian ∂g/∂x. An entry
    that may have been pruned states only a bound on |g_j|. Its residual is the excess over the
    bound, and it takes no part in a step while it is within the bound.

    Attributes:
        steps: largest number of steps, ≥ 1.
        tolerance: relative squared distance of gradients at which the attack stops.
        labels: the inference of labels that the threat model does not grant.
        initialisation: the images to start from. They should be near the private ones, as from a
            grey image most masks would be wrong.
        max_entries: largest number of entries of the Jacobian. Rows of entries within their bounds
            do not count. With more, the attack refuses the problem.
    """

    purpose: ClassVar[str] = "least absolute"

    steps: int = 25
    tolerance: float = 1e-12
    labels: LabelInference = field(default_factory=AutomaticLabels)
    initialisation: Initialisation = field(default_factory=Grey)
    max_entries: int = 100_000_000

    def __post_init__(self) -> None:
        require(self, "be at least 1", "steps")

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the samples at which the descent ends, for one problem in float64.

        ``restart`` is the number of the restart, from 0, which is passed to ``initialisation``.
        ``budget`` is the limit of CPU time; the best images at that time are returned.

        Raises:
            BudgetExhausted: the budget is too small to find out whether the network is smooth.
            ValueError: the Jacobian has more than ``max_entries`` entries, or the network is
                smooth.
        """
        problem, stopped = problem.held, False
        if not has_kinks(problem, budget):
            raise ValueError("the network must have ReLUs or max pooling, and is smooth.")
        targets = assume_targets(problem, self.labels, generator).values
        model = Jacobian(problem, targets, self.max_entries)
        likelihood = Likelihood.of([posed.gradient for posed in problem.rounds], None)

        def residual_at(inputs: Tensor) -> Tensor:
            return likelihood.residual(model.gradient(inputs))

        def cost(inputs: Tensor) -> float:
            return float(likelihood.excess(residual_at(inputs)).sum())

        def pose(at: Iterate, _: int) -> Posed | None:
            nonlocal stopped
            residual = residual_at(at.point)
            if not likelihood.distance(residual) > self.tolerance:
                return None
            excess = likelihood.excess(residual)
            rows = (likelihood.bounds == 0) | (excess > 0)
            model.require(int(rows.sum()))
            transposed = model.transposed(at.point, budget, rows)
            if transposed is None:
                stopped = True
                return None
            rounds = budget.affordable(REWEIGHTINGS, gram_seconds(transposed))
            stopped = rounds < REWEIGHTINGS
            if not rounds:
                return None
            wanted = (residual.sign() * excess)[rows]
            slope = (transposed @ wanted.sign()).reshape(at.point.shape) / 2

            def solve(_: float) -> tuple[Tensor, int]:
                return self._step(transposed, wanted, rounds).reshape(at.point.shape), 0

            return Posed(at.point, float(excess.sum()), slope, solve, cost)

        start = self.initialisation(problem.spec, problem.num_samples, restart, generator)
        search = Shortening(5, 0.4, is_best=True)
        end = follow(
            range(self.steps), pose, start.double(), lambda at, _: not at.has_moved, search
        )
        return Reconstruction(
            batch=answer(problem.spec.clamp(end.point), targets),
            objective=likelihood.distance(residual_at(end.point)),
            stats={"iterations": end.steps, **stop_mark(stopped)},
        )

    def _step(self, transposed: Tensor, residual: Tensor, rounds: int) -> Tensor:
        """Return a step s (N,) that approximately minimises ``Σ_i |r + J s|_i``.

        r (P',) is the residual, and the transposed Jacobian Jᵀ is (N, P'), for N input values. Each
        of several (``rounds``) weighted least-squares problems takes weights 1 / |r + J s|_i from
        the solution before. At first, residuals below 0.1 of their mean have equal weights. With
        each reweighting, this limit is halved. The limit, and the multiple of the identity added to
        each normal matrix, were chosen on development draws (no results were kept).
        """
        linear, step = residual, transposed.new_zeros(len(transposed))
        for number in range(rounds):
            sizes = linear.abs()
            deviations = sizes.clamp_min(0.1 * 0.5**number * sizes.mean()).sqrt()
            scaled = transposed / deviations
            matrix = gram(scaled)
            matrix.diagonal().add_(1e-9 * matrix.diagonal().mean())
            step = -torch.linalg.solve(matrix, scaled @ (residual / deviations))
            linear = residual + step @ transposed
        return step
