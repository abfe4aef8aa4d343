"""Change nothing: the baseline that defended runs are compared with."""

from dataclasses import dataclass

from flwr_leakage.defenses.base import Defense


@dataclass(frozen=True)
class NoDefense(Defense):
    """The absence of a defense: the update is sent as it is."""

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, for the sentences of the report."""
        return "the update is sent as it is"
