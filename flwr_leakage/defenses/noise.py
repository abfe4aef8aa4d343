"""Add isotropic noise to the update, Gaussian or Laplacian."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flwr_leakage.defenses.base import UpdateDefense
from flwr_leakage.defenses.units import NoiseUnit, update_units
from flwr_leakage.params import Params
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update
from flwr_leakage.values import require, require_option


def add_gaussian_noise(
    delta: Mapping[str, Tensor], noise_std: float, randomness: Randomness
) -> Params:
    """Return the tensors of ``delta`` with ``noise_std · z``, z ~ N(0, 1), added to each entry
    (Zhu, Liu, Han 2019, section 5).
    """
    return {
        name: _add(value, noise_std, randomness.normal(value.shape, value.dtype))
        for name, value in delta.items()
    }


def add_laplacian_noise(
    delta: Mapping[str, Tensor], noise_std: float, randomness: Randomness
) -> Params:
    """Return the tensors of ``delta`` with independent Laplacian noise added to each entry (Zhu,
    Liu, Han 2019, section 5). The noise z has the density ``exp(−|z| / b) / 2b`` with ``b =
    noise_std / √2``, so that its standard deviation is ``noise_std``.
    """
    scale = noise_std / math.sqrt(2)
    return {
        name: _add(value, scale, randomness.laplace(value.shape, value.dtype))
        for name, value in delta.items()
    }


def _add(value: Tensor, scale: float, draws: Tensor) -> Tensor:
    """Return ``value + scale · draws``, rounded to the dtype of ``value`` if ``draws`` have a more
    precise one.
    """
    return (value + scale * draws.to(value.device)).to(value.dtype)


@dataclass(frozen=True)
class _Noise(UpdateDefense):
    """A base class of defenses that add independent noise of a given size to every entry. A
    subclass draws the noise.
    """

    effect: ClassVar[str] = "random noise is added to every number of the update"

    noise_std: float = 0.1
    relative_to: NoiseUnit = "gradient"

    def __post_init__(self) -> None:
        require(self, "be finite and ≥ 0", "noise_std")
        require_option(self, "relative_to", NoiseUnit)

    def std_of(self, update: Update) -> float:
        """Return the standard deviation of the noise that is added to an update, in units of
        ``update.delta``.
        """
        return update_units(self.noise_std, update, self.relative_to)


@dataclass(frozen=True)
class GaussianNoise(_Noise):
    """A defense that adds independent Gaussian noise to every entry of the update Δ.

    Attributes:
        noise_std: the standard deviation of the noise, ≥ 0, in the unit that ``relative_to`` names.
        relative_to: ``gradient`` for units of the pseudo-gradient ``−Δ / learning_rate``, which
            papers use; ``update`` for those of Δ; ``norm`` for ``‖Δ‖ / √P``, with P the number of
            entries.
    """

    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the update's tensors with Gaussian noise added to each entry."""
        return add_gaussian_noise(update.delta, self.std_of(update), randomness)


@dataclass(frozen=True)
class LaplacianNoise(_Noise):
    """A defense that adds independent Laplacian noise to every entry of the update Δ.

    Attributes:
        noise_std: the standard deviation of the noise, ≥ 0, in the unit that ``relative_to`` names.
        relative_to: ``gradient`` for units of the pseudo-gradient ``−Δ / learning_rate``;
            ``update`` for those of Δ; ``norm`` for ``‖Δ‖ / √P``, with P the number of entries.
    """

    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the update's tensors with Laplacian noise added to each entry."""
        return add_laplacian_noise(update.delta, self.std_of(update), randomness)
