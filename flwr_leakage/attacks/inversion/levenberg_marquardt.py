"""Levenberg–Marquardt on the gradient map: few iterations, each with the whole Jacobian."""

import math
import time
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.inversion.jacobian import Jacobian
from flwr_leakage.attacks.labels.assumed import answer, assume_targets
from flwr_leakage.attacks.labels.automatic import AutomaticLabels
from flwr_leakage.attacks.labels.base import LabelInference
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.starts.base import Initialisation
from flwr_leakage.attacks.starts.grey import Grey
from flwr_leakage.params import ravel
from flwr_leakage.records import Reconstruction
from flwr_leakage.spectral.cholesky import cholesky_solve


@dataclass(frozen=True)
class LevenbergMarquardt(OneByOne):
    """Minimise ``‖g(x) − g*‖²`` by damped Gauss–Newton steps (Marquardt 1963).

    A step solves ``(JᵀJ + μ I) s = −Jᵀ r`` with J = ∂g/∂x (P, N), r = g(x) − g* and a damping μ
    that shrinks after a success and grows after a failure. J is dense and in float64: N forward
    derivatives of the gradient a step, P·N numbers of memory, N³ operations.

    Attributes:
        iterations: accepted or rejected steps, ≥ 1.
        damping: first μ, relative to the largest diagonal entry of JᵀJ.
        tolerance: stop once the relative squared distance of gradients is below this.
        labels: how labels are inferred where the threat model does not grant them.
        initialisation: the first candidate.
        max_entries: a Jacobian with more entries is refused.
        chunk_size: columns of J computed together.
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
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}.")
        if self.damping <= 0:
            raise ValueError(f"damping must be positive, got {self.damping}.")

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Attack one problem in float64.

        Raises:
            ValueError: the Jacobian has more than ``max_entries`` entries.
        """
        began = time.process_time()
        targets = assume_targets(problem, self.labels, generator).values
        model = Jacobian(problem, targets, self.chunk_size, self.max_entries)
        spec, shape, size = problem.spec, model.shape, model.size
        observed = torch.cat([ravel(posed.gradient) for posed in problem.rounds])
        model.require(len(observed))
        scale = observed.norm()

        def residual(flat: Tensor) -> Tensor:
            return (model.gradient(flat.reshape(shape)) - observed) / scale

        point = (
            self.initialisation(spec, problem.num_samples, restart, generator).double().reshape(-1)
        )
        error = residual(point)
        value = float(error.square().sum())
        basis = torch.eye(size, dtype=torch.float64)
        damping, taken = self.damping, 0
        fresh = True
        stopped = False
        while taken < self.iterations and value > self.tolerance and damping <= 1e6:
            transposed = model.transposed(point.reshape(shape), budget) if fresh else None
            stopped = budget.is_spent
            if stopped:
                break
            taken += 1
            if transposed is not None:
                transposed /= scale
                gram, slope = transposed @ transposed.T, transposed @ error
                largest = gram.diagonal().max()
            factor, failed = torch.linalg.cholesky_ex(gram + damping * largest * basis)
            if failed:  # rounding left it indefinite
                fresh, damping = False, damping * 10
                continue
            trial = point - cholesky_solve(factor, slope)
            trial_error = residual(trial)
            trial_value = float(trial_error.square().sum())
            fresh = trial_value < value
            if fresh:
                point, error, value = trial, trial_error, trial_value
                damping = max(damping / 10, 1e-15)
            else:
                damping *= 10
        if not math.isfinite(value):
            return failure("the objective was never finite.")
        return Reconstruction(
            batch=answer(spec.clamp(point.reshape(shape)), targets),
            objective=value,
            stats={
                "iterations": taken,
                "cpu_seconds": time.process_time() - began,
                **stop_mark(stopped),
            },
        )
