"""Send the update without the running statistics of BatchNorm."""

from dataclasses import dataclass, replace
from typing import ClassVar

from flwr_leakage.defenses.base import Defense, LocalRound, check_update
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update


@dataclass(frozen=True)
class WithholdBuffers(Defense):
    """A defense that sends no buffers, as FedBN does (Li et al. 2021).

    From BatchNorm's running statistics before and after local training, a server can compute the
    batch's own statistics, which the strongest attacks of Huang et al. (2021, section 3) need.
    """

    effect: ClassVar[str] = "the running statistics of batch normalisation are not sent"

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Return the update without its ``buffers``."""
        check_update(update)
        return replace(update, buffers={})
