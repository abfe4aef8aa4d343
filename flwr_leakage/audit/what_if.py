"""Compute updates as another defense would have released them, which only a simulation can know."""

from collections.abc import Callable
from dataclasses import dataclass

from flwr_leakage.audit.truth import Truth
from flwr_leakage.params import Params, norm, subtract
from flwr_leakage.records import Observation, Update


@dataclass(frozen=True)
class WhatIf:
    """One update as another defense would have released it. No training ever uses it.

    Attributes:
        update: the update that the client would have sent.
        truth: the private samples, and the samples as this defense would have encoded them.
        relative_change: ‖released − raw‖₂ / ‖raw‖₂ of the update, where raw is the undefended
            update: a measure of how much the defense disturbs training.
    """

    update: Update
    truth: Truth
    relative_change: float


WhatIfSource = Callable[[Observation], WhatIf]
"""A function that takes an observed update and returns the update that another defense would have
released. It raises ``ValueError`` if nobody can know that update.
"""


def relative_change(raw: Params, released: Params) -> float:
    """Return ‖released − raw‖₂ / ‖raw‖₂ over all parameters; 0 for an update of zeros.

    Args:
        raw: the undefended update, by parameter.
        released: the update after a defense, by parameter.

    Example:
        >>> relative_change({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 0.0])})
        0.8
    """
    whole = norm(raw.values())
    return norm(subtract(released, raw).values()) / whole if whole else 0.0
