"""One measure for candidates of any attack: misfit in units of noise, plus a prior of images."""

import math
from dataclasses import dataclass

import torch

from flwr_leakage.attacks.inversion.likelihood import Likelihood, estimate_noise
from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral.image_prior import ImagePrior

NOISED = 1e-8
"""An update is noised if noise adds more than this to ``‖g − g*‖² / ‖g*‖²``; less is rounding."""

EXPLAINED = 1.05
"""The mean squared residual, in units of noise, up to which noise is all that is left."""

PLAUSIBLE = 1.5
"""Mean square of the prior's coordinates up to which an image is no fit of noise; 1 of a draw."""


@dataclass(frozen=True)
class Judgement:
    """A candidate as the attacker sees it, without the truth.

    Attributes:
        energy: −2 log posterior up to a constant; infinite where it is not finite.
        distance: ``‖g − g*‖² / ‖g*‖²``, the mean over rounds; infinite likewise.
        misfit: mean squared residual in units of noise; pruned entries count where they exceed
            what pruning allows.
        is_met: whether the distance is within the tolerance.
        is_explained: whether an update that was noised is explained to its noise, by images that
            are likely under the prior.
    """

    energy: float
    distance: float
    misfit: float
    is_met: bool = False
    is_explained: bool = False


@dataclass(frozen=True)
class Evidence:
    """What an update says about candidates for the samples behind it.

    The energy of a candidate x̂ with residuals r = g(x̂) − g* is

        E = P min(χ, 1) + N log(1 + P max(0, χ − 1) / N) + Σ_i ‖L⁻¹(x̂_i − μ)‖²

    with the misfit χ = Σ_t (P_t / P) m_t / σ_t², m_t the mean square of r over the P_t entries of
    tensor t (entries that may have been pruned count by how far they exceed what pruning allows),
    σ the noise, estimated from the update itself, N the numbers in x̂ (or P, if fewer), and
    N(μ, LLᵀ) a prior of images (:mod:`flwr_leakage.attacks.inversion.likelihood`,
    :class:`flwr_leakage.spectral.image_prior.ImagePrior`). What noise does not explain is the
    image's error, which has N directions, not P. A candidate that fits the noise gains little
    below χ = 1, and pays for it by the prior.

    Attributes:
        problem: in double precision.
        likelihood: of all rounds' residuals.
        prior: of each sample.
        tolerance: a distance at which the gradient counts as met.
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
        unknowns = batch.inputs.numel()
        energy = self.likelihood.correlated_energy(residual, unknowns) + rough
        distance = sum(distances) / len(distances)
        if not math.isfinite(energy + distance):
            return Judgement(math.inf, math.inf, math.inf)
        misfit = self.likelihood.misfit(residual)
        plausible = rough <= PLAUSIBLE * unknowns
        explained = self._is_noised() and misfit <= EXPLAINED and plausible
        return Judgement(energy, distance, misfit, distance <= self.tolerance, explained)

    def _is_noised(self) -> bool:
        noise = float((self.likelihood.counts * self.likelihood.noise.square()).sum())
        return noise > NOISED * float(self.likelihood.observed.square().sum())
