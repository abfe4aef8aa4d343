"""Choose the least strength of noise or pruning that gives every sample a target recovery error."""

import math
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.defenses.base import Defense, LocalRound, check_update, require_local_round
from flwr_leakage.defenses.influence_noise import add_pseudo_gradient, influence_noise
from flwr_leakage.defenses.noise import add_gaussian_noise
from flwr_leakage.defenses.pruning import prune_update
from flwr_leakage.defenses.spectrum import SampleSpectra, sample_jacobian
from flwr_leakage.params import Params, ravel
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import LocalSchedule, Update
from flwr_leakage.spectral.lsqr import solve_damped
from flwr_leakage.values import require, require_option

Mechanism = Literal["gaussian", "influence", "pruning"]

PRUNE_RATIOS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
"""The pruning ratios that are tried, of which the smallest that meets the target is used. From 0.9
on, each ratio keeps at most half as many entries as the one before."""


@dataclass(frozen=True)
class RiskPlan:
    """The chosen strength of a defense, its predicted effect, and the defended update.

    Attributes:
        strength: the pruning ratio; or the standard deviation, in units of the pseudo-gradient, of
            isotropic noise with the energy of the noise that was added.
        predicted_rmse: (S,) the predicted RMSE of each sample's recovery, in model input units.
        met: whether the smallest of ``predicted_rmse`` reaches the target.
        delta: the defended ``update.delta``.
    """

    strength: float
    predicted_rmse: Float[Tensor, " S"]
    met: bool
    delta: Params


def inversion_influence(
    local_round: LocalRound,
    schedule: LocalSchedule,
    perturbation: Float[Tensor, " P"],
    relative_damping: float,
    max_samples: int,
) -> Float[Tensor, " S"]:
    """Return a lower bound of each sample's inversion influence (I²F, Zhang et al. 2023, eq. 4).

    The influence is ``‖(A_iᵀA_i + εI)⁻¹ A_iᵀ δ‖ / √N``, with a damping ε. A_i = w_i ∂g_i/∂x_i maps
    a change of sample i, with N input entries, to that of the pseudo-gradient, in which its
    gradient g_i has the weight w_i. The iterative solver LSQR ends as soon as its lower and upper
    bounds agree to 5 %, or after 60 steps.

    Args:
        local_round: the client's private data of the round.
        schedule: the client's local training.
        perturbation: (P,) the perturbation δ of the update, in units of the pseudo-gradient.
        relative_damping: the damping ε divided by the largest eigenvalue of A_iᵀA_i, > 0.
        max_samples: the largest number S of samples, the first ones of the round.
    """
    operator, weights = sample_jacobian(local_round, schedule, max_samples)
    if not perturbation.any():
        return torch.zeros(operator.num_blocks, dtype=torch.float64)
    shared = perturbation.to(operator.dtype).expand(operator.num_blocks, -1).contiguous()
    norms = solve_damped(operator, shared, (relative_damping,), 0.05, 60).lower_bounds[:, 0]
    return norms.double() / weights / math.sqrt(operator.num_inputs)


