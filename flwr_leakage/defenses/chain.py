"""Apply several defenses one after another."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from flwr_leakage.defenses.accounting import Adjacency
from flwr_leakage.defenses.base import Defense, LocalRound
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Update


def _transforms_update(defense: Defense) -> bool:
    if isinstance(defense, Chain):
        return any(_transforms_update(inner) for inner in defense.defenses)
    return type(defense).on_update is not Defense.on_update


@dataclass(frozen=True)
class Chain(Defense):
    """Apply ``defenses`` in order, to batches and to the update.

    Attributes:
        defenses: at least one; one that recomputes the update from the data
            (``replaces_update``) must come before those that change it.
    """

    defenses: Sequence[Defense]

    def __post_init__(self) -> None:
        object.__setattr__(self, "defenses", tuple(self.defenses))
        if not self.defenses:
            raise ValueError("defenses must hold at least one defense, got none.")
        for index, defense in enumerate(self.defenses):
            if not isinstance(defense, Defense):
                raise ValueError(f"defenses[{index}] must be a Defense, got {defense!r}.")
            if defense.carries:
                raise ValueError("error feedback goes around a whole chain, got it within one.")
            if defense.replaces_update and any(map(_transforms_update, self.defenses[:index])):
                raise ValueError(
                    f"{type(defense).__name__} recomputes the update and would undo the defenses "
                    f"before it: it must come first, got position {index}."
                )

    @property
    def replaces_update(self) -> bool:
        """Return whether a defense of the chain recomputes the update."""
        return any(defense.replaces_update for defense in self.defenses)

    @property
    def encodes_batches(self) -> bool:
        """Return whether a defense of the chain encodes batches."""
        return any(defense.encodes_batches for defense in self.defenses)

    @property
    def flips_signs(self) -> bool:
        """Return whether a defense of the chain draws signs anew."""
        return any(defense.flips_signs for defense in self.defenses)

    def in_words(self) -> str:
        """Return a clause that describes each defense, in order."""
        return "; then ".join(defense.in_words() for defense in self.defenses)

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Validate each defense."""
        for defense in self.defenses:
            defense.validate(gradient_map, spec, num_examples)

    def epsilon(
        self,
        schedule: LocalSchedule,
        num_examples: int,
        num_rounds: int,
        adjacency: Adjacency = "replace-one",
    ) -> float | None:
        """Return ε of the first defense of the chain that has a guarantee.

        ``None`` if a defense encodes batches: a sample may be mixed into several others there,
        and the guarantee is for one sample that enters one gradient.
        """
        if self.encodes_batches:
            return None
        known = (d.epsilon(schedule, num_examples, num_rounds, adjacency) for d in self.defenses)
        return next((epsilon for epsilon in known if epsilon is not None), None)

    def on_batch(self, batch: Batch, num_classes: int, randomness: Randomness) -> Batch:
        """Encode by each defense in order."""
        for defense in self.defenses:
            batch = defense.on_batch(batch, num_classes, randomness)
        return batch

    def mixing_matrix(
        self, num_samples: int, randomness: Randomness
    ) -> Float[Tensor, "B n"] | None:
        """Return W of the chain's only mixing defense, where it is the first that encodes.

        Raises:
            ValueError: it is not, so that its draws do not come first.
        """
        encoding = [defense for defense in self.defenses if defense.encodes_batches]
        found = [defense.mixing_matrix(num_samples, randomness) for defense in encoding[:1]]
        if len(encoding) > 1:
            raise ValueError(
                f"one defense of a chain may mix samples, got {len(encoding)} that encode batches."
            )
        return found[0] if found else None

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Defend by each defense in order."""
        for defense in self.defenses:
            update = defense.on_update(update, randomness, local_round)
        return update
