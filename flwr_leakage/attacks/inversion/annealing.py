"""Run Gauss–Newton once from grey, with a blur and a prior that fade.

See :mod:`flwr_leakage.attacks.inversion.gauss_newton` for the objective.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget, Stopwatch
from flwr_leakage.attacks.inversion.likelihood import Groups, Likelihood
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, descend
from flwr_leakage.attacks.solve.linearization import Linearized
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.spectral.image_prior import ImagePrior

POWER_ITERATIONS = 6
"""Number of products that estimate the largest eigenvalue. The first weight is a tenth of it, and
an error of 20 % does no harm."""


@dataclass(frozen=True)
class Annealing:
    """The settings by which blur and prior fade in one run of Gauss–Newton from grey.

    Attributes:
        blur: blur β at the start, in units of each layer's spread under the prior, ≥ 0.
        exponent: exponent of the power of the prior's weight ρ that β is proportional to, > 0.
        factor: ratio of ρ in a step to ρ in the step before, in (0, 1).
        model_error: share κ in [0, 1] of the residual that counts as the model's own error.
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


@runtime_checkable
class Equations(Protocol):
    """The equations that a run fits: observed numbers as a function of images and a blur."""

    @property
    def prior(self) -> ImagePrior:
        """The prior of each image, in single precision."""

    @property
    def passes(self) -> int:
        """The number of gradients that one evaluation of the equations takes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (B, C, H, W) of the images' coordinates under the prior."""

    @property
    def groups(self) -> Groups:
        """The groups of equations with similar errors, such as from one wrong mask."""

    def gauged(self, coordinates: Tensor) -> Tensor:
        """Return coordinates of images with the same numbers, and with an assumed contrast.

        They stay the same unless the numbers leave the images' contrast open.
        """

    def gradient(self, inputs: Tensor, blur: float, precise: bool = False) -> Tensor:
        """Return the predicted numbers (P,), differentiable twice; in float64 if ``precise``."""

    def linearize(self, inputs: Tensor, blur: float) -> Linearized:
        """Return the predicted numbers in float32, with products with their Jacobian."""

    def kinks(self, inputs: Tensor) -> list[Tensor]:
        """Return the inputs of every ReLU and pooling for images (B, C, H, W), in float32."""

    def blurred_by(self, widths: Sequence[Tensor]) -> "Equations":
        """Return these equations, with given blurs of the inputs of each ReLU and pooling."""


