"""The end of a batch's solution where the equations leave images open: edges may be sharp.

The prior of a run, ``‖s‖²`` with x = μ + L s, costs differences of neighbours by their square. With
y the coefficients' field of each colour, of variance A at the lowest frequency, it is

    Σ (y² + (H/π)² |∇y|²) / A,

up to the prior's highest frequencies. Natural images have few large differences and many small
ones: ``|∇y|^p`` with p < 1 instead of the square lets the few be. As in reweighted least squares,
each step takes squares whose weights, ``(g + ε²)^(p/2 − 1)`` with g = (H/π)² |∇y|² / A of all
colours, are those of the images it begins with (Levin et al. 2007).
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
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, descend
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors
from flwr_leakage.spectral.image_prior import ImagePrior

ENOUGH = 1.25
"""Equations per unknown that leave a prior little to say: at 1.4 it lost, at 1.0 it won."""

FLAT = 0.05
"""ε: differences below it, in deviations of the prior, cost their square."""


@dataclass(frozen=True)
class Edges:
    """How long the end with edges is worked at, and how the prior costs them.

    It is kept where it lowers its own energy: of the equations at the last blur, with the prior of
    edges. Without blur the equations may well be met worse, as wrong masks fit them, too.

    Attributes:
        steps: ≥ 0; at 0 there is no such end.
        iterations: of conjugate gradients in a step, at most, ≥ 1.
        power: p in (0, 2] of the differences; 2 is the prior of the run.
        weight: of the prior, > 0; 1 is what the residual's own size asks for.
        first: blur of the first step, > 0.
        last: … of the last, > 0.
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
        """Why there is no such end; empty where the equations leave images open."""
        if not self.steps:
            return "no step was asked for"
        unknowns, equations = torch.Size(model.shape).numel(), model.num_equations
        if equations > ENOUGH * unknowns:
            return f"{equations} equations leave {unknowns} unknowns little room"
        return ""

    def __call__(
        self, model: KnownErrors, likelihood: Likelihood, inputs: Tensor, budget: Budget
    ) -> tuple[Tensor, int]:
        """Images (B, C, H, W) in double precision, and the steps that led to them, 0 if none did.

        Args:
            model: the equations.
            likelihood: what was observed.
            inputs: where to begin.
            budget: looked at between steps.
        """
        prior = model.prior
        start = torch.stack([prior.coordinates(image[None]) for image in inputs.float()])

        def pose(at: Iterate) -> Posed | None:
            if at.steps == self.steps or budget.is_spent:
                return None
            blur = self.first * (self.last / self.first) ** (at.steps / max(1, self.steps - 1))
            residual_at = residuals(model, likelihood, blur)
            residual = residual_at(at.point)
            variances = likelihood.variances(residual, 1.0)
            unit = float((likelihood.observed.square() / variances).sum())
            here = model.linearize(model.inputs(at.point), blur)
            return Posterior(
                *(here, prior, 1 / (unit * variances), residual, at.point, residual_at),
                weight=self.weight / unit,
                cost=reweighted(prior, at.point, self.power),
            ).posed(Solver(self.iterations))

        end = descend(pose, start, Shortening())
        point, taken = end.point, end.steps
        before, after = (self.energy(model, likelihood, each) for each in (start, point))
        return (model.inputs(point).double(), taken) if after < before else (inputs, 0)

    def energy(self, model: KnownErrors, likelihood: Likelihood, point: Tensor) -> float:
        """−2 log posterior of coordinates (B, C, H, W) at the last blur, up to a constant."""
        misfit = likelihood.energy(residuals(model, likelihood, self.last)(point))
        return misfit + self.weight * float(edge_energy(model.prior, point, self.power))


def edge_energy(prior: ImagePrior, point: Tensor, power: float) -> Tensor:
    """``Σ y² / A + C (2/p) Σ (g + ε²)^(p/2)`` of coordinates (B, C, H, W)."""
    field = _field(prior, point)
    edges = _steepness(field).double() ** (power / 2)
    return field.double().square().sum() + point.shape[1] * 2 / power * edges.sum()


def reweighted(prior: ImagePrior, point: Tensor, power: float) -> Callable[[Tensor], Tensor]:
    """The map s ↦ Q s of squares ``sᵀ Q s`` that have the slope of the edge energy at a point.

    Args:
        prior: of each image, in single precision.
        point: coordinates (B, C, H, W), of which the weights are read.
        power: p; at 2 all weights are 1.
    """
    weights = _steepness(_field(prior, point)) ** (power / 2 - 1)

    def cost(coordinates: Tensor) -> Tensor:
        field = _field(prior, coordinates)
        height, width = field.shape[-2:]
        down, right = (weights * slope for slope in _slopes(field))
        # The last row and column of slopes are zero: what rolls around is nothing.
        field = field + height / math.pi * (down.roll(1, -2) - down)
        field = field + width / math.pi * (right.roll(1, -1) - right)
        return _shares(prior) * (prior.rows @ field @ prior.columns.T)

    return cost


def _shares(prior: ImagePrior) -> Tensor:
    """Deviations over those of the lowest frequency, √A."""
    return prior.deviations / prior.deviations[:, :1, :1]


def _field(prior: ImagePrior, coordinates: Tensor) -> Tensor:
    """``y / √A`` of each colour, (B, C, H, W)."""
    return prior.rows.T @ (_shares(prior) * coordinates) @ prior.columns


def _slopes(field: Tensor) -> tuple[Tensor, Tensor]:
    """H/π and W/π times the differences downward and to the right, zero at the end."""
    height, width = field.shape[-2:]
    below = torch.cat([field[..., 1:, :], field[..., -1:, :]], -2)
    beside = torch.cat([field[..., 1:], field[..., -1:]], -1)
    return height / math.pi * (below - field), width / math.pi * (beside - field)


def _steepness(field: Tensor) -> Tensor:
    """G + ε² of each place, the mean over colours (B, 1, H, W)."""
    down, right = _slopes(field)
    return (down.square() + right.square()).mean(1, keepdim=True) + FLAT**2
