"""Add the part that a defense left out of a client's update to the client's next update."""

from dataclasses import dataclass, replace

from flwr_leakage.defenses.accounting import Adjacency
from flwr_leakage.defenses.base import Defense, LocalRound
from flwr_leakage.defenses.chain import Chain
from flwr_leakage.params import Params, add, subtract
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import LocalSchedule, Update


@dataclass(frozen=True)
class ErrorFeedback(Chain):
    """A defense that applies other defenses to the sum of the update and a remainder of earlier
    rounds.

    The remainder is the part of earlier updates that the other defenses left out. The client stores
    it and passes it to ``with_error_feedback``. This object's own ``on_update`` has no remainder,
    and defends every update as that of a first round. An update that the client withholds leaves no
    remainder.

    Attributes:
        defenses: the other defenses in order, at least one, such as ``GradientPruning``. None may
            recompute the update from the samples, as the remainder would then be lost.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replaces_update:
            raise ValueError(
                "error feedback must be of defenses that change the update, got one that "
                "recomputes it from the data."
            )

    @property
    def carries(self) -> bool:
        """Return true: the client adds the part that was left out of an update to the next one."""
        return True

    def in_words(self) -> str:
        """Return a clause on the effect of the other defenses, which also says that the remainder
        is sent later.
        """
        return f"{super().in_words()}; what is left out is added to the client’s next update"

    def epsilon(
        self,
        schedule: LocalSchedule,
        num_examples: int,
        num_rounds: int,
        adjacency: Adjacency = "replace-one",
    ) -> None:
        """Return ``None``: no guarantee of differential privacy holds over several rounds, as the
        remainder contains the negative of the noise, which later rounds add again.
        """
        return


def with_error_feedback(
    defense: Defense,
    update: Update,
    carried: Params | None,
    randomness: Randomness,
    local_round: LocalRound | None = None,
) -> tuple[Update, Params]:
    """Return the defended sum of an update and earlier rounds' remainder, and the new remainder.

    With the defense C, the update Δ_t and the remainder e_t, round t releases ``C(Δ_t + e_t)`` and
    keeps ``e_{t+1} = Δ_t + e_t − C(Δ_t + e_t)`` for the next round (Stich et al. 2018, algorithm 1;
    Aji and Heafield 2017 send the largest 1 %).

    The caller keeps the remainder from round to round. It is private, and must never be released.

    Args:
        defense: the defense C, such as ``GradientPruning``.
        update: the update of this round.
        carried: the remainder e_t, or ``None`` in a client's first round.
        randomness: the source of draws, as for ``defense.on_update``.
        local_round: the local round, as for ``defense.on_update``.

    Raises:
        ValueError: ``carried`` has other entries than the update.
    """
    whole = update.delta if carried is None else add(update.delta, carried)
    released = defense.on_update(replace(update, delta=whole), randomness, local_round)
    return released, subtract(whole, released.delta)
