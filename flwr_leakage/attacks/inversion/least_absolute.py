"""Gauss–Newton for the least absolute residual: what a few wrong masks spoil is set aside."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget, Stopwatch, stop_mark
from flwr_leakage.attacks.inversion.jacobian import Jacobian
from flwr_leakage.attacks.inversion.kinks import has_kinks
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.labels.assumed import answer, assume_targets
from flwr_leakage.attacks.labels.automatic import AutomaticLabels
from flwr_leakage.attacks.labels.base import LabelInference
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, descend
from flwr_leakage.attacks.starts.base import Initialisation
from flwr_leakage.attacks.starts.grey import Grey
from flwr_leakage.records import Reconstruction

NEAR = 0.1
"""Residual, in units of the mean, below which the first least squares weigh entries alike."""

RIDGE = 1e-9
"""Added to the matrix of a step, in units of the mean of its diagonal."""


@dataclass(frozen=True)
class LeastAbsolute(OneByOne):
    """Minimise ``Σ_j |g_j(x) − g*_j|`` by Gauss–Newton, for networks with ReLUs or max pooling.

    Near the samples few masks are wrong, and a wrong one spoils the equations that its unit has a
    part in, by much. Least squares spread that error over all pixels. The least sum of absolute
    values leaves spoilt equations unmet and meets the others (Candès & Tao 2005), after which
    fewer masks are wrong. Each step is made of reweighted least squares (Holland & Welsch 1977)
    with the dense Jacobian. Of entries that may have been pruned, what exceeds their bound counts,
    and those within it have no part in a step.

    Attributes:
        steps: at most, ≥ 1.
        reweightings: least squares of a step, ≥ 1.
        tolerance: stop once the relative squared distance of gradients is below this.
        labels: how labels are inferred where the threat model does not grant them.
        initialisation: the first candidate. From grey most masks are wrong.
        max_entries: a Jacobian with more entries is refused, those within their bounds left out.
        chunk_size: columns of J computed together.
    """

    purpose: ClassVar[str] = "least absolute"

    steps: int = 25
    reweightings: int = 5
    tolerance: float = 1e-12
    labels: LabelInference = field(default_factory=AutomaticLabels)
    initialisation: Initialisation = field(default_factory=Grey)
    max_entries: int = 100_000_000
    chunk_size: int = 96

    def __post_init__(self) -> None:
        require(self, "be at least 1", "steps", "reweightings")

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Attack one problem in float64.

        Raises:
            ValueError: the Jacobian has more than ``max_entries`` entries, or the network is
                smooth.
        """
        watch, stopped = Stopwatch(), False
        if not has_kinks(problem):
            raise ValueError("the network must have ReLUs or max pooling, and is smooth.")
        targets = assume_targets(problem, self.labels, generator).values
        model = Jacobian(problem, targets, self.chunk_size, self.max_entries)
        likelihood = Likelihood.of([posed.gradient for posed in problem.rounds], None)

        def residual_at(inputs: Tensor) -> Tensor:
            return likelihood.residual(model.gradient(inputs))

        def cost(inputs: Tensor) -> float:
            return float(likelihood.excess(residual_at(inputs)).sum())

        def pose(at: Iterate) -> Posed | None:
            nonlocal stopped
            residual = residual_at(at.point)
            is_over = at.steps == self.steps or (at.steps and not at.has_moved)
            if is_over or not likelihood.distance(residual) > self.tolerance:
                return None
            excess = likelihood.excess(residual)
            rows = (likelihood.bounds == 0) | (excess > 0)
            model.require(int(rows.sum()))
            transposed = model.transposed(at.point, budget, rows)
            stopped = transposed is None or budget.is_spent
            if transposed is None or stopped:
                return None
            wanted = (residual.sign() * excess)[rows]
            slope = (transposed @ wanted.sign()).reshape(at.point.shape) / 2

            def solve(_: float) -> tuple[Tensor, int]:
                return self._step(transposed, wanted).reshape(at.point.shape), 0

            return Posed(at.point, float(excess.sum()), slope, solve, cost)

        start = self.initialisation(problem.spec, problem.num_samples, restart, generator)
        end = descend(pose, start.double(), Shortening(5, 0.4, is_best=True))
        return Reconstruction(
            batch=answer(problem.spec.clamp(end.point), targets),
            objective=likelihood.distance(residual_at(end.point)),
            stats={
                "iterations": end.steps,
                "cpu_seconds": watch.seconds,
                **stop_mark(stopped),
            },
        )

    def _step(self, transposed: Tensor, residual: Tensor) -> Tensor:
        """The step (N,) that leaves the least sum of absolute values of r + J s, r (P',)."""
        linear, step = residual, transposed.new_zeros(len(transposed))
        for number in range(self.reweightings):
            sizes = linear.abs()
            weighted = transposed / sizes.clamp_min(NEAR * 0.5**number * sizes.mean())
            gram = weighted @ transposed.T
            gram.diagonal().add_(RIDGE * gram.diagonal().mean())
            step = -torch.linalg.solve(gram, weighted @ residual)
            linear = residual + step @ transposed
        return step
