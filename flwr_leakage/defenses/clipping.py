"""Clip the norm of the update."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from flwr_leakage.defenses.base import UpdateDefense
from flwr_leakage.defenses.units import ClipUnit, update_units
from flwr_leakage.params import Params, ravel, scale
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update
from flwr_leakage.values import require_option


def clip_update(delta: Mapping[str, Tensor], max_norm: float) -> Params:
    """Return the update Δ clipped to the norm ``max_norm``: ``Δ · min(1, max_norm / ‖Δ‖₂)``. ‖Δ‖₂
    is the Euclidean norm of all tensors together (McMahan et al. 2018, algorithm 1).

    Example:
        >>> clip_update({"w": torch.tensor([3.0, 4.0])}, 1.0)
        {'w': tensor([0.6000, 0.8000])}
    """
    norm = float(ravel(delta).double().norm())
    return scale(delta, min(1.0, max_norm / norm) if norm > 0 else 1.0)


@dataclass(frozen=True)
class Clipping(UpdateDefense):
    """A defense that clips the Euclidean norm of the whole update Δ; see :func:`clip_update`.

    Attributes:
        max_norm: the largest norm, > 0; ``inf`` clips nothing.
        relative_to: ``gradient`` if ``max_norm`` is a norm of the pseudo-gradient
            ``−Δ / learning_rate``, ``update`` if it is a norm of Δ.
    """

    effect: ClassVar[str] = "an update above a set length is shortened to it"

    max_norm: float = 1.0
    relative_to: ClipUnit = "update"

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {self.max_norm}.")
        require_option(self, "relative_to", ClipUnit)

    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the update's tensors, scaled by one factor so that their joint norm is at most
        ``max_norm``, in the unit of ``relative_to``.
        """
        return clip_update(update.delta, update_units(self.max_norm, update, self.relative_to))
