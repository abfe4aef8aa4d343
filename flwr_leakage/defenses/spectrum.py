"""Estimate the spectra of samples' Jacobians, by which risk-driven defenses choose their noise.

For sample i with N input entries, let A_i = ∂g/∂x_i ∈ R^{P×N} be the derivative of the
pseudo-gradient g = −Δ/learning_rate with P entries, and σ its singular values. Consider an attacker
who knows all samples but sample i, for which he has a Gaussian prior of standard deviation τ for
every pixel. He sees g plus independent noise of variance e(σ) along each left singular vector of
A_i. The expected squared error of the attacker's best reconstruction is

    Σ_σ τ² e(σ) / (e(σ) + τ² σ²)                                                     (1)

This is the expected I²F (Zhang et al. 2023, equation 6 with section 4's ε: variance σ_noise² Σ λ/(λ
+ ε)²) at the damping ε = e/τ² that is best for the attacker, with the error that the damping itself
causes. It never exceeds N τ², the error of a guess by the prior alone. It is the linearised
Bayesian bound, under the conditions of ``flwr_leakage.bounds.bayesian_mse``.
"""

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
    """Return the Jacobian ∂∇L/∂x of each of the first ``max_samples`` samples alone, and the
    samples' weights (S,), the factors of their gradients in the update's pseudo-gradient. Batch
    statistics are held constant at the batch's own.
    """
    samples = local_round.samples(schedule)[:max_samples]
    # A sample that no local step uses stays in the result: its weight is zero.
    return samples.jacobian(), samples.weights


