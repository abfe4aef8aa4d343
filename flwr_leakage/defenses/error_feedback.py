"""Add the part of an update that a defense left out to the client's next update."""

from dataclasses import dataclass, replace

from flwr_leakage.defenses.accounting import Adjacency
from flwr_leakage.defenses.base import Defense, LocalRound
from flwr_leakage.defenses.chain import Chain
from flwr_leakage.params import Params, add, subtract
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import LocalSchedule, Update


@dataclass(frozen=True)
class ErrorFeedback(Chain):
    """Apply ``defenses`` in order to the update plus the remainder of earlier rounds.

    It has no state, see ``with_error_feedback``: by itself it defends a client's first round. Where
    the client's gate keeps an update back, nothing of it is carried on.

    Attributes:
        defenses: at least one, such as ``GradientPruning``; none may recompute the update from the
            data, as it would drop what is carried.
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
        """Return true: the client carries on what is left out."""
        return True

    def in_words(self) -> str:
        """Return a clause that describes the defenses, and says that the rest is sent later."""
        return f"{super().in_words()}; what is left out is added to the client’s next update"

    def epsilon(
        self,
        schedule: LocalSchedule,
        num_examples: int,
        num_rounds: int,
        adjacency: Adjacency = "replace-one",
    ) -> None:
        """Return ``None``: noise in the remainder comes back with the opposite sign."""
        return


def with_error_feedback(
    defense: Defense,
    update: Update,
    carried: Params | None,
    randomness: Randomness,
    local_round: LocalRound | None = None,
) -> tuple[Update, Params]:
    """Defend an update plus the remainder of earlier rounds, and return the new remainder.

    With C the defense, round t releases ``C(Δ_t + e_t)`` and carries ``e_{t+1} = Δ_t + e_t −
    C(Δ_t + e_t)`` on (Stich et al. 2018, algorithm 1; Aji and Heafield 2017 keep the largest 1 %).

    The residual e is private data of the client and never part of what is released. The caller
    keeps it from round to round, as a defense has no state. ``ClientAudit`` and ``audit`` do so in
    the client's own state, for a defense that ``carries``.

    Args:
        defense: the compressor, such as ``GradientPruning``.
        update: the update of this round.
        carried: e_t, or ``None`` in a client's first round.
        randomness: the source of draws, as for ``defense.on_update``.
        local_round: the local round, as for ``defense.on_update``.

    Returns:
        The released update, and e_{t+1}.

    Raises:
        ValueError: ``carried`` has other entries than the update.
    """
    whole = update.delta if carried is None else add(update.delta, carried)
    released = defense.on_update(replace(update, delta=whole), randomness, local_round)
    return released, subtract(whole, released.delta)
