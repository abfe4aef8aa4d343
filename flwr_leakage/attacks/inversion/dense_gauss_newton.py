"""Gauss–Newton with the dense Jacobian, a prior of images, and variances read from the residual."""

import math
import time
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.inversion.jacobian import Jacobian
from flwr_leakage.attacks.inversion.kinks import calls_kinks, is_rough
from flwr_leakage.attacks.inversion.likelihood import Likelihood, estimate_noise
from flwr_leakage.attacks.labels.assumed import answer, assume_targets
from flwr_leakage.attacks.labels.automatic import AutomaticLabels
from flwr_leakage.attacks.labels.base import LabelInference
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.starts.base import Initialisation
from flwr_leakage.attacks.starts.grey import Grey
from flwr_leakage.records import InputSpec, Reconstruction
from flwr_leakage.spectral.image_prior import ImagePrior

ROUNDING = 10.0
"""Noise that equations have at least, in units of float32's rounding: below it, that of the matrix
of a step would outweigh the prior."""

PANEL = 512
"""Rows of that matrix that are computed together."""

OUTSIDE = 1e-4
"""Deviation of pixels from their range, in pixel values, once the gradient is met as well; before,
it is the relative distance of gradients."""

FEWEST = 5
"""Steps that must fit into a budget: fewer lead nowhere, and others have use of the time."""

DAMPINGS = 8
"""Trials of a step, each after the first with a damping ten times that of the one before."""

LEAST_DAMPING = 1e-8
"""Damping of the second trial, in units of the matrix's largest diagonal entry."""

SETTLED = 1e-3
"""Fall of the objective, for each unknown, below which nothing is left to gain."""


