"""Levenberg–Marquardt on the gradient map, with few iterations and the whole Jacobian in each."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.inversion.jacobian import Jacobian
from flwr_leakage.attacks.labels.assumed import (
    AutomaticLabels,
    LabelInference,
    answer,
    assume_targets,
)
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.solve.descent import Damping, Iterate, Posed, descend
from flwr_leakage.attacks.starts import Grey, Initialisation
from flwr_leakage.params import ravel
from flwr_leakage.records import Reconstruction
from flwr_leakage.spectral.cholesky import cholesky, cholesky_solve, gram


@dataclass(frozen=True)
class LevenbergMarquardt(OneByOne):
    """Minimise ``‖g(x) − g*‖²`` by damped Gauss–Newton steps (Marquardt 1963).

    A step solves ``(JᵀJ + μ I) s = −Jᵀ r`` with J = ∂g/∂x (P, N), r = g(x) − g* and a damping μ
    that falls after a success and grows after a failure. J is dense and in float64. A step takes N
    forward derivatives of the gradient, memory for P·N numbers, and N³ operations.

    Attributes:
        iterations: largest number of steps, each with a Jacobian of its own, ≥ 1.
        damping: first μ, relative to the largest diagonal entry of JᵀJ.
        tolerance: relative squared distance of gradients at which the attack stops.
        labels: the inference of labels that the threat model does not grant.
        initialisation: the first candidate.
        max_entries: largest number of entries of a Jacobian; a larger one is refused.
        chunk_size: number of columns of J that are computed together.
    """

    purpose: ClassVar[str] = "levenberg marquardt"

    iterations: int = 30
    damping: float = 1e-3
    tolerance: float = 1e-13
    labels: LabelInference = field(default_factory=AutomaticLabels)
    initialisation: Initialisation = field(default_factory=Grey)
    max_entries: int = 200_000_000
    chunk_size: int = 128

    def __post_init__(self) -> None:
        require(self, "be at least 1", "iterations")
        require(self, "be positive", "damping")

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the samples that explain the update of one problem in float64.

        Raises:
            ValueError: the Jacobian has more than ``max_entries`` entries.
        """
        stopped = False
        targets = assume_targets(problem, self.labels, generator).values
        model = Jacobian(problem, targets, self.chunk_size, self.max_entries)
        observed = torch.cat([ravel(posed.gradient) for posed in problem.rounds])
        model.require(len(observed))
        scale = observed.norm()

        def residual(point: Tensor) -> Tensor:
            return (model.gradient(point) - observed) / scale

        def pose(at: Iterate) -> Posed | None:
            nonlocal stopped
            error = residual(at.point)
            value = float(error.square().sum())
            is_over = at.steps == self.iterations or (at.steps and not at.has_moved)
            if is_over or not value > self.tolerance:
                return None
            transposed = model.transposed(at.point, budget)
            stopped = budget.is_spent
            if transposed is None or stopped:
                return None
            transposed /= scale
            normal, slope = gram(transposed), transposed @ error
            largest = float(normal.diagonal().max())

            def solve(damping: float) -> tuple[Tensor, int]:
                factor, _ = cholesky(normal.clone(), damping * largest)
                return -cholesky_solve(factor, slope).reshape(at.point.shape), 0

            def cost(trial: Tensor) -> float:
                return float(residual(trial).square().sum())

            return Posed(at.point, value, slope.reshape(at.point.shape), solve, cost)

        start = self.initialisation(problem.spec, problem.num_samples, restart, generator)
        end = descend(pose, start.double(), Damping(self.damping, factor=10))
        objective = float(residual(end.point).square().sum())
        if not math.isfinite(objective):
            return failure("the objective was never finite.")
        return Reconstruction(
            batch=answer(problem.spec.clamp(end.point), targets),
            objective=objective,
            stats={
                "iterations": end.steps,
                **stop_mark(stopped),
            },
        )
