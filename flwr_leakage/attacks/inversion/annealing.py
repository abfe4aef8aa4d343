"""Run Gauss–Newton once, from grey images, while the blur of ReLUs and the prior's weight fall.

The blur averages ReLUs and max pooling over noise in their inputs. The objective stands in
:mod:`flwr_leakage.attacks.inversion.gauss_newton`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget, Stopwatch
from flwr_leakage.attacks.inversion.likelihood import Groups, Likelihood
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, descend
from flwr_leakage.attacks.solve.linearization import Linearized
from flwr_leakage.attacks.solve.posterior import (
    POWER_ITERATIONS,
    Posterior,
    Solver,
    largest_eigenvalue,
)
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.values import require


@dataclass(frozen=True)
class Annealing:
    """Settings by which the blur β and the prior's weight ρ fall in one run of Gauss–Newton.

    Attributes:
        blur: β at the start, ≥ 0, in units of the standard deviation that the inputs of each ReLU
            or pooling have over images of the prior.
        exponent: the exponent p > 0 of ``β ∝ ρ^p``.
        factor: ratio of ρ in a step to ρ in the step before, in (0, 1).
        model_error: share κ in [0, 1] of a tensor's mean squared residual that counts as variance,
            as blur and linearisation make the equations wrong.
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
    """The equations that Gauss–Newton fits: observed numbers as functions of images and of a blur.

    The numbers are, for example, the entries of the gradient. The blur is the size of the noise
    over which ReLUs and max pooling are averaged.
    """

    @property
    def prior(self) -> ImagePrior:
        """The prior of each image to be reconstructed, in single precision."""

    @property
    def passes(self) -> int:
        """The number of gradients of a loss that one evaluation of the equations costs."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (B, C, H, W) of the images, and of their coordinates under the prior."""

    @property
    def groups(self) -> Groups:
        """The groups of equations with errors of similar size, such as a kernel's gradient."""

    def gauged(self, coordinates: Tensor) -> Tensor:
        """Return coordinates (B, C, H, W) of the images with an assumed contrast.

        Contrast is a factor of the network's input. The numbers that the equations predict stay the
        same. If they determine the contrast, the coordinates are returned as they are.
        """

    def gradient(self, inputs: Tensor, blur: float, precise: bool = False) -> Tensor:
        """Return the numbers (P,) that the equations predict for images, differentiable twice.

        The images have the shape (B, C, H, W). The ``blur`` is the size β of the noise over which
        ReLUs and max pooling are averaged, as a factor of the widths that :meth:`blurred_by` sets;
        0 for none. If ``precise``, the result is computed in float64, else in float32.
        """

    def linearize(self, inputs: Tensor, blur: float) -> Linearized:
        """Return the equations linearised at images (B, C, H, W): values, and products with J.

        J is their Jacobian. All is computed in float32. The ``blur`` is the size β of the noise
        over which ReLUs and max pooling are averaged, as a factor of the widths that
        :meth:`blurred_by` sets; 0 for none.
        """

    def kinks(self, inputs: Tensor) -> list[Tensor]:
        """Return the inputs of every ReLU and max pooling for images (B, C, H, W), in float32."""

    def blurred_by(self, widths: Sequence[Tensor]) -> "Equations":
        """Return the same equations with other widths of the blur of ReLUs and max pooling.

        The blur averages these functions over noise in their inputs. For each of them there is a
        tensor of widths, the standard deviation of the noise in each of its inputs at a blur of 1.
        """


