"""Pose a Gauss–Newton step with a normal prior of images, and draw from its posterior."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.solve.descent import Posed
from flwr_leakage.attacks.solve.linearization import Linearized
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.patch_prior import PatchCost

POWER_ITERATIONS = 6
"""Number of steps of the power method that estimate the largest eigenvalue of a run's first normal
matrix, see :func:`largest_eigenvalue`. The prior's weight in the first step is a tenth of this
eigenvalue. That weight need not be exact, so that an estimate that is wrong by 20 % does no
harm."""


@dataclass(frozen=True)
class Solver:
    """The settings of conjugate gradients for the linear system of a step.

    :func:`~flwr_leakage.spectral.conjugate_gradient.conjugate_gradients` solves the system.

    Attributes:
        iterations: the largest number of iterations.
        tolerance: the iterations end at this share of the first preconditioned residual.
        precondition: map that approximates the inverse of the system's matrix.
        budget: the CPU time; the iterations also end after the one in which it is spent.
    """

    iterations: int
    tolerance: float = 3e-2
    precondition: Callable[[Tensor], Tensor] = field(default=lambda vector: vector)
    budget: Budget = UNLIMITED

    def __call__(self, product: Callable[[Tensor], Tensor], right: Tensor) -> tuple[Tensor, int]:
        """Return the solution x of ``A x = b``, and the number of iterations that it took.

        ``product`` maps x to A x. All have the shape of b, ``right``.
        """
        found, taken = conjugate_gradients(
            lambda flat: product(flat.reshape(right.shape)).flatten(),
            right.flatten(),
            self.tolerance,
            self.iterations,
            self.precondition,
            lambda: self.budget.is_spent,
        )
        return found.reshape(right.shape), taken


@dataclass(frozen=True)
class Posterior:
    """The objective of a Gauss–Newton step for images x, with a normal prior.

    Images are ``x = μ + L s``, with the prior's mean μ, a root L of its covariance, and coordinates
    s. The objective is ``Φ(s) = Σ_j w_j r_j(x)² + ρ sᵀ Q s``, linearised in the residuals r about a
    point s. Half of its second derivative is ``A = LᵀJᵀWJL + ρ Q``, where J is the derivative of r
    by x and W = diag(w). That is the precision of a normal posterior of s. A call of the object
    gives a product with A.

    Attributes:
        linear: products with J.
        prior: the prior with μ and L, in the precision of the linear systems.
        weights: (P,) weights w of the P residuals, in double precision.
        residual: (P,) residuals r at s, in double precision.
        point: (B, C, H, W) the coordinates s.
        residual_at: map from other coordinates (B, C, H, W) to the residuals there.
        weight: the weight ρ of the prior.
        cost: map from s to Q s; the identity by default.
        patches: a prior of patches in place of ρ Q, or ``None``.
    """

    linear: Linearized
    prior: ImagePrior
    weights: Tensor
    residual: Tensor
    point: Tensor
    residual_at: Callable[[Tensor], Tensor]
    weight: float = 1.0
    cost: Callable[[Tensor], Tensor] = field(default=lambda coordinates: coordinates)
    patches: PatchCost | None = None

    @cached_property
    def _weights(self) -> Tensor:
        return self.weights.to(self.prior.grey)

    def pull_back(self, dual: Tensor) -> Tensor:
        """Return LᵀJᵀ u (B, C, H, W), the gradient by coordinates of ⟨u, r⟩ for residuals r.

        L maps coordinates to images, and J is the derivative of r by these. u has r's shape.
        """
        return self.prior.pull(self.linear.pull(dual))

    def told(self, direction: Tensor) -> Tensor:
        """Return LᵀJᵀWJL d (B, C, H, W), the part of the precision times d that the residuals give.

        d (B, C, H, W) is a change of the coordinates. L maps these to images, J is the derivative
        of the residuals by the images, and W holds the residuals' weights.
        """
        return self.pull_back(self._weights * self.linear.push(self.prior.push(direction)))

    def __call__(self, direction: Tensor) -> Tensor:
        """Return A d (B, C, H, W) for a change d of coordinates, with the posterior's precision A.

        A is half of the second derivative of the objective by the coordinates.
        """
        if self.patches is None:
            return self.told(direction) + self.weight * self.cost(direction)
        image = self.prior.push(direction)
        dual = self.linear.pull(self._weights * self.linear.push(image))
        return self.prior.pull(dual + self.patches.product(image))

    def prior_slope(self, point: Tensor) -> Tensor:
        """Return ρ Q s (B, C, H, W), half of the derivative of the prior's term ``ρ sᵀ Q s``.

        s are coordinates (B, C, H, W) of images, ρ is the prior's weight and Q its matrix.
        """
        if self.patches is None:
            return self.weight * self.cost(point)
        return self.prior.pull(self.patches.product(self.prior.push(point)))

    def objective(self, point: Tensor, residual: Tensor) -> float:
        """Return the objective Φ(s) at coordinates s (B, C, H, W), for given residuals (P,) there.

        It is the weighted sum of squared residuals, plus the prior's term.
        """
        misfit = float((self.weights * residual.square()).sum())
        weight, cost = (1.0, self.prior_slope) if self.patches else (self.weight, self.cost)
        return misfit + weight * float((point.double() * cost(point)).sum())

    def posed(self, solver: Solver) -> Posed:
        """Return the objective's quadratic model, whose minimum is the Gauss–Newton step.

        Conjugate gradients, ``solver``, solve for the step, and ignore the damping that a search
        asks for.
        """
        dual = (self.weights * self.residual).to(self.prior.grey)
        slope = self.pull_back(dual) + self.prior_slope(self.point.to(self.prior.grey))

        def solve(damping: float) -> tuple[Tensor, int]:
            change, taken = solver(self, -slope)
            return change.to(self.point), taken

        def cost(trial: Tensor) -> float:
            return self.objective(trial, self.residual_at(trial))

        value = self.objective(self.point, self.residual)
        return Posed(self.point, value, slope, solve, cost)

    def draw(self, solver: Solver, generator: torch.Generator) -> Tensor:
        """Return a random deviation (B, C, H, W) from the coordinates s under the normal posterior.

        The draw is made by perturbation and optimisation (Orieux, Féron and Giovannelli 2012): a
        linear system with random right-hand side, which conjugate gradients (``solver``) solve. In
        directions that these leave unsolved, the deviation is a draw of the prior N(0, I).
        """
        like = self.prior.grey
        own = torch.randn(self.point.shape, generator=generator).to(like)
        noise = torch.randn(len(self.weights), generator=generator).to(like)
        right = self.pull_back(self.weights.sqrt().to(like) * noise)
        kept = own if self.patches is None else self.prior.pull(self.patches.noise(generator))
        rest, _ = solver(self, right + kept - self(own))
        return own + rest


T = TypeVar("T")


@dataclass
class Kept(Generic[T]):
    """A store of a preconditioner, for as many steps as conjugate gradients are fast with it.

    Attributes:
        many: number of iterations in one step above which another preconditioner is needed.
        least: number of iterations that a preconditioner must have served before it is replaced.
        is_due: whether the next step computes a preconditioner. If False at first, none is computed
            before the first step with many iterations.
        made: the preconditioner; ``None`` before the first one.
        served: number of iterations so far with this preconditioner.
    """

    many: int
    least: float = 0.0
    is_due: bool = True
    made: T | None = None
    served: int = 0

    def get(self, make: Callable[[], T | None]) -> T | None:
        """Return the preconditioner that is kept; if another is due, ``make`` computes it first.

        The result is ``None`` if ``make`` returns ``None``.
        """
        if self.is_due:
            self.made, self.served, self.is_due = make(), 0, False
        return self.made

    def note(self, iterations: int) -> None:
        """Count a step's iterations of conjugate gradients, and decide whether the next step needs
        a new preconditioner.
        """
        self.served += iterations
        is_old = self.made is None or self.served > self.least
        self.is_due = is_old and iterations > self.many


def largest_eigenvalue(posterior: Posterior, budget: Budget) -> float:
    """Return an estimate of the largest eigenvalue of LᵀJᵀWJL, by six steps of the power method.

    In ``posterior``, J is the Jacobian of the linearised equations by the images, W holds the
    inverse variances, and L maps coordinates under the prior to images. The start is drawn with a
    fixed seed, as almost any start would do. If the budget is spent on the way, the estimate is
    rough, and too low.
    """
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(posterior.point.shape, generator=generator)
    for _ in range(POWER_ITERATIONS):
        vector = posterior.told(vector / vector.norm())
        if budget.is_spent:
            break
    return float(vector.norm())