@dataclass(frozen=True)
class DenseGaussNewton(OneByOne):
    """Maximise the posterior of images behind a smooth network's update.

    With residuals e(x) = g(x) − g* (of entries that may have been pruned, by how far they exceed
    what pruning allows), and x = μ + L s of the prior of images, each step minimises to first order

        Σ_i e_i² / v_i + ‖s‖²,    v_i = max(σ_t², κ m_t)

    for the entries i of each tensor t. m_t is the mean of e² over the entries that were kept, and σ
    the noise, or float32's rounding. While the gradient is far from met, variances are large, so
    that the prior holds what the linearisation does not tell. They fall with the residual, and at
    the end what the update leaves open is the prior's alone (Bakushinskii 1992 for the fading
    weight; σ and m as in :class:`flwr_leakage.attacks.inversion.likelihood.Likelihood`). How far
    pixels are outside of their range counts likewise. A step that does not lower its objective is
    damped (Marquardt 1963).

    J is dense and in float64: N forward derivatives of the gradient a step, for N pixels of all
    samples, 8 N P' bytes for P' entries that are not within their bounds, and N² P'/2 + N³/6
    multiplications.

    Attributes:
        steps: at most, ≥ 1.
        model_error: κ in (0, 1].
        tolerance: stop once the relative squared distance of gradients is at most this, ≥ 0.
        labels: how labels are inferred where the threat model does not grant them.
        initialisation: the first candidate.
        max_entries: a Jacobian with more entries is refused, those within their bounds left out.
        chunk_size: columns of J computed together.
    """

    purpose: ClassVar[str] = "dense gauss newton"

    steps: int = 40
    model_error: float = 0.5
    tolerance: float = 1e-13
    labels: LabelInference = field(default_factory=AutomaticLabels)
    initialisation: Initialisation = field(default_factory=Grey)
    max_entries: int = 100_000_000
    chunk_size: int = 128

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")
        if not 0 < self.model_error <= 1:
            raise ValueError(f"model_error must lie in (0, 1], got {self.model_error}.")

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Attack one problem in float64.

        Raises:
            ValueError: the Jacobian has more than ``max_entries`` entries, or the network has ReLUs
                or other kinks: J does not see where its gradient jumps.
        """
        began = time.process_time()
        if calls_kinks(problem):
            raise ValueError("the network must be smooth, and has ReLUs or max pooling.")
        targets = assume_targets(problem, self.labels, generator).values
        model = Jacobian(problem, targets, self.chunk_size, self.max_entries)
        posterior = _Posterior.of(problem, model, self.model_error)
        likelihood, prior = posterior.likelihood, posterior.prior
        model.require(int((likelihood.bounds == 0).sum()))  # before passes of a large network
        if is_rough(problem):
            raise ValueError("the network must be smooth, and its derivative jumps between images.")
        start = self.initialisation(problem.spec, problem.num_samples, restart, generator)
        point = torch.stack([prior.coordinates(image[None]) for image in start.double()])
        here, taken, stopped, is_settled = posterior.at(point), 0, False, False
        stage = ""
        while taken < self.steps and not is_settled:
            if not likelihood.distance(here.residual) > self.tolerance:
                break
            if taken == 1 and budget.left < (FEWEST - 1) * (time.process_time() - began):
                stopped, stage = True, f"fewer than {FEWEST} steps fit into the budget"
                break
            rows = likelihood.bounds == 0
            rows |= likelihood.excess(here.residual) > 0
            model.require(int(rows.sum()))
            transposed = model.transposed(here.inputs, budget, rows)
            if transposed is None or budget.is_spent:
                stopped = True
                break
            taken += 1
            weights = posterior.weights(here)
            gram, slope = posterior.equations(here, weights, transposed, rows)
            before = posterior.cost(here, weights)
            damping, is_settled = 0.0, True
            for _ in range(DAMPINGS):
                factor, failed = torch.linalg.cholesky_ex(gram)
                if not failed:  # rounding may leave it indefinite
                    step = torch.cholesky_solve(slope[:, None], factor)
                    trial = posterior.at(here.point - step.reshape(point.shape))
                    fall = before - posterior.cost(trial, weights)
                    if fall > 0:
                        here, is_settled = trial, fall < SETTLED * model.size
                        break
                more = max(9 * damping, LEAST_DAMPING * float(gram.diagonal().max()))
                gram.diagonal().add_(more)
                damping += more
        distance = likelihood.distance(here.residual)
        if not math.isfinite(distance):
            return failure("the objective was never finite.")
        return Reconstruction(
            batch=answer(problem.spec.clamp(here.inputs), targets),
            objective=distance,
            stats={
                **({"stage": stage} if stage else {}),
                "iterations": taken,
                "misfit": likelihood.misfit(here.residual),
                "prior_mean_square": float(here.point.square().mean()),
                "cpu_seconds": time.process_time() - began,
                **stop_mark(stopped),
            },
        )


@dataclass(frozen=True)
class _Point:
    """A candidate: its coordinates and inputs (B, C, H, W), and what it gets wrong.

    Attributes:
        point: s.
        inputs: x = μ + L s.
        residual: g(x) − g* (P,).
        outside: how far x is from the nearest image, in pixel values.
    """

    point: Tensor
    inputs: Tensor
    residual: Tensor
    outside: Tensor


@dataclass(frozen=True)
class _Weights:
    """1 / v of each entry (P,), and of pixels that are outside of their range."""

    entries: Tensor
    outside: float


@dataclass(frozen=True)
class _Posterior:
    """What a step minimises.

    Attributes:
        spec: of the inputs.
        model: of the gradient.
        likelihood: what is known of every entry.
        prior: of each image.
        noise: σ of each tensor (T,).
        kept: share of each tensor's entries that was not pruned (T,).
        model_error: κ.
    """

    spec: InputSpec
    model: Jacobian
    likelihood: Likelihood
    prior: ImagePrior
    noise: Tensor
    kept: Tensor
    model_error: float

    @classmethod
    def of(cls, problem: Problem, model: Jacobian, model_error: float) -> "_Posterior":
        gradients = [posed.gradient for posed in problem.rounds]
        likelihood = Likelihood.of(gradients, estimate_noise(problem))
        noise = likelihood.noise.maximum(ROUNDING * Likelihood.of(gradients, None).noise)
        prior, kept = ImagePrior.of(problem.spec), _kept_shares(likelihood)
        return cls(problem.spec, model, likelihood, prior, noise, kept, model_error)

    def at(self, point: Tensor) -> _Point:
        """The candidate of coordinates (B, C, H, W)."""
        inputs = self.prior.grey + self.prior.push(point)
        residual = self.likelihood.residual(self.model.gradient(inputs))
        return _Point(
            point, inputs, residual, (inputs - self.spec.clamp(inputs)) / self.prior.scale
        )

    def weights(self, here: _Point) -> _Weights:
        """By what the candidate gets wrong."""
        means = self.likelihood.mean_squares(here.residual) / self.kept
        variances = (self.model_error * means).maximum(self.noise.square())
        outside = max(self.likelihood.distance(here.residual), OUTSIDE**2)
        return _Weights((1 / variances)[self.likelihood.tensors], 1 / outside)

    def cost(self, here: _Point, weights: _Weights) -> float:
        """Σ e²/v + ‖s‖²."""
        excess = self.likelihood.excess(here.residual).square()
        outside = weights.outside * here.outside.square().sum()
        return float((weights.entries * excess).sum() + outside + here.point.square().sum())

    def equations(
        self, here: _Point, weights: _Weights, transposed: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Half of the cost's second derivative (N, N), to first order in e, and of its first (N,).

        Args:
            here: where.
            weights: 1 / v.
            transposed: Jᵀ (N, P').
            rows: whose entries those are (P,), P' of them.
        """
        roots = weights.entries[rows].sqrt()
        scaled = transposed * roots
        excess = here.residual.sign() * self.likelihood.excess(here.residual)
        shape, size = here.point.shape, len(scaled)
        gram = scaled.new_empty(size, size)
        for first in range(0, size, PANEL):  # one triangle: half of the multiplications
            last = min(first + PANEL, size)
            gram[first:last, :last] = scaled[first:last] @ scaled[:last].T
            gram[:first, first:last] = gram[first:last, :first].T
        pixels = (weights.outside / self.prior.scale.square()).expand(shape)
        gram.diagonal().add_((pixels * (here.outside != 0)).flatten())
        slope = (scaled @ (roots * excess[rows])).reshape(shape)
        slope = slope + weights.outside * here.outside / self.prior.scale
        for _ in range(2):
            gram = self.prior.pull(gram.reshape(-1, *shape)).reshape(size, size).T
        gram = gram.contiguous()
        gram.diagonal().add_(1.0)
        return gram, (self.prior.pull(slope) + here.point).flatten()


def _kept_shares(likelihood: Likelihood) -> Tensor:
    """The share of each tensor's entries (T,) that is not zero, 1 where all are."""
    kept = torch.zeros_like(likelihood.counts).index_add_(
        0, likelihood.tensors, (likelihood.observed != 0).double()
    )
    return torch.where(kept > 0, kept / likelihood.counts, 1.0)
