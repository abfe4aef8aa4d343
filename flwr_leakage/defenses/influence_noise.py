"""Add noise of a given energy in the directions that hide a client's samples most."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.defenses.base import Defense, LocalRound, check_update, require_local_round
from flwr_leakage.defenses.spectrum import SampleSpectra
from flwr_leakage.defenses.units import NoiseUnit, update_units
from flwr_leakage.params import Params, add, unravel
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update
from flwr_leakage.values import require, require_option

Allotment = Literal["equal", "max_min"]


def allot_energy(
    spectra: SampleSpectra, energy: float, allotment: Allotment
) -> Float[Tensor, " S"]:
    """Return the cutoffs c (S,), one per sample, that divide the energy ‖δ‖² of noise δ among the
    samples. A sample gets noise along those singular directions of its Jacobian whose singular
    values lie below c; see :meth:`SampleSpectra.energies`. With ``equal`` all samples get the same
    energy. With ``max_min`` all samples get the same predicted recovery error. As a sample's error
    grows with its energy, no other division gives the worst-protected sample a larger error.
    ``energy`` is the sum over samples, in squared units of the pseudo-gradient. c is in units of
    the singular values.
    """
    count = len(spectra.exposures)
    if allotment == "equal" or energy == 0:
        return spectra.cutoffs_of_energy(torch.full_like(spectra.exposures, energy / count))
    return spectra.cutoffs_of_error(spectra.error_of_energy(energy, spectra.prior_std))


def influence_noise(
    spectra: SampleSpectra, cutoffs: Float[Tensor, " S"], energy: float
) -> Float[Tensor, " P"]:
    """Return noise (P,) along the samples' singular directions, in units of the pseudo-gradient.
    Its squared norm is ``energy``.

    Let A_i be the derivative of the pseudo-gradient by sample i. Noise of length ℓ along a left
    singular vector of A_i with the singular value σ moves the reconstruction by ℓ/σ (Zhang et al.
    2023, section 5.1). So noise along directions of small σ hides most, up to the uncertainty of
    the attacker's prior. ``cutoffs`` (S,) are the samples' cutoffs, see :func:`allot_energy`.
    """
    noise = spectra.draw_noise(cutoffs).sum(0)
    return noise * (math.sqrt(energy) / noise.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class InfluenceNoise(Defense):
    """A defense that adds noise to the update in the directions that hide the samples most.

    The noise has the norm that is expected of Gaussian noise of standard deviation ``noise_std``.

    Attributes:
        noise_std: the standard deviation of isotropic noise of the same energy, ≥ 0, in the unit
            that ``relative_to`` names.
        relative_to: ``gradient`` for units of the pseudo-gradient, ``update`` for those of the
            update Δ, or ``norm`` for ``‖Δ‖ / √P``, with P the number of its entries.
        allotment: how the energy is divided over samples: ``equal``, or ``max_min``, which
            maximises the recovery error of the worst-protected sample.
        prior_std: the standard deviation τ > 0 of an attacker's prior for each pixel, in model
            input units; 1 for standardised inputs.
        max_samples: the largest number of samples that are protected, the first ones of the round,
            ≥ 1.
        num_steps: the number of Lanczos steps, of two Jacobian products per sample each, ≥ 1.
    """

    effect: ClassVar[str] = "random noise is added to the update where it hides the images most"
    takes_texts: ClassVar[bool] = False

    noise_std: float = 0.01
    relative_to: NoiseUnit = "gradient"
    allotment: Allotment = "max_min"
    prior_std: float = 1.0
    max_samples: int = 64
    num_steps: int = 24

    def __post_init__(self) -> None:
        require(self, "be finite and ≥ 0", "noise_std")
        require_option(self, "relative_to", NoiseUnit)
        require_option(self, "allotment", Allotment)
        require(self, "be positive", "prior_std")
        require(self, "be at least 1", "max_samples", "num_steps")

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Return the update with noise in the directions that hide the samples most."""
        check_update(update)
        around = require_local_round(self, local_round)
        std = update_units(self.noise_std, update, self.relative_to)
        std /= update.schedule.learning_rate
        if std == 0:
            return update
        spectra = SampleSpectra.measure(
            around,
            update.schedule,
            randomness,
            self.prior_std,
            self.max_samples,
            self.num_steps,
        )
        energy = std**2 * sum(value.numel() for value in update.delta.values())
        cutoffs = allot_energy(spectra, energy, self.allotment)
        noise = influence_noise(spectra, cutoffs, energy)
        return replace(update, delta=add_pseudo_gradient(update, noise))


def add_pseudo_gradient(update: Update, noise: Float[Tensor, " P"]) -> Params:
    """Return ``update.delta`` plus the learning rate times ``noise`` (P,), which is given in units
    of the pseudo-gradient.
    """
    scaled = unravel(noise * update.schedule.learning_rate, update.delta)
    cast = {name: value.to(update.delta[name].dtype) for name, value in scaled.items()}
    return add(update.delta, cast)