@dataclass(frozen=True)
class RunEnd:
    """The images at which one run of Gauss–Newton ended, with measures of their fit.

    The run fits equations, which predict observed numbers, such as a gradient's entries.

    Attributes:
        inputs: (B, C, H, W) images in double precision, not clamped.
        energy: −2 log posterior up to a constant: −2 log likelihood plus ``‖s‖²`` for the images'
            coordinates s under the prior.
        distance: relative squared distance of the predicted numbers from the observed ones.
        misfit: mean square of predicted minus observed numbers, in units of the noise's variance.
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
        """Return the end of a run of Gauss–Newton, with the fit of its images to the equations.

        The images are given by coordinates (B, C, H, W) under the prior, and the likelihood holds
        the observed numbers of the equations. The other arguments are attributes of the result.
        """
        inputs, size = model.prior.inputs(point).double(), float(point.double().square().mean())
        unknown = (math.nan,) * 3
        found = cls(inputs, *unknown, size, steps, products, stage, stopped)
        return found.judged(model, likelihood)

    def judged(self, model: Equations, likelihood: Likelihood) -> "RunEnd":
        """Return the images at a run's end, with measures of their fit to the equations ``model``.

        The likelihood holds the observed numbers of these equations and their noise.
        """
        residual = likelihood.residual(model.gradient(self.inputs, 0.0, precise=True))
        return replace(
            self,
            energy=likelihood.energy(residual) + self.prior_mean_square * self.inputs.numel(),
            distance=likelihood.distance(residual),
            misfit=likelihood.misfit(residual),
        )

    def grouped_energy(self, model: Equations, likelihood: Likelihood) -> float:
        """Return −2 log posterior of the images at a run's end, up to a constant, to rank runs.

        Each group of the equations in ``model`` has an unknown variance of its own, as a ReLU unit
        wrongly taken to be on or off spoils only few groups; see :meth:`.Likelihood.energy`. The
        likelihood holds the observed numbers of these equations and their noise.
        """
        residual = likelihood.residual(model.gradient(self.inputs, 0.0, precise=True))
        unknowns = self.inputs.numel()
        misfit = likelihood.energy(residual, unknowns, model.groups)
        return misfit + self.prior_mean_square * unknowns


@dataclass
class Annealed:
    """One run of Gauss–Newton whose blur and prior's weight fall, with its state between steps.

    If the budget does not allow all products, steps take fewer iterations, so that the run reaches
    its end.

    Attributes:
        model: the equations to fit.
        likelihood: the observed numbers and their noise.
        annealing: the settings by which blur and weight fall.
        budget: the limit of CPU time.
        most_steps: largest number of steps.
        most_products: approximate largest number of products with the Jacobian or its transpose.
        tolerance: relative residual at which a step's linear system counts as solved.
        weight: the prior's weight ρ in the present step, divided by ``unit``.
        first: ρ / ``unit`` in the first step.
        unit: the sum of the squared observed numbers over their variances, which divides all
            weights, so that float32 does not overflow.
        iterations: largest number of iterations for a step's linear system.
        products: number of products so far.
        precise: whether the equations are evaluated in double precision.
        stopped: whether the budget has shortened or ended the run.
        stage: a text that says how the run ended.
        blur: the blur β of the present step.
        distance: relative squared distance of the latest step's predicted numbers from the
            observed.
        here: the linearised equations at the latest step.
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
        """Return the images at which the run of Gauss–Newton ends, with their fit to the equations.

        ``start`` holds coordinates (B, C, H, W) under the prior, N(0, I) for its images, and not
        pixels. Samples that start equal and have one label stay equal if the equations are
        symmetric in them.

        Raises:
            ValueError: the equations are not finite at the start.
        """
        end = descend(self.pose, start, Shortening())
        point, model = self.model.gauged(end.point), self.model
        return RunEnd.at(
            *(point, model, self.likelihood, end.steps, self.products, self.stage, self.stopped)
        )

    def pose(self, at: Iterate) -> Posed | None:
        """Return the linear least-squares problem of the next Gauss–Newton step; ``None`` to end.

        ``at`` holds the images' coordinates after the previous step, and that step's outcome.
        """
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
        """Set the prior's weight ρ in the first step, and the number of iterations of each step.

        ρ is a tenth of the largest eigenvalue of the normal matrix of ``posterior``, the linearised
        equations and their prior. If the budget does not allow all products of a run, steps get
        fewer iterations.
        """
        watch = Stopwatch()
        self.first = self.weight = max(
            0.1 * largest_eigenvalue(posterior, self.budget), 1 / self.unit
        )
        # A step of the power method takes one product with J and one with its transpose, as an
        # iteration of conjugate gradients does.
        each = watch.seconds / POWER_ITERATIONS
        planned = max(1, self.most_products // (2 * self.model.passes))
        allowed = self.budget.affordable(planned, each)
        self.stopped = allowed < planned
        if self.stopped:
            # Steps get at least five iterations each, as they make no progress with fewer.
            self.iterations = max(5, self.iterations * allowed // planned)

    def _is_over(self, at: Iterate) -> bool:
        """Return whether the run of Gauss–Newton ends; if not, lower the weight of the prior.

        ``at`` is the outcome of the latest step, whose products with the Jacobian are counted.
        """
        if self.here is None:
            return False
        self.products += self.here.products
        # The equations are evaluated in double precision once their relative residual is below
        # 1e-3.
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
    """Return a function from coordinates (B, C, H, W) of images to residuals (P,) of equations.

    A residual is the number that ``model`` predicts minus the observed one in ``likelihood``. ReLUs
    and max pooling are averaged over noise of the size β, ``blur``; 0 for none. If ``precise``,
    numbers are predicted in float64, else in float32. Coordinates are those under ``prior``, by
    default the equations'.
    """
    prior = prior or model.prior
    return lambda point: likelihood.residual(
        model.gradient(prior.inputs(point), blur, precise=precise)
    )
