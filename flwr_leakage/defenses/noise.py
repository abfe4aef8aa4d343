"""Add isotropic noise to the update, Gaussian or Laplacian."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from flwr_leakage.defenses.base import Defense, LocalRound, check_update
from flwr_leakage.defenses.units import NoiseUnit, check_unit, update_units
from flwr_leakage.params import Params
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update


def add_gaussian_noise(
    delta: Mapping[str, Tensor], noise_std: float, randomness: Randomness
) -> Params:
    """Add ``noise_std · z`` with z ~ N(0, 1) to each entry (Zhu, Liu, Han 2019, section 5)."""
    return {
        name: _add(value, noise_std, randomness.normal(value.shape, value.dtype))
        for name, value in delta.items()
    }


def add_laplacian_noise(
    delta: Mapping[str, Tensor], noise_std: float, randomness: Randomness
) -> Params:
    """Add Laplacian noise to each entry (Zhu, Liu, Han 2019, section 5).

    Its density is ``exp(−|z| / b) / 2b`` with ``b = noise_std / √2``, so that ``noise_std`` is
    the standard deviation: equal strengths of both laws have equal energy.
    """
    scale = noise_std / math.sqrt(2)
    return {
        name: _add(value, scale, randomness.laplace(value.shape, value.dtype))
        for name, value in delta.items()
    }


def _add(value: Tensor, scale: float, draws: Tensor) -> Tensor:
    """Return ``value + scale · draws``, rounded to the value's type if the draws are finer."""
    return (value + scale * draws.to(value.device)).to(value.dtype)


@dataclass(frozen=True)
class _Noise(Defense):
    """Add noise of a stated size, which a subclass draws, to every entry of an update."""

    noise_std: float = 0.1
    relative_to: NoiseUnit = "gradient"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_std) and self.noise_std >= 0):
            raise ValueError(f"noise_std must be finite and ≥ 0, got {self.noise_std}.")
        check_unit(self.relative_to, NoiseUnit)

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense."""
        return "random noise is added to every number of the update"

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Add noise to ``update.delta``."""
        check_update(update)
        std = update_units(self.noise_std, update, self.relative_to)
        return replace(update, delta=self.added(update.delta, std, randomness))

    def added(self, delta: Params, std: float, randomness: Randomness) -> Params:
        """Return an update with noise of standard deviation ``std`` added."""
        raise NotImplementedError


@dataclass(frozen=True)
class GaussianNoise(_Noise):
    """Add independent Gaussian noise to every entry; see :func:`add_gaussian_noise`.

    Attributes:
        noise_std: standard deviation ≥ 0, in the unit that ``relative_to`` names.
        relative_to: ``gradient`` (that of the pseudo-gradient ``−Δ / learning_rate``, as the
            papers state it), ``update`` (that of Δ) or ``norm`` (``‖Δ‖ / √P``).
    """

    def added(self, delta: Params, std: float, randomness: Randomness) -> Params:
        """Return an update with Gaussian noise added."""
        return add_gaussian_noise(delta, std, randomness)


@dataclass(frozen=True)
class LaplacianNoise(_Noise):
    """Add independent Laplacian noise to every entry; see :func:`add_laplacian_noise`.

    Attributes:
        noise_std: standard deviation ≥ 0, in the unit that ``relative_to`` names.
        relative_to: as for :class:`GaussianNoise`.
    """

    def added(self, delta: Params, std: float, randomness: Randomness) -> Params:
        """Return an update with Laplacian noise added."""
        return add_laplacian_noise(delta, std, randomness)
