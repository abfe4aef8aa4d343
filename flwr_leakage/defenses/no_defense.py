"""Change nothing, as the baseline with which defended runs are compared."""

from dataclasses import dataclass
from typing import ClassVar

from flwr_leakage.defenses.base import Defense


@dataclass(frozen=True)
class NoDefense(Defense):
    """The absence of a defense: the update is sent as it is."""

    effect: ClassVar[str] = "the update is sent as it is"
