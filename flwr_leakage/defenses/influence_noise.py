"""Noise of a given energy in the directions that hide a client's samples most."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.defenses.base import Defense, LocalRound, check_update, require_local_round
from flwr_leakage.defenses.spectrum import SampleSpectra, check_spectrum_settings
from flwr_leakage.defenses.units import NoiseUnit, check_unit, update_units
from flwr_leakage.params import Params, add, unravel
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update

Allotment = Literal["equal", "max_min"]


def allot_energy(
    spectra: SampleSpectra, energy: float, allotment: Allotment
) -> Float[Tensor, " S"]:
    """Return the cutoffs of the samples that share ``energy``.

    ``equal`` gives every sample the same energy. ``max_min`` gives all of them the same
    predicted error, the largest that the energy pays for: since a sample's error grows with its
    own energy, no other allotment lifts the worst-protected sample higher.

    Args:
        spectra: the spectra of S samples.
        energy: ‖δ‖² in total, in squared units of the pseudo-gradient.
        allotment: ``equal`` or ``max_min``.
    """
    count = len(spectra.exposures)
    if allotment == "equal" or energy == 0:
        return spectra.cutoffs_of_energy(torch.full_like(spectra.exposures, energy / count))
    return spectra.cutoffs_of_error(spectra.error_of_energy(energy, spectra.prior_std))


def influence_noise(
    spectra: SampleSpectra, cutoffs: Float[Tensor, " S"], energy: float
) -> Float[Tensor, " P"]:
    """Draw Σ_i δ_i along the samples' singular directions, scaled to ‖δ‖² = ``energy``.

    Zhang et al. (2023, section 5.1): noise along the right singular vector of J = Aᵀ with the
    singular value σ moves the reconstruction by 1/σ times its length, so that directions of
    small σ hide most, up to the prior's own uncertainty, beyond which more is wasted. The
    allotment over σ is that of :meth:`SampleSpectra.energies`.
    """
    noise = spectra.draw_noise(cutoffs).sum(0)
    return noise * (math.sqrt(energy) / noise.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class InfluenceNoise(Defense):
    """Add noise as long as Gaussian noise of ``noise_std``, in the directions that hide most.

    Attributes:
        noise_std: the standard deviation of the isotropic noise of equal energy, ≥ 0; see
            ``relative_to``.
        relative_to: ``gradient``, ``update`` or ``norm``, as for ``GaussianNoise``.
        allotment: the division of the energy over samples: ``equal``, or ``max_min``, which lifts
            the worst-protected sample.
        prior_std: τ > 0, what an attacker does not know of a pixel beforehand, in model input
            units; 1 for standardised inputs.
        max_samples: samples that are protected, from the first on, ≥ 1.
        num_steps: Lanczos steps, of two products each, ≥ 1.
    """

    takes_texts: ClassVar[bool] = False

    noise_std: float = 0.01
    relative_to: NoiseUnit = "gradient"
    allotment: Allotment = "max_min"
    prior_std: float = 1.0
    max_samples: int = 64
    num_steps: int = 24

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_std) and self.noise_std >= 0):
            raise ValueError(f"noise_std must be finite and ≥ 0, got {self.noise_std}.")
        check_unit(self.relative_to, NoiseUnit)
        if self.allotment not in get_args(Allotment):
            raise ValueError(
                f"allotment must be one of {get_args(Allotment)}, got {self.allotment!r}."
            )
        check_spectrum_settings(self.prior_std, self.max_samples, self.num_steps)

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense."""
        return "random noise is added to the update where it hides the images most"

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Add noise to the entries of ``update.delta``."""
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
    """Add noise in units of the pseudo-gradient to ``update.delta``."""
    scaled = unravel(noise * update.schedule.learning_rate, update.delta)
    cast = {name: value.to(update.delta[name].dtype) for name, value in scaled.items()}
    return add(update.delta, cast)
