"""Damped Gauss–Newton for least squares whose Jacobian is known by its products only.

``min ‖r(x)‖²`` is solved by steps ``(JᵀJ + μ d̄ I) Δ = −Jᵀr``, with the Jacobian J of r at x and
the mean d̄ of JᵀJ's diagonal. The damping μ falls after a step that did well and grows after one
that did not (Levenberg 1944, Marquardt 1963). Each system is solved by conjugate gradients. Their
preconditioner is the Cholesky factor of an earlier step's matrix, for as long as that is good
enough.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.spectral.cholesky import cholesky_solve
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients


@runtime_checkable
class Linearised(Protocol):
    """The derivative J of residuals at some inputs x: r(x + Δ) ≈ r(x) + J Δ."""

    def push(self, steps: Tensor) -> Tensor:
        """J Δ (B, R), for steps Δ (B, *shape)."""

    def pull_back(self) -> Callable[[Tensor], Tensor]:
        """The product with Jᵀ as a function: u (1, R) ↦ Jᵀ u (1, *shape)."""

    def normal_matrix(self) -> Tensor:
        """JᵀJ (D, D) for inputs of D entries, in the precision in which it is to be factored."""


@runtime_checkable
class LeastSquares(Protocol):
    """A problem ``min ‖r(x)‖²`` in inputs x of shape (1, *shape)."""

    def sum_of_squares(self, inputs: Tensor) -> float:
        """‖r(x)‖²."""

    def linearise(self, inputs: Tensor) -> tuple[Tensor, Linearised]:
        """The residuals r(x) (1, R), and their derivative at x."""


@dataclass(frozen=True)
class Preconditioner:
    """The Cholesky factor of ``JᵀJ + shift d̄ I`` at some inputs.

    Attributes:
        matrix: JᵀJ.
        shift: the shift; more than was asked for where the factor would not exist otherwise.
        factor: the lower triangular factor, in the precision of the matrix.
        is_current: whether J was taken at the inputs of the step that is being solved for.
        is_worn: whether conjugate gradients took long with it, so that the next step needs another.
    """

    matrix: Tensor
    shift: float
    factor: Tensor
    is_current: bool = True
    is_worn: bool = False

    @classmethod
    def of(cls, matrix: Tensor, shift: float, is_current: bool = True) -> "Preconditioner":
        """Factor ``JᵀJ + shift d̄ I``; while that has no factor, the shift grows tenfold."""
        mean = max(float(matrix.diagonal().mean()), 1e-30)
        while True:
            shifted = matrix.clone()
            shifted.diagonal().add_(shift * mean)
            factor, failed = torch.linalg.cholesky_ex(shifted)
            if not failed or shift > 1:
                return cls(matrix, shift, factor, is_current)
            shift *= 10

    def __call__(self, vector: Tensor) -> Tensor:
        """Solve the factored system for one right-hand side (D,)."""
        return cholesky_solve(self.factor, vector).to(vector.dtype)


@dataclass(frozen=True)
class Iterate:
    """The state of the iteration between two steps.

    Attributes:
        inputs: x (1, *shape).
        damping: μ of the next step.
        slow: how many steps in a row brought little.
        is_last: whether the iteration is over: no further step would be worth its cost.
        has_moved: whether the last step found better inputs.
        preconditioner: the preconditioner of the last step; ``None`` before the first.
    """

    inputs: Tensor
    damping: float = 1e-3
    slow: int = 0
    is_last: bool = False
    has_moved: bool = False
    preconditioner: Preconditioner | None = None


@dataclass(frozen=True)
class GaussNewton:
    """The settings of damped Gauss–Newton; :meth:`step` takes one step.

    Attributes:
        steps: most steps, ≥ 0.
        progress: the iteration ends if two steps in a row do not lower the sum of squares to this
            share, in (0, 1].
        solved: it also ends once the sum of squares is at most this, ≥ 0.
        rejections: how often a step is tried, with more and more damping, ≥ 1.
        tolerance: relative residual to which a step's linear system is solved, in (0, 1). A lower
            one would be wasted, as the linear model of a step is less exact than that.
        many_iterations: if conjugate gradients take more iterations in a system, the normal matrix
            is computed anew for the next step, ≥ 1.
        most_iterations: most iterations, ≥ 1. If they take this many, the matrix is computed anew
            for the same step. It costs about as much as 60 iterations.
        least_shift: least shift of the preconditioner, as a share of d̄, > 0, so that the rounding
            of single precision does not make its matrix indefinite.
        most_unknowns: most entries that inputs may have, as the normal matrix has their square.
    """

    steps: int = 8
    progress: float = 0.75
    solved: float = 1e-7
    rejections: int = 6
    tolerance: float = 1e-2
    many_iterations: int = 40
    most_iterations: int = 60
    least_shift: float = 1e-5
    most_unknowns: int = 5000

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps must be at least 0, got {self.steps}.")
        for name in ("rejections", "many_iterations", "most_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.progress <= 1:
            raise ValueError(f"progress must lie in (0, 1], got {self.progress}.")
        if self.solved < 0:
            raise ValueError(f"solved must be at least 0, got {self.solved}.")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must lie in (0, 1), got {self.tolerance}.")
        if not self.least_shift > 0:
            raise ValueError(f"least_shift must be above 0, got {self.least_shift}.")

    def iterates(self, problem: LeastSquares, start: Tensor) -> list[Tensor]:
        """The inputs (1, *shape) after each step, each better than the one before."""
        found = []
        iterate = Iterate(start)
        for _ in range(self.steps):
            iterate = self.step(problem, iterate)
            if iterate.has_moved:
                found.append(iterate.inputs)
            if iterate.is_last:
                break
        return found

    def step(self, problem: LeastSquares, at: Iterate) -> Iterate:
        """Take one step; the problem may differ from that of the step before."""
        residual, system = problem.linearise(at.inputs)
        pull = system.pull_back()
        value, slope = float(residual.square().sum()), pull(residual)
        damping, preconditioner = at.damping, at.preconditioner
        if preconditioner is not None:
            preconditioner = replace(preconditioner, is_current=False)
        trial, found = at.inputs, value
        for _ in range(self.rejections):
            step, preconditioner = self._solve(system, pull, slope, damping, preconditioner)
            trial = at.inputs + step
            found = problem.sum_of_squares(trial)
            promised = -float((slope * step).sum())
            if found <= value - 0.25 * promised:
                damping /= 10 if found <= value - 0.75 * promised else 2
                break
            damping *= 8 if found >= value else 3
            if found < 0.9 * value:
                break
        if not found < value:
            return replace(at, is_last=True, has_moved=False)
        slow = at.slow + 1 if found > self.progress * value else 0
        is_last = found <= self.solved or slow >= 2
        return Iterate(trial, damping, slow, is_last, True, preconditioner)

    def _solve(
        self,
        system: Linearised,
        pull: Callable[[Tensor], Tensor],
        slope: Tensor,
        damping: float,
        preconditioner: Preconditioner | None,
    ) -> tuple[Tensor, Preconditioner]:
        """The damped step for a slope Jᵀr, and the preconditioner that was used."""
        least = max(damping, self.least_shift)
        used = preconditioner
        if used is None or (used.is_worn and not used.is_current):
            used = Preconditioner.of(system.normal_matrix(), least)
        elif not used.shift / 30 <= least <= used.shift * 30:
            used = Preconditioner.of(used.matrix, least, used.is_current)
        shift = damping * float(used.matrix.diagonal().mean())

        def product(vector: Tensor) -> Tensor:
            return pull(system.push(vector.reshape(slope.shape))).flatten() + shift * vector

        step, iterations = conjugate_gradients(
            product, -slope.flatten(), self.tolerance, self.most_iterations, used
        )
        if iterations >= self.most_iterations and not used.is_current:
            return self._solve(system, pull, slope, damping, None)
        used = replace(used, is_worn=iterations > self.many_iterations)
        return step.reshape(slope.shape), used
