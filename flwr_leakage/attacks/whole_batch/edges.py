"""The end of a batch's solution if the equations leave images open, with a prior of sharp edges.

The prior of a run, ``‖s‖²`` with x = μ + L s, penalises differences of neighbours by their square.
With y the field of a colour, of variance A at the lowest frequency, it is

    Σ (y² + (H/π)² |∇y|²) / A,

up to the prior's highest frequencies. Natural images have few large differences and many small
ones. So this prior takes ``|∇y|^p`` with p < 1 in place of the square, which penalises the few
less. As in reweighted least squares, each step minimises squares with the weights
``(g + ε²)^(p/2 − 1)`` of the images it begins with, where g = (H/π)² |∇y|² / A of all colours
(Levin et al. 2007).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.inversion.annealing import residuals
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.solve.descent import Iterate, Posed, follow, geometric
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors
from flwr_leakage.spectral.image_prior import ImagePrior


@dataclass(frozen=True)
class Edges:
    """The settings of the end with edges, and of its prior.

    The end is kept if it lowers its own energy: of the equations at the last blur, with the prior
    of edges. The equations without blur may be met less well than before, as wrong masks can also
    meet them.

    Attributes:
        steps: number of steps, ≥ 0; with 0 there is no such end.
        iterations: largest number of iterations of conjugate gradients in a step, ≥ 1.
        power: the power p of the differences, in (0, 2]; 2 is the prior of the run.
        weight: weight of the prior, > 0; 1 follows from the residual's own size.
        first: blur of the first step, > 0.
        last: blur of the last step, > 0.
        before: share in (0, 1] of a run's own products that the run before this end takes.
    """

    steps: int = 14
    iterations: int = 60
    power: float = 0.5
    weight: float = 0.5
    first: float = 0.5
    last: float = 0.03
    before: float = 0.5

    def __post_init__(self) -> None:
        require(self, "be at least 0", "steps")
        require(self, "be at least 1", "iterations")
        require(self, "be positive", "power", "weight", "last")
        require(self, "lie in (0, 1]", "before")
        if not (self.power <= 2 and self.last <= self.first):
            raise ValueError(
                f"power must be at most 2, and last at most first, got {self.power}, {self.last} "
                f"and {self.first}."
            )

    def obstacle(self, model: KnownErrors) -> str:
        """Return the reason for no such end; empty if the equations leave images open."""
        if not self.steps:
            return "no step was asked for"
        unknowns, equations = torch.Size(model.shape).numel(), model.num_equations
        # On development draws (no table) this end lost at 1.4 equations per unknown and won at 1.0.
        if equations > 1.25 * unknowns:
            return f"{equations} equations leave {unknowns} unknowns little room"
        return ""

    def __call__(
        self, model: KnownErrors, likelihood: Likelihood, inputs: Tensor, budget: Budget
    ) -> tuple[Tensor, int]:
        """Return images (B, C, H, W) in double precision, and the number of steps to them.

        If the steps do not lower the energy, these are ``inputs`` and 0.

        Args:
            model: the equations.
            likelihood: the observed values of the equations.
            inputs: (B, C, H, W) images of the start.
            budget: a limit that is checked between steps.
        """
        if budget.is_spent:
            return inputs, 0
        prior = model.prior
        start = prior.coordinates(inputs.float())

        def pose(at: Iterate, blur: float) -> Posed:
            residual_at = residuals(model, likelihood, blur)
            residual = residual_at(at.point)
            variances = likelihood.variances(residual, 1.0)
            unit = float((likelihood.observed.square() / variances).sum())
            here = model.linearize(model.prior.inputs(at.point), blur)
            return Posterior(
                *(here, prior, 1 / (unit * variances), residual, at.point, residual_at),
                weight=self.weight / unit,
                cost=reweighted(prior, at.point, self.power),
            ).posed(Solver(self.iterations))

        blurs = geometric(self.first, self.last, self.steps)
        end = follow(blurs, pose, start, lambda *_: budget.is_spent)
        point, taken = end.point, end.steps
        before, after = (self.energy(model, likelihood, each) for each in (start, point))
        return (model.prior.inputs(point).double(), taken) if after < before else (inputs, 0)

    def energy(self, model: KnownErrors, likelihood: Likelihood, point: Tensor) -> float:
        """Return −2 log posterior + constant of coordinates (B, C, H, W) at the last blur."""
        misfit = likelihood.energy(residuals(model, likelihood, self.last)(point))
        return misfit + self.weight * float(edge_energy(model.prior, point, self.power))


def edge_energy(prior: ImagePrior, point: Tensor, power: float) -> Tensor:
    """Return ``Σ y² / A + C (2/p) Σ (g + ε²)^(p/2)`` of coordinates (B, C, H, W)."""
    field = _field(prior, point)
    edges = _steepness(field).double() ** (power / 2)
    return field.double().square().sum() + point.shape[1] * 2 / power * edges.sum()


def reweighted(prior: ImagePrior, point: Tensor, power: float) -> Callable[[Tensor], Tensor]:
    """Return the map s ↦ Q s such that ``sᵀ Q s`` has the slope of the edge energy at a point.

    Args:
        prior: the prior of each image, in single precision.
        point: (B, C, H, W) coordinates that the weights are computed from.
        power: the power p; with 2 all weights are 1.
    """
    weights = _steepness(_field(prior, point)) ** (power / 2 - 1)

    def cost(coordinates: Tensor) -> Tensor:
        field = _field(prior, coordinates)
        height, width = field.shape[-2:]
        down, right = (weights * slope for slope in _slopes(field))
        # The last row and column of slopes are zero, so that the values that roll around are zero.
        field = field + height / math.pi * (down.roll(1, -2) - down)
        field = field + width / math.pi * (right.roll(1, -1) - right)
        return _shares(prior) * (prior.rows @ field @ prior.columns.T)

    return cost


def _shares(prior: ImagePrior) -> Tensor:
    """Return the prior's deviations, relative to that of the lowest frequency, √A."""
    return prior.deviations / prior.deviations[:, :1, :1]


def _field(prior: ImagePrior, coordinates: Tensor) -> Tensor:
    """Return ``y / √A`` of each colour, (B, C, H, W)."""
    return prior.rows.T @ (_shares(prior) * coordinates) @ prior.columns


def _slopes(field: Tensor) -> tuple[Tensor, Tensor]:
    """Return H/π and W/π times the differences downward and to the right, zero at the border."""
    height, width = field.shape[-2:]
    below = torch.cat([field[..., 1:, :], field[..., -1:, :]], -2)
    beside = torch.cat([field[..., 1:], field[..., -1:]], -1)
    return height / math.pi * (below - field), width / math.pi * (beside - field)


def _steepness(field: Tensor, flat: float = 0.05) -> Tensor:
    """Return ``g + ε²`` at each position, with g the mean over colours (B, 1, H, W).

    Args:
        field: (B, C, H, W) the field y / √A.
        flat: ε in deviations of the prior. Smaller differences cost about their square. The
            default was chosen on development draws; no table.
    """
    down, right = _slopes(field)
    return (down.square() + right.square()).mean(1, keepdim=True) + flat**2