@dataclass(frozen=True)
class SampleSpectra:
    """Estimates of the singular values of S samples' Jacobians, from one Lanczos run.

    A_i = ∂g/∂x_i is the derivative of the update's pseudo-gradient g by sample i of N entries. The
    Lanczos run is on A_iᵀA_i, and starts from a Gaussian vector.

    Attributes:
        operator: the operator of the Jacobians ∂g_i/∂x_i of the samples' own gradients g_i.
        exposures: (S,) the samples' weights wᵢ in the update, with A_i = wᵢ ∂g_i/∂x_i.
        singular_values: (S, k) the nodes σⱼ of a Gauss quadrature over the singular values of A_i.
        node_weights: (S, k) the weights vⱼ of the nodes, which sum to one in each row. N Σⱼ vⱼ
            f(σⱼ) estimates the sum of f(σ) over all singular values.
        prior_std: the standard deviation τ of an attacker's prior for each pixel, in model input
            units.
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
        """Return the spectra of a client's samples, by Lanczos steps for all samples at once.

        Args:
            local_round: the private data of the client's round.
            schedule: the local training, which determines the samples' weights in the update.
            randomness: the source of the start vectors.
            prior_std: the standard deviation τ of an attacker's prior, in model input units.
            max_samples: the number of samples, the first ones of the round.
            num_steps: the number of Lanczos steps, of two Jacobian products per sample each.
        """
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
        """Return an estimate (S,) of the sum of f(σ) over each sample's singular values σ.

        ``values`` (S, k) are the values of the function f at the nodes ``singular_values``.
        """
        return self.operator.num_inputs * (self.node_weights * values).sum(1)

    def rmse(self, squared_errors: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Return √(squared error / N) of each of S samples with N entries, in model input units."""
        return (squared_errors / self.operator.num_inputs).sqrt()

    def error_under_isotropic_noise(self, noise_std: float) -> Float[Tensor, " S"]:
        """Return the predicted RMSE (S,) of an attacker's reconstruction of each of the S samples.

        The noise on the pseudo-gradient has the variance ``e = noise_std²`` along every singular
        vector. The squared error is equation (1) of this module, ``Σ_σ τ² e / (e + τ² σ²)``, with
        τ the standard deviation of the attacker's Gaussian prior for each pixel, and σ the singular
        values of the pseudo-gradient's derivative by the sample. The result is in model input
        units, and ``noise_std`` in those of the pseudo-gradient.
        """
        tau, energy = self.prior_std, noise_std**2
        if energy == 0:
            return torch.zeros(len(self.exposures), dtype=torch.float64)
        return self.rmse(self.trace(posterior_variance(self.singular_values**2, energy, tau**2)))

    def energies(self, cutoffs: Float[Tensor, " S"]) -> Float[Tensor, "S k"]:
        """Return the noise variance e(σ) = τ² σ (c − σ)₊ at each node σ of each sample, (S, k).
        ``cutoffs`` are the samples' c, in units of the singular values.

        The nodes are estimated singular values of each sample's Jacobian, and τ is the standard
        deviation of the attacker's prior. Of all divisions of the energy Σ_σ e(σ), this one gives
        the largest predicted error of an attacker's reconstruction, equation (1) of this module:
        the error is concave in every e(σ), with equal derivatives (τσ)² τ² / (e + τ²σ²)² for σ < c
        and smaller ones beyond (Karush, Kuhn and Tucker).
        """
        sigma = self.singular_values
        return self.prior_std**2 * sigma * (cutoffs[:, None] - sigma).clamp_min(0)

    def error_at(self, cutoffs: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Return the predicted RMSE (S,) of an attacker's reconstruction of each of the S samples.

        The noise is that of :meth:`energies` with a cutoff c for each sample, in units of the
        singular values σ. The squared error is τ² Σ_σ (1 − σ/c)₊, with τ the attacker's prior
        standard deviation. The result is in model input units.
        """
        share = 1 - self.singular_values / cutoffs.clamp_min(_TINY)[:, None]
        return self.rmse(self.trace(self.prior_std**2 * share.clamp_min(0)))

    def cutoffs_of_energy(self, energy: Float[Tensor, " S"]) -> Float[Tensor, " S"]:
        """Return the cutoff c (S,) of each sample at which its noise has the given ``energy``, the
        sum of :meth:`energies` over its singular values, in squared units of the pseudo-gradient.
        c solves τ² N (c Σ wσ − Σ wσ²) = energy, with sums over the nodes σ < c and their weights w,
        for N input entries and the attacker's prior standard deviation τ.
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
        """Return the cutoff c (S,) of each sample at which the predicted RMSE of its reconstruction
        is ``rmse``, in model input units and below the attacker's prior standard deviation τ. c
        solves τ² (Σ w − Σ wσ / c) = rmse², with sums over the nodes σ < c and their weights w.
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
        """Return the noise energy, summed over all samples, that gives each sample the predicted
        RMSE ``rmse``. It is in squared units of the pseudo-gradient. ``rmse`` is in model input
        units and must be below the attacker's prior standard deviation.
        """
        return float(self.trace(self.energies(self.cutoffs_of_error(rmse))).sum())

    def error_of_energy(self, energy: float, highest: float) -> float:
        """Return the predicted RMSE that all samples share, at most ``highest``, if the noise
        ``energy`` is divided among them so that their errors are equal. The RMSE is in model input
        units, the energy in squared units of the pseudo-gradient.
        """
        from scipy.optimize import brentq  # imported here, as that takes most of a second

        def excess(rmse: float) -> float:
            return self.energy_at(rmse) - energy

        # The search ends just below τ, the standard deviation of the prior, as an RMSE of τ would
        # need infinite energy.
        highest = min(highest, self.prior_std * (1 - 1e-12))
        if excess(highest) <= 0:
            return highest
        return float(brentq(excess, 0.0, highest, xtol=1e-14 * highest, maxiter=1000))

    def draw_noise(self, cutoffs: Float[Tensor, " S"]) -> Float[Tensor, "S P"]:
        """Return the noise δ_i = A_i f(A_iᵀA_i) z_i of each sample i, (S, P). Its expected variance
        along each singular vector is that of :meth:`energies` at the given cutoffs. A_i is the
        derivative of the pseudo-gradient by sample i, with singular values σ; f takes σ² to √e(σ) /
        σ; z_i is the Gaussian vector from which the Lanczos run started.
        """
        eigenvalues, vectors = self._lanczos.ritz()
        floor = torch.finfo(self.operator.dtype).eps * eigenvalues[:, -1:].clamp_min(_TINY)
        scale = (self.energies(cutoffs).to(eigenvalues) / eigenvalues.clamp_min(floor)).sqrt()
        coordinates = torch.einsum("skj,sj->sk", vectors, scale * vectors[:, 0])
        coordinates = coordinates * self._lanczos.start_norm[:, None].double()
        combined = torch.einsum(
            "sk,skn->sn", coordinates.to(self.operator.dtype), self._lanczos.basis
        )
        return self.operator.matvec(combined)