@dataclass(frozen=True)
class TargetRisk(Defense):
    """A defense that uses the weakest noise or pruning by which every sample has a given recovery
    error.

    For noise, the error is that of an attacker with a Gaussian prior, equation (1) in
    ``defenses/spectrum.py``. The strength is found by bisection on the samples' estimated singular
    values. For pruning, the error is the inversion influence (I²F) of the pruned entries, by the
    lower bound of :func:`inversion_influence`, and bisection runs over ``PRUNE_RATIOS``. If the
    target cannot be met, the strongest allowed setting is used, and a warning names its predicted
    error.

    Attributes:
        target_rmse: the least RMSE that the recovery of every sample should have, ≥ 0, in model
            input units. Standardised inputs have the standard deviation 1.
        mechanism: ``gaussian``, ``influence`` (see ``InfluenceNoise``) or ``pruning``.
        prior_std: the standard deviation τ > 0 of an attacker's prior for each pixel, in model
            input units; under noise no larger error than τ is predicted.
        max_noise_std: the largest allowed standard deviation of noise, > 0, in units of the
            pseudo-gradient.
        relative_damping: for pruning, the damping ε of the I²F divided by the largest eigenvalue of
            A_iᵀA_i, > 0.
        max_samples: the largest number of samples whose error is predicted, the first ones of the
            round, ≥ 1.
        num_steps: the number of Lanczos steps, of two Jacobian products per sample each, ≥ 1.
    """

    effect: ClassVar[str] = (
        "noise or pruning is made as strong as a target of the predicted error asks"
    )
    takes_texts: ClassVar[bool] = False

    target_rmse: float = 0.5
    mechanism: Mechanism = "influence"
    prior_std: float = 1.0
    max_noise_std: float = 1.0
    relative_damping: float = 1e-4
    max_samples: int = 64
    num_steps: int = 24

    def __post_init__(self) -> None:
        require(self, "be finite and ≥ 0", "target_rmse")
        require_option(self, "mechanism", Mechanism)
        require(self, "be positive", "max_noise_std", "relative_damping", "prior_std")
        require(self, "be at least 1", "max_samples", "num_steps")

    def plan(self, update: Update, randomness: Randomness, local_round: LocalRound) -> RiskPlan:
        """Return the least strength that reaches ``target_rmse``, or the largest allowed one if
        none does, with the defended update.
        """
        if self.mechanism == "pruning":
            return self._plan_pruning(update, local_round)
        spectra = SampleSpectra.measure(
            local_round,
            update.schedule,
            randomness,
            self.prior_std,
            self.max_samples,
            self.num_steps,
        )
        if self.mechanism == "gaussian":
            return self._plan_gaussian(update, randomness, spectra)
        return self._plan_influence(update, spectra)

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Return the defended update; warn if a predicted error is below ``target_rmse``."""
        check_update(update)
        around = require_local_round(self, local_round)
        if self.target_rmse == 0:
            return update
        plan = self.plan(update, randomness, around)
        if not plan.met:
            worst = float(plan.predicted_rmse.min())
            warnings.warn(
                f"target_rmse = {self.target_rmse:g} cannot be met by {self.mechanism}: the worst "
                f"sample's predicted error is {worst:.3g} at the strongest setting "
                f"({plan.strength:.3g}).",
                stacklevel=2,
            )
        return replace(update, delta=plan.delta)

    def _plan_gaussian(
        self, update: Update, randomness: Randomness, spectra: SampleSpectra
    ) -> RiskPlan:
        from scipy.optimize import brentq  # imported here, as that takes most of a second

        def worst(noise_std: float) -> float:
            return float(spectra.error_under_isotropic_noise(noise_std).min())

        weakest, met = self.max_noise_std * 1e-12, worst(self.max_noise_std) >= self.target_rmse
        std = self.max_noise_std
        if met and worst(weakest) < self.target_rmse:
            level = brentq(
                lambda log_std: worst(math.exp(log_std)) - self.target_rmse,
                math.log(weakest),
                math.log(std),
                xtol=1e-12,
            )
            # Slightly more noise is taken than the search found, so that rounding misses no target.
            std = min(std, math.exp(level + 1e-11))
        elif met:
            std = weakest
        delta = add_gaussian_noise(update.delta, std * update.schedule.learning_rate, randomness)
        return RiskPlan(std, spectra.error_under_isotropic_noise(std), met, delta)

    def _plan_influence(self, update: Update, spectra: SampleSpectra) -> RiskPlan:
        size = sum(value.numel() for value in update.delta.values())
        allowed = self.max_noise_std**2 * size
        goal = min(self.target_rmse, self.prior_std * (1 - 1e-6))
        cutoffs = spectra.cutoffs_of_error(goal)
        energy = spectra.energy_at(goal)
        if energy > allowed:
            cutoffs = spectra.cutoffs_of_error(spectra.error_of_energy(allowed, goal))
            energy = allowed
        predicted = spectra.error_at(cutoffs)
        noise = influence_noise(spectra, cutoffs, energy)
        return RiskPlan(
            strength=math.sqrt(energy / size),
            predicted_rmse=predicted,
            met=bool(predicted.min() >= self.target_rmse * (1 - 1e-6)),
            delta=add_pseudo_gradient(update, noise),
        )

    def _plan_pruning(self, update: Update, local_round: LocalRound) -> RiskPlan:
        def attempt(prune_ratio: float) -> RiskPlan:
            pruned = prune_update(update.delta, prune_ratio)
            change = (ravel(update.delta) - ravel(pruned)) / update.schedule.learning_rate
            predicted = inversion_influence(
                local_round, update.schedule, change, self.relative_damping, self.max_samples
            )
            met = bool(predicted.min() >= self.target_rmse)
            return RiskPlan(prune_ratio, predicted, met, pruned)

        best = attempt(PRUNE_RATIOS[-1])
        low, high = 0, len(PRUNE_RATIOS) - 1
        while best.met and high - low > 1:
            middle = (low + high) // 2
            candidate = attempt(PRUNE_RATIOS[middle])
            if candidate.met:
                best, high = candidate, middle
            else:
                low = middle
        return best
