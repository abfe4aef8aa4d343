"""Estimate the spectra of a client's samples, by which risk-driven defenses choose their noise.

For sample i let A_i = ∂g/∂x_i ∈ R^{P×N}, the derivative of the pseudo-gradient
g = −Δ/learning_rate, with singular values σ. An attacker with a Gaussian prior of standard
deviation τ for every pixel, who sees g + δ with independent noise of variance e(σ) along each
left singular vector, and who knows everything else, is left with the squared error

    Σ_σ τ² e(σ) / (e(σ) + τ² σ²)                                                     (1)

This is the expected I²F (Zhang et al. 2023, equation 6 with section 4's ε: variance
σ_noise² Σ λ/(λ + ε)²) at the damping ε = e/τ² that is best for the attacker, with the error that
the damping itself causes.
It never exceeds N τ²: no noise hides more than there is. It is the linearised Bayesian bound,
with the conditions of ``flwr_leakage.bounds.bayesian_mse``.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.bounds import posterior_variance
from flwr_leakage.defenses.base import LocalRound
from flwr_leakage.operators import SampleJacobian
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import LocalSchedule
from flwr_leakage.spectral.lanczos import Lanczos

_TINY = 1e-150


def sample_jacobian(
    local_round: LocalRound, schedule: LocalSchedule, max_samples: int
) -> tuple[SampleJacobian, Float[Tensor, " S"]]:
    """Return ∂∇L/∂x of the first samples, each on its own, and their weights in the update.

    Where the client normalises with batch statistics, they are held at the batch's own.
    """
    samples = local_round.samples(schedule)[:max_samples]
    # Samples that no step touches, of weight zero, do not show in the update at all.
    return samples.jacobian(), samples.weights


@dataclass(frozen=True)
class SampleSpectra:
    """The spectral measures of A_iᵀA_i for S samples, from one Lanczos run from Gaussian z_i.

    Attributes:
        operator: the operator of the samples' own gradients.
        exposures: (S,), weights that turn the operator's maps into A_i.
        singular_values: (S, k), σ: Gauss nodes.
        node_weights: (S, k), summing to one: N Σⱼ wⱼ f(σⱼ) estimates Σ_σ f(σ).
        prior_std: τ, in model input units.
    """

    operator: SampleJacobian
    exposures: Float[Tensor, " S"]
    singular_values: Float[Tensor, "S k"]
    node_weights: Float[Tensor, "S k"]
    prior_std: float
    _lanczos: Lanczos

    @staticmethod
    def measure(
        local_round: LocalRound,
        schedule: LocalSchedule,
        randomness: Randomness,
        prior_std: float = 1.0,
        max_samples: int = 64,
        num_steps: int = 24,
    ) -> "SampleSpectra":
        """Run ``num_steps`` steps of Lanczos, of two products each, for all samples at once."""
        operator, exposures = sample_jacobian(local_round, schedule, max_samples)
        start = randomness.normal((operator.num_blocks, operator.num_inputs), torch.float64)
        lanczos = Lanczos(operator, start.to(operator.device, operator.dtype))
        for _ in range(min(num_steps, operator.num_inputs)):
            lanczos.step()
        values, vectors = lanczos.ritz()
        sigma = values.clamp_min(0).sqrt().cpu() * exposures[:, None]
        weights = vectors[:, 0].square().cpu()
        return SampleSpectra(operator, exposures, sigma, weights, prior_std, lanczos)

    def trace(self, values: Float[Tensor, "S k"]) -> Float[Tensor, " S"]:
        """Estimate Σ_σ f(σ) from f at the nodes."""
        return self.operator.num_inputs * (self.node_weights * values).sum(1)

    def rmse(self, squared_errors: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Return √(squared error / N), in model input units."""
        return (squared_errors / self.operator.num_inputs).sqrt()

    def error_under_isotropic_noise(self, noise_std: float) -> Float[Tensor, " S"]:
        """Return the predicted RMSE (1) for e(σ) = noise_std², in units of the pseudo-gradient."""
        tau, energy = self.prior_std, noise_std**2
        if energy == 0:
            return torch.zeros(len(self.exposures), dtype=torch.float64)
        return self.rmse(self.trace(posterior_variance(self.singular_values**2, energy, tau**2)))

    def energies(self, cutoffs: Float[Tensor, " S"]) -> Float[Tensor, "S k"]:
        """Return e(σ) = τ² σ (c − σ)₊, for which (1) is largest among allotments of its energy.

        (1) is concave in every e, and its derivative (τσ)² τ² / (e + τ²σ²)² is the same for
        all σ < c under this e and smaller beyond: the condition of Karush, Kuhn and Tucker.
        """
        sigma = self.singular_values
        return self.prior_std**2 * sigma * (cutoffs[:, None] - sigma).clamp_min(0)

    def error_at(self, cutoffs: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Return the predicted RMSE (1) under :meth:`energies`, τ² Σ (1 − σ/c)₊."""
        share = 1 - self.singular_values / cutoffs.clamp_min(_TINY)[:, None]
        return self.rmse(self.trace(self.prior_std**2 * share.clamp_min(0)))

    def cutoffs_of_energy(self, energy: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Return the c at which :meth:`energies` add up to ``energy``.

        Between two nodes the sum is linear in c: with the m nodes below c,
        τ² N (c Σ wσ − Σ wσ²) = energy.
        """
        first, second = (
            (self.node_weights * self.singular_values**power).cumsum(1) for power in (1, 2)
        )
        goal = energy[:, None] / (self.prior_std**2 * self.operator.num_inputs)
        below = (self.singular_values * first - second < goal).sum(1, keepdim=True)
        index = (below - 1).clamp_min(0)
        slope = first.gather(1, index).clamp_min(_TINY)
        cutoffs = (goal + second.gather(1, index)) / slope
        return torch.where(energy > 0, cutoffs[:, 0], 0.0)

    def cutoffs_of_error(self, rmse: float) -> Float[Tensor, " S"]:
        """Return the c at which :meth:`error_at` reaches ``rmse`` < τ.

        Between two nodes, with the m nodes below c, τ² (Σ w − Σ wσ / c) = rmse².
        """
        zeroth = self.node_weights.cumsum(1)
        first = (self.node_weights * self.singular_values).cumsum(1)
        goal = (rmse / self.prior_std) ** 2
        reached = zeroth - first / self.singular_values.clamp_min(_TINY)
        below = (reached < goal).sum(1, keepdim=True)
        index = (below - 1).clamp_min(0)
        rest = (zeroth.gather(1, index) - goal).clamp_min(_TINY)
        cutoffs = (first.gather(1, index) / rest)[:, 0]
        return cutoffs if rmse > 0 else torch.zeros_like(cutoffs)

    def energy_at(self, rmse: float) -> float:
        """Return the samples' total energy at which each has the predicted error ``rmse`` < τ."""
        return float(self.trace(self.energies(self.cutoffs_of_error(rmse))).sum())

    def error_of_energy(self, energy: float, highest: float) -> float:
        """Return the error predicted for all samples at a total energy, at most ``highest`` ≤ τ."""
        from scipy.optimize import brentq  # the import takes most of a second

        def excess(rmse: float) -> float:
            return self.energy_at(rmse) - energy

        # At τ itself no energy suffices.
        highest = min(highest, self.prior_std * (1 - 1e-12))
        if excess(highest) <= 0:
            return highest
        return float(brentq(excess, 0.0, highest, xtol=1e-14 * highest, maxiter=1000))

    def draw_noise(self, cutoffs: Float[Tensor, " S"]) -> Float[Tensor, "S P"]:
        """Return δ_i = A_i (√e / σ)(A_iᵀA_i) z_i with the Lanczos run's z_i, of mean energy e."""
        eigenvalues, vectors = self._lanczos.ritz()
        floor = torch.finfo(self.operator.dtype).eps * eigenvalues[:, -1:].clamp_min(_TINY)
        scale = (self.energies(cutoffs).to(eigenvalues) / eigenvalues.clamp_min(floor)).sqrt()
        coordinates = torch.einsum("skj,sj->sk", vectors, scale * vectors[:, 0])
        coordinates = coordinates * self._lanczos.start_norm[:, None].double()
        combined = torch.einsum(
            "sk,skn->sn", coordinates.to(self.operator.dtype), self._lanczos.basis
        )
        return self.operator.matvec(combined)


def check_spectrum_settings(prior_std: float, max_samples: int, num_steps: int) -> None:
    """Raise ``ValueError`` for settings out of range."""
    if not (math.isfinite(prior_std) and prior_std > 0):
        raise ValueError(f"prior_std must be positive, got {prior_std}.")
    for name, value in (("max_samples", max_samples), ("num_steps", num_steps)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