@dataclass(frozen=True)
class RunEnd:
    """The images at which one run ended, with measures of their fit.

    Attributes:
        inputs: (B, C, H, W) images in double precision, not clamped.
        energy: −2 log posterior up to a constant: the likelihood's energy plus ``‖s‖²`` for the
            coordinates s.
        distance: relative squared distance of the gradients.
        misfit: mean squared residual in units of noise.
        prior_mean_square: mean square of the coordinates s; 1 for a draw of the prior.
        steps: number of steps taken.
        products: number of products with the Jacobian or its transpose.
        stage: a text that says how the run ended.
        stopped: whether the budget ended the run.
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
    ) -> "RunEnd":
        """Return the end of a run at coordinates (B, C, H, W), judged by the equations."""
        inputs, size = model.prior.inputs(point).double(), float(point.double().square().mean())
        unknown = (math.nan,) * 3
        found = cls(inputs, *unknown, size, steps, products, stage, stopped)
        return found.judged(model, likelihood)

    def judged(self, model: Equations, likelihood: Likelihood) -> "RunEnd":
        """Return the same images, with the measures of their fit to other equations."""
        residual = likelihood.residual(model.gradient(self.inputs, 0.0, precise=True))
        return replace(
            self,
            energy=likelihood.energy(residual) + self.prior_mean_square * self.inputs.numel(),
            distance=likelihood.distance(residual),
            misfit=likelihood.misfit(residual),
        )

    def grouped_energy(self, model: Equations, likelihood: Likelihood) -> float:
        """Return the energy with one error for each group of equations, which ranks runs.

        Wrong masks and maxima spoil few groups; see :meth:`.Likelihood.energy`.
        """
        residual = likelihood.residual(model.gradient(self.inputs, 0.0, precise=True))
        unknowns = self.inputs.numel()
        misfit = likelihood.energy(residual, unknowns, model.groups)
        return misfit + self.prior_mean_square * unknowns


@dataclass
class Annealed:
    """One run of Gauss–Newton whose blur and prior fade, with its state between steps.

    If the budget does not allow all products, each step takes fewer iterations, so that the run
    reaches its end.

    Attributes:
        most_steps: largest number of steps.
        most_products: approximate largest number of products with the Jacobian or its transpose.
        tolerance: relative residual of a step's linear system.
        weight: the weight ρ of the prior in the present step, divided by ``unit``.
        first: the same ratio in the first step.
        unit: the weighted size of the update. Weights are in this unit, so that float32 does not
            overflow.
        iterations: largest number of iterations of a step's linear system.
        products: number of products with the Jacobian or its transpose so far.
        precise: whether gradients are evaluated in double precision.
        here: the linearised equations at the last step.
        distance: relative squared distance of the numbers at the last step from the observed ones.
    """

    model: Equations
    likelihood: Likelihood
    annealing: Annealing
    budget: Budget
    most_steps: int
    most_products: int
    iterations: int
    tolerance: float
    weight: float = 0.0
    first: float = 0.0
    unit: float = 0.0
    products: int = 0
    precise: bool = False
    stopped: bool = False
    stage: str = "ended by its steps"
    blur: float = 0.0
    distance: float = math.inf
    here: Linearized | None = None

    def run(self, start: Tensor) -> RunEnd:
        """Return the end of the annealing from coordinates (B, C, H, W).

        Samples of one label that start equal stay equal if the equations are symmetric in them.

        Raises:
            ValueError: the model is not finite at the start.
        """
        end = descend(self.pose, start, Shortening())
        point, model = self.model.gauged(end.point), self.model
        return RunEnd.at(
            *(point, model, self.likelihood, end.steps, self.products, self.stage, self.stopped)
        )

    def pose(self, at: Iterate) -> Posed | None:
        """Return the next step's linear system, or None if the run is over."""
        if self._is_over(at):
            return None
        model, annealing = self.model, self.annealing
        if at.steps:  # the first point is grey, and has no contrast that could be set
            at = replace(at, point=model.gauged(at.point))
        share = (self.weight / self.first) ** annealing.exponent if at.steps else 1.0
        blur = annealing.blur * share
        self.blur = blur = blur if blur > 3e-3 else 0.0  # blurs below this width are set to zero
        inputs = model.prior.inputs(at.point)
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
        return posterior.posed(Solver(self.iterations, self.tolerance, budget=self.budget))

    def _begin(self, posterior: Posterior) -> None:
        """Choose the prior's first weight ρ, and how many iterations of a step fit the budget."""
        watch = Stopwatch()
        self.first = self.weight = max(
            0.1 * largest_eigenvalue(posterior, self.budget), 1 / self.unit
        )
        # An iteration takes one product with J and one with its transpose.
        each = watch.seconds / POWER_ITERATIONS
        planned = max(1, self.most_products // (2 * self.model.passes))
        allowed = self.budget.affordable(planned, each)
        self.stopped = allowed < planned
        if self.stopped:
            # With fewer than five iterations, steps make no progress.
            self.iterations = max(5, self.iterations * allowed // planned)

    def _is_over(self, at: Iterate) -> bool:
        """Count the last step, reduce the prior's weight, and return whether the run ends here."""
        if self.here is None:
            return False
        self.products += self.here.products
        # Gradients are evaluated in double precision once their relative residual is below 1e-3.
        self.precise = self.distance < 1e-3**2
        if self.weight * self.unit <= 1 and self.blur == 0 and not at.has_moved:
            self.stage = "converged"
        elif self.products * self.model.passes >= self.most_products:
            self.stage = "ended by its products"
        elif self.budget.is_spent:
            self.stage, self.stopped = "ended by its budget", True
        else:
            self.weight = max(self.weight * self.annealing.factor, 1 / self.unit)
            return at.steps >= self.most_steps
        return True


def residuals(
    model: Equations,
    likelihood: Likelihood,
    blur: float,
    precise: bool = True,
    prior: ImagePrior | None = None,
) -> Callable[[Tensor], Tensor]:
    """Return the map from coordinates (B, C, H, W) to the residuals (P,) of the equations."""
    prior = prior or model.prior
    return lambda point: likelihood.residual(
        model.gradient(prior.inputs(point), blur, precise=precise)
    )


def largest_eigenvalue(posterior: Posterior, budget: Budget) -> float:
    """Return an estimate of the largest eigenvalue of LᵀJᵀWJL, by the power method.

    The start is drawn with a fixed seed, as almost any start would do. The estimate is lower, and
    rough, if the budget is spent on the way.
    """
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(posterior.point.shape, generator=generator)
    for _ in range(POWER_ITERATIONS):
        vector = posterior.told(vector / vector.norm())
        if budget.is_spent:
            break
    return float(vector.norm())
