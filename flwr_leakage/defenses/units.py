"""Convert a defense's strength from the unit in which it is given to the unit of the update.

A client sends ``Δ = θ_local − θ_t``. Papers state noise and clipping in units of the gradient g.
After one plain SGD step it is ``g = −Δ / learning_rate``.
"""

import math
from typing import Literal

from flwr_leakage.params import ravel
from flwr_leakage.records import Update

NoiseUnit = Literal["gradient", "update", "norm"]
ClipUnit = Literal["gradient", "update"]


def update_units(strength: float, update: Update, relative_to: NoiseUnit) -> float:
    """Return a standard deviation, or a norm, in the units of the update Δ (``update.delta``).

    Args:
        strength: a standard deviation, or a norm; a norm excludes the unit ``norm``.
        update: the update that is defended.
        relative_to: the unit of ``strength``: ``gradient`` for that of the pseudo-gradient ``−Δ /
            learning_rate``; ``update`` for that of Δ; ``norm`` for ``‖Δ‖ / √P``, with P the number
            of entries, so that noise of strength 1 is expected to be as long as the update.
    """
    if relative_to == "gradient":
        return strength * update.schedule.learning_rate
    if relative_to == "norm":
        flat = ravel(update.delta)
        return strength * float(flat.double().norm()) / math.sqrt(flat.numel())
    return strength
