"""One run of Gauss–Newton from grey, through a blur and a prior that fade.

See :mod:`flwr_leakage.attacks.inversion.gauss_newton` for what it minimises.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget, Stopwatch
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, descend
from flwr_leakage.attacks.solve.linearization import Linearized
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.spectral.image_prior import ImagePrior

POWER_ITERATIONS = 6
"""Products that estimate the largest eigenvalue; a tenth of it is needed to no better than 20 %."""

PRECISE = 1e-3
"""Relative residual below which gradients are evaluated in double precision."""

FEWEST = 5
"""Iterations of a step at least, however little time there is: fewer lead nowhere."""

SHARP = 3e-3
"""Blur below which there is none."""


@dataclass(frozen=True)
class Annealing:
    """How blur and prior fade in one run from grey.

    Attributes:
        blur: β at the start, in units of each layer's spread under the prior, ≥ 0.
        exponent: β goes with this power of ρ, > 0.
        factor: ρ of a step over that of the step before, in (0, 1).
        model_error: κ in [0, 1], the share of the residual that counts as the model's own error.
    """

    blur: float = 2.0
    exponent: float = 0.3
    factor: float = 0.6
    model_error: float = 0.0

    def __post_init__(self) -> None:
        require(self, "be at least 0", "blur")
        require(self, "be positive", "exponent")
        require(self, "lie in (0, 1)", "factor")
        require(self, "lie in [0, 1]", "model_error")


@dataclass(frozen=True)
class Effort:
    """What a run may take; see :class:`~flwr_leakage.attacks.GaussNewton`.

    Where a budget does not allow for all products, steps take fewer iterations each, so that a run
    comes to its end.
    """

    steps: int
    products: int
    iterations: int
    tolerance: float


@runtime_checkable
class Equations(Protocol):
    """What a run fits: numbers that are observed, as a function of the images and the blur."""

    @property
    def prior(self) -> ImagePrior:
        """Of each image, in single precision."""

    @property
    def passes(self) -> int:
        """Gradients in one evaluation."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the coordinates, (B, C, H, W)."""

    @property
    def groups(self) -> Tensor:
        """The number of the group of each equation (P,) that errors of masks move alike."""

    def inputs(self, coordinates: Tensor) -> Tensor:
        """Images of coordinates of the prior."""

    def gradient(self, inputs: Tensor, blur: float, precise: bool = False) -> Tensor:
        """The numbers (P,), differentiable twice; in double precision if precise."""

    def linearize(self, inputs: Tensor, blur: float) -> Linearized:
        """The numbers in single precision, and products with their Jacobian."""

    def kinks(self, inputs: Tensor) -> list[Tensor]:
        """Inputs of every ReLU and pooling for images (B, C, H, W), in single precision."""

    def blurred_by(self, widths: Sequence[Tensor]) -> "Equations":
        """The same equations, whose blur of 1 is a width of each of these inputs."""


@dataclass(frozen=True)
class Candidate:
    """Where one run ended.

    Attributes:
        inputs: (B, C, H, W), in double precision, not clamped.
        energy: −2 log posterior up to a constant: of the likelihood, plus ``‖s‖²``.
        distance: relative squared distance of the gradients.
        misfit: mean squared residual in units of noise.
        prior_mean_square: of the coordinates s; 1 for a draw of the prior.
        steps: taken.
        products: with the Jacobian or its transpose.
        stage: how it ended, in words.
        stopped: whether the budget ended it.
    """

    inputs: Tensor
    energy: float
    distance: float
    misfit: float
    prior_mean_square: float
    steps: int
    products: int
    stage: str
    stopped: bool = False

    @classmethod
    def at(
        cls,
        point: Tensor,
        model: Equations,
        likelihood: Likelihood,
        steps: int,
        products: int,
        stage: str,
        stopped: bool,
    ) -> "Candidate":
        """Judge coordinates (B, C, H, W) by the equations."""
        inputs, size = model.inputs(point).double(), float(point.double().square().mean())
        unknown = (math.nan,) * 3
        found = cls(inputs, *unknown, size, steps, products, stage, stopped)
        return found.judged(model, likelihood)

    def judged(self, model: Equations, likelihood: Likelihood) -> "Candidate":
        """The same images, judged by these equations."""
        residual = likelihood.residual(model.gradient(self.inputs, 0.0, precise=True))
        return replace(
            self,
            energy=likelihood.energy(residual) + self.prior_mean_square * self.inputs.numel(),
            distance=likelihood.distance(residual),
            misfit=likelihood.misfit(residual),
        )

    def grouped_energy(self, model: Equations, likelihood: Likelihood) -> float:
        """The energy where each group of equations has its own error, which ranks ends of runs.

        Wrong masks and maxima spoil few groups; see :meth:`.Likelihood.energy`.
        """
        residual = likelihood.residual(model.gradient(self.inputs, 0.0, precise=True))
        unknowns = self.inputs.numel()
        misfit = likelihood.energy(residual, unknowns, model.groups)
        return misfit + self.prior_mean_square * unknowns


