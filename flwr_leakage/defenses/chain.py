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


@dataclass(frozen=True)
class Chain(Defense):
    """A defense that applies several defenses in order, to batches and to the update.

    Attributes:
        defenses: the defenses, at least one. A defense that recomputes the update from the data
            (``replaces_update``) must come before those that change the update.
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
            if defense.replaces_update and any(d.changes_updates for d in self.defenses[:index]):
                raise ValueError(
                    f"{type(defense).__name__} recomputes the update and would undo the defenses "
                    f"before it: it must come first, got position {index}."
                )

    @property
    def replaces_update(self) -> bool:
        """Return whether a defense of the chain computes a new update from the data."""
        return any(defense.replaces_update for defense in self.defenses)

    @property
    def changes_updates(self) -> bool:
        """Return whether a defense of the chain changes updates."""
        return any(defense.changes_updates for defense in self.defenses)

    @property
    def encodes_batches(self) -> bool:
        """Return whether a defense of the chain changes the samples that the client trains on."""
        return any(defense.encodes_batches for defense in self.defenses)

    @property
    def flips_signs(self) -> bool:
        """Return whether a defense of the chain draws random signs for mixed samples' entries."""
        return any(defense.flips_signs for defense in self.defenses)

    def in_words(self) -> str:
        """Return a clause on the effect of each defense, for the sentences of the report."""
        return "; then ".join(defense.in_words() for defense in self.defenses)

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Raise ``ValueError`` if one of the defenses cannot work on this model and this data."""
        for defense in self.defenses:
            defense.validate(gradient_map, spec, num_examples)

    def epsilon(
        self,
        schedule: LocalSchedule,
        num_examples: int,
        num_rounds: int,
        adjacency: Adjacency = "replace-one",
    ) -> float | None:
        """Return ε of the first defense of the chain that has a guarantee of differential privacy.

        The result is ``None`` if no defense has a guarantee. It is also ``None`` if a defense of
        the chain encodes batches, as one sample may then enter several gradients.
        """
        if self.encodes_batches:
            return None
        known = (d.epsilon(schedule, num_examples, num_rounds, adjacency) for d in self.defenses)
        return next((epsilon for epsilon in known if epsilon is not None), None)

    def on_batch(self, batch: Batch, num_classes: int, randomness: Randomness) -> Batch:
        """Return the samples after the ``on_batch`` of each defense in order."""
        for defense in self.defenses:
            batch = defense.on_batch(batch, num_classes, randomness)
        return batch

    def mixing_matrix(
        self, num_samples: int, randomness: Randomness
    ) -> Float[Tensor, "B n"] | None:
        """Return the matrix W (B, n) by which the chain's only encoding defense mixes n samples.

        The result is ``None`` if no defense of the chain mixes samples.

        Raises:
            ValueError: several defenses of the chain encode batches.
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
        """Return the update after the ``on_update`` of each defense in order."""
        for defense in self.defenses:
            update = defense.on_update(update, randomness, local_round)
        return update
