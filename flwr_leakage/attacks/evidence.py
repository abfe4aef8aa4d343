"""One measure for candidates of any attack: misfit in units of noise, plus a prior of images."""

import math
from dataclasses import dataclass

import torch

from flwr_leakage.attacks.inversion.likelihood import Likelihood, estimate_noise
from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral.image_prior import ImagePrior

ROUNDING = 1e-8
"""The most that noise may add to ``‖g − g*‖² / ‖g*‖²`` and still count as rounding."""


@dataclass(frozen=True)
class Judgement:
    """A candidate as the attacker sees it, without the truth.

    Attributes:
        energy: −2 log posterior up to a constant; infinite where it is not finite.
        distance: ``‖g − g*‖² / ‖g*‖²``, the mean over rounds; infinite likewise.
        misfit: mean squared residual in units of noise; pruned entries count where they exceed
            what pruning allows.
        is_exact: whether the distance is that of rounding.
    """

    energy: float
    distance: float
    misfit: float
    is_exact: bool


@dataclass(frozen=True)
class Evidence:
    """What an update says about candidates for the samples behind it.

    The energy of a candidate x̂ with residuals r = g(x̂) − g* is

        E = Σ_t P_t (log v_t + m_t / v_t) + Σ_i ‖L⁻¹(x̂_i − μ)‖²

    with m_t the mean square of r over the P_t entries of tensor t (entries that may have been
    pruned count by how far they exceed what pruning allows), v_t = max(m_t, σ_t²), σ the noise,
    estimated from the update itself, and N(μ, LLᵀ) a prior of images
    (:mod:`flwr_leakage.attacks.inversion.likelihood`,
    :class:`flwr_leakage.spectral.image_prior.ImagePrior`). A candidate that fits the noise gains
    little below v_t = σ_t², and pays for it by the prior.

    Attributes:
        problem: in double precision.
        likelihood: of all rounds' residuals.
        prior: of each sample.
        tolerance: a distance that counts as exact.
    """

    problem: Problem
    likelihood: Likelihood
    prior: ImagePrior
    tolerance: float

    @classmethod
    def of(cls, problem: Problem, tolerance: float) -> "Evidence":
        """Read the noise from the update; see :func:`estimate_noise`."""
        problem = problem.to(torch.float64)
        gradients = [posed.gradient for posed in problem.rounds]
        likelihood = Likelihood.of(gradients, estimate_noise(problem))
        return cls(problem, likelihood, ImagePrior.of(problem.spec), tolerance)

    def judge(self, batch: Batch) -> Judgement:
        """Judge a candidate, in any precision."""
        soft = batch.targets.is_floating_point()
        batch = Batch(batch.inputs.double(), batch.targets.double() if soft else batch.targets)
        gradients, distances = [], []
        with torch.no_grad():
            for p in self.problem.rounds:
                found = simulate_gradient(
                    p.gradient_map, p.params, p.buffers, p.schedule, batch, p.members
                )
                gradient, observed = ravel({k: found[k] for k in p.gradient}), ravel(p.gradient)
                gradients.append(gradient)
                distances.append(
                    float((gradient - observed).square().sum() / observed.dot(observed))
                )
        residual = self.likelihood.residual(torch.cat(gradients))
        rough = sum(float(self.prior.coordinates(x[None]).square().sum()) for x in batch.inputs)
        energy, distance = self.likelihood.energy(residual) + rough, sum(distances) / len(distances)
        if not math.isfinite(energy + distance):
            return Judgement(math.inf, math.inf, math.inf, False)
        exact = distance <= max(self.tolerance, 4 * self._rounding())
        return Judgement(energy, distance, self.likelihood.misfit(residual), exact)

    def _rounding(self) -> float:
        """The distance that noise alone leaves, if it is small enough for rounding; else 0."""
        noise = float((self.likelihood.counts * self.likelihood.noise.square()).sum())
        share = noise / float(self.likelihood.observed.square().sum())
        return share if share <= ROUNDING else 0.0
