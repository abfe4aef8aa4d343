"""One run of Gauss–Newton from grey, through a blur and a prior that fade.

See :mod:`flwr_leakage.attacks.inversion.gauss_newton` for what it minimises.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.inversion.linearization import Linearized
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior

POWER_ITERATIONS = 6
"""Products that estimate the largest eigenvalue; a tenth of it is needed to no better than 20 %."""

SHORTENINGS = 6
"""Trials of a step, each 0.4 times as long as the one before."""

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
        if not self.blur >= 0:
            raise ValueError(f"blur must be ≥ 0, got {self.blur}.")
        if not self.exponent > 0:
            raise ValueError(f"exponent must be positive, got {self.exponent}.")
        if not 0 < self.factor < 1:
            raise ValueError(f"factor must lie in (0, 1), got {self.factor}.")
        if not 0 <= self.model_error <= 1:
            raise ValueError(f"model_error must lie in [0, 1], got {self.model_error}.")


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
    """From grey, or nearby, to the end of one annealing.

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
    prior = model.prior
    coordinates = torch.zeros(model.shape) if start is None else start
    products, passes, step, unit, stage = 0, 0, 0, 0.0, "ended by its steps"
    weight = first = 0.0
    precise = stopped = False
    iterations = effort.iterations
    while step < effort.steps:
        blur = annealing.blur * (weight / first) ** annealing.exponent if step else annealing.blur
        blur = blur if blur > SHARP else 0.0
        inputs = model.inputs(coordinates)
        here = model.linearize(inputs, blur)
        value = model.gradient(inputs, blur, precise=True) if precise else here.value
        residual = likelihood.residual(value)
        variances = likelihood.variances(residual, annealing.model_error)
        if not step:
            if not bool(torch.isfinite(value).all()):
                raise ValueError("the blurred network's gradient is not finite at the start.")
            # In units of the update's own weighted size, so that float32 does not overflow.
            unit = float((likelihood.observed.square() / variances).sum())
        weights = 1 / (unit * variances)
        system = System(here, prior, weights.float())
        if not step:
            began = time.process_time()
            first = 0.1 * system.largest_eigenvalue(model.shape)
            # An iteration is a product with J and one with its transpose.
            each = (time.process_time() - began) / POWER_ITERATIONS
            planned = max(1, effort.products // (2 * model.passes))
            allowed = budget.affordable(planned, each)
            stopped = allowed < planned
            iterations = max(FEWEST, iterations * allowed // planned) if stopped else iterations
            weight = max(first, 1 / unit)
            first = weight
        right = system.pull_back((weights * residual).float()) + weight * coordinates

        def product(flat: Tensor, system: System = system, weight: float = weight) -> Tensor:
            return system(flat.reshape(model.shape)).flatten() + weight * flat

        change, _ = conjugate_gradients(product, -right.flatten(), effort.tolerance, iterations)

        coordinates, accepted = shortened(
            model,
            likelihood,
            blur,
            weights,
            weight,
            coordinates,
            change.reshape(model.shape),
            precise,
            residual=residual,
        )
        products += here.products
        passes += here.products * model.passes
        step += 1
        distance = likelihood.distance(residual)
        precise = distance < PRECISE**2
        at_end = weight * unit <= 1 and blur == 0
        if at_end and not accepted:
            stage = "converged"
            break
        if passes >= effort.products:
            stage = "ended by its products"
            break
        if budget.is_spent:
            stage, stopped = "ended by its budget", True
            break
        weight = max(weight * annealing.factor, 1 / unit)
    candidate = Candidate(
        inputs=model.inputs(coordinates).double(),
        energy=math.nan,
        distance=math.nan,
        misfit=math.nan,
        prior_mean_square=float(coordinates.double().square().mean()),
        steps=step,
        products=products,
        stage=stage,
        stopped=stopped,
    )
    return candidate.judged(model, likelihood)


def shortened(
    model: Equations,
    likelihood: Likelihood,
    blur: float,
    weights: Tensor,
    weight: float,
    coordinates: Tensor,
    change: Tensor,
    precise: bool = False,
    prior_cost: Callable[[Tensor], Tensor] = lambda coordinates: coordinates,
    residual: Tensor | None = None,
) -> tuple[Tensor, bool]:
    """Coordinates after a step, as short as it must be to gain, and whether it does.

    Args:
        model: what is computed of a candidate.
        likelihood: what was observed of it.
        blur: of the objective.
        weights: of each squared residual (P,).
        weight: of the prior.
        coordinates: before the step.
        change: the step.
        precise: whether to compare in double precision.
        prior_cost: the map s ↦ Q s of the prior's ``sᵀ Q s``, for ``‖s‖²`` the identity.
        residual: before the step, where it is known as precisely.
    """

    def objective(trial: Tensor, known: Tensor | None = None) -> float:
        if known is None:
            gradient = model.gradient(model.inputs(trial), blur, precise=precise)
            known = likelihood.residual(gradient)
        misfit = float((weights * known.square()).sum())
        return misfit + weight * float((trial.double() * prior_cost(trial)).sum())

    start, length = objective(coordinates, residual), 1.0
    for _ in range(SHORTENINGS):
        trial = coordinates + length * change
        if objective(trial) < start:
            return trial, True
        length *= 0.4
    return coordinates, False


class System:
    """LᵀJᵀWJL, for one J, without forming it."""

    def __init__(self, here: Linearized, prior: ImagePrior, weights: Tensor) -> None:
        self.here, self.prior, self.weights = here, prior, weights

    def __call__(self, direction: Tensor) -> Tensor:
        """Its product with a direction (B, C, H, W)."""
        image = self.here.push(self.prior.push(direction))
        return self.pull_back(self.weights * image)

    def pull_back(self, dual: Tensor) -> Tensor:
        """LᵀJᵀ u."""
        return self.prior.pull(self.here.pull(dual))

    def largest_eigenvalue(self, shape: tuple[int, ...]) -> float:
        """By the power method; the start is fixed, as any would do."""
        vector = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for _ in range(POWER_ITERATIONS):
            vector = self(vector / vector.norm())
        return float(vector.norm())