def anneal(
    model: Equations,
    likelihood: Likelihood,
    annealing: Annealing,
    effort: Effort,
    budget: Budget = UNLIMITED,
    start: Tensor | None = None,
) -> Candidate:
    """Run from grey, or from nearby, to the end of one annealing.

    Args:
        model: what is computed of a candidate.
        likelihood: what was observed of it.
        annealing: how blur and prior fade.
        effort: what the run may take.
        budget: the run ends once it is spent.
        start: coordinates (B, C, H, W) of the first candidate; ``None`` for grey. Equations that do
            not tell samples of one label apart leave those alike that start alike.

    Raises:
        ValueError: the model is not finite at the start.
    """
    run = _Run(model, likelihood, annealing, effort, budget, iterations=effort.iterations)
    end = descend(run.pose, torch.zeros(model.shape) if start is None else start, Shortening())
    return Candidate.at(
        end.point, model, likelihood, end.steps, run.products, run.stage, run.stopped
    )


@dataclass
class _Run:
    """What one annealing knows between its steps.

    Attributes:
        weight: ρ of the step, and ``first`` that of the first step, over ``unit``.
        unit: the update's own weighted size, in whose units weights are kept, so that float32 does
            not overflow.
        iterations: the most iterations that a step's linear system may take.
        products: the products with the Jacobian so far, and ``passes`` the gradients that they
            count for.
        precise: whether gradients are evaluated in double precision.
        here: the equations at the last step, and ``distance`` how far they were from being met.
    """

    model: Equations
    likelihood: Likelihood
    annealing: Annealing
    effort: Effort
    budget: Budget
    iterations: int
    weight: float = 0.0
    first: float = 0.0
    unit: float = 0.0
    products: int = 0
    passes: int = 0
    precise: bool = False
    stopped: bool = False
    stage: str = "ended by its steps"
    blur: float = 0.0
    distance: float = math.inf
    here: Linearized | None = None

    def pose(self, at: Iterate) -> Posed | None:
        """Pose the next step, unless the run is over."""
        if self._is_over(at):
            return None
        model, annealing = self.model, self.annealing
        share = (self.weight / self.first) ** annealing.exponent if at.steps else 1.0
        blur = annealing.blur * share
        self.blur = blur = blur if blur > SHARP else 0.0
        inputs = model.inputs(at.point)
        self.here = here = model.linearize(inputs, blur)
        value = model.gradient(inputs, blur, precise=True) if self.precise else here.value
        residual = self.likelihood.residual(value)
        self.distance = self.likelihood.distance(residual)
        variances = self.likelihood.variances(residual, annealing.model_error)
        if not at.steps:
            if not bool(torch.isfinite(value).all()):
                raise ValueError("the blurred network's gradient is not finite at the start.")
            self.unit = float((self.likelihood.observed.square() / variances).sum())
        posterior = Posterior(
            *(here, model.prior, 1 / (self.unit * variances), residual, at.point),
            residuals(model, self.likelihood, blur, self.precise),
            self.weight,
        )
        if not at.steps:
            self._begin(posterior)
            posterior = replace(posterior, weight=self.weight)
        return posterior.posed(Solver(self.iterations, self.effort.tolerance))

    def _begin(self, posterior: Posterior) -> None:
        """Choose the first ρ, and how many iterations of each step the budget allows."""
        watch, effort = Stopwatch(), self.effort
        self.first = self.weight = max(0.1 * largest_eigenvalue(posterior), 1 / self.unit)
        # An iteration is a product with J and one with its transpose.
        each = watch.seconds / POWER_ITERATIONS
        planned = max(1, effort.products // (2 * self.model.passes))
        allowed = self.budget.affordable(planned, each)
        self.stopped = allowed < planned
        if self.stopped:
            self.iterations = max(FEWEST, self.iterations * allowed // planned)

    def _is_over(self, at: Iterate) -> bool:
        """Count the last step, fade the prior, and say whether no further step follows."""
        if self.here is None:
            return False
        self.products += self.here.products
        self.passes += self.here.products * self.model.passes
        self.precise = self.distance < PRECISE**2
        if self.weight * self.unit <= 1 and self.blur == 0 and not at.has_moved:
            self.stage = "converged"
        elif self.passes >= self.effort.products:
            self.stage = "ended by its products"
        elif self.budget.is_spent:
            self.stage, self.stopped = "ended by its budget", True
        else:
            self.weight = max(self.weight * self.annealing.factor, 1 / self.unit)
            return at.steps >= self.effort.steps
        return True


def residuals(
    model: Equations,
    likelihood: Likelihood,
    blur: float,
    precise: bool = True,
    prior: ImagePrior | None = None,
) -> Callable[[Tensor], Tensor]:
    """Return the map from coordinates (B, C, H, W) to residuals (P,).

    Args:
        model: what is computed of a candidate.
        likelihood: what was observed of it.
        blur: of the equations.
        precise: whether they are evaluated in double precision.
        prior: the prior of these coordinates; that of the model where it is ``None``.
    """
    prior = prior or model.prior
    return lambda point: likelihood.residual(
        model.gradient(prior.grey + prior.push(point), blur, precise=precise)
    )


def largest_eigenvalue(posterior: Posterior) -> float:
    """Estimate that of LᵀJᵀWJL by the power method; the start is fixed, as any would do."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(posterior.point.shape, generator=generator)
    for _ in range(POWER_ITERATIONS):
        vector = posterior.told(vector / vector.norm())
    return float(vector.norm())
