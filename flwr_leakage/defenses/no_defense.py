"""Change nothing: the baseline that defended runs are compared with."""

from dataclasses import dataclass

from flwr_leakage.defenses.base import Defense


@dataclass(frozen=True)
class NoDefense(Defense):
    """Release the update as it is."""

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense."""
        return "the update is sent as it is"
