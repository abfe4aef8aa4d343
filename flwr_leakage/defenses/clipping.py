"""Clip the update's norm."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from flwr_leakage.defenses.base import Defense, LocalRound, check_update
from flwr_leakage.defenses.units import ClipUnit, check_unit, update_units
from flwr_leakage.params import Params, ravel, scale
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update


def clip_update(delta: Mapping[str, Tensor], max_norm: float) -> Params:
    """Return ``Δ · min(1, max_norm / ‖Δ‖₂)`` (McMahan et al. 2018, algorithm 1).

    Example:
        >>> clip_update({"w": torch.tensor([3.0, 4.0])}, 1.0)
        {'w': tensor([0.6000, 0.8000])}
    """
    norm = float(ravel(delta).double().norm())
    return scale(delta, min(1.0, max_norm / norm) if norm > 0 else 1.0)


@dataclass(frozen=True)
class Clipping(Defense):
    """Clip the L2 norm of the whole update; see :func:`clip_update`.

    Attributes:
        max_norm: the largest norm, > 0; ``inf`` clips nothing.
        relative_to: ``gradient`` (``max_norm`` is that of the pseudo-gradient
            ``−Δ / learning_rate``) or ``update`` (that of Δ).
    """

    max_norm: float = 1.0
    relative_to: ClipUnit = "update"

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {self.max_norm}.")
        check_unit(self.relative_to, ClipUnit)

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense."""
        return "an update above a set length is shortened to it"

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Clip ``update.delta``."""
        check_update(update)
        limit = update_units(self.max_norm, update, self.relative_to)
        return replace(update, delta=clip_update(update.delta, limit))
