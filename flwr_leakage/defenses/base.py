"""What every defense is: a transform of batches, of updates, or of both."""

from dataclasses import dataclass
from typing import ClassVar

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Update


@dataclass(frozen=True)
class LocalRound:
    """What a client's defense may look at while it defends one update.

    Attributes:
        gradient_map: of the client's model and loss.
        params: θ_t, the parameters received.
        buffers: the buffers received.
        private: the private samples of the round, or the first of them.
        defended: the same as encoded by ``on_batch``.
        num_examples: the samples of the round; as many as are here by default.
    """

    gradient_map: GradientMap
    params: Params
    buffers: Params
    private: Batch
    defended: Batch
    num_examples: int = -1

    def __post_init__(self) -> None:
        if self.num_examples < 0:
            object.__setattr__(self, "num_examples", len(self.private))


def check_update(update: Update) -> None:
    """Raise ``ValueError`` for an update that no defense can work on: empty, or of integers."""
    _check_floating("update.delta", update.delta)


def _check_floating(what: str, values: Params) -> None:
    if sum(value.numel() for value in values.values()) == 0:
        raise ValueError(f"{what} must hold at least one entry, got none.")
    for name, value in values.items():
        if not value.is_floating_point():
            raise ValueError(f"{what}[{name!r}] must be floating point, got {value.dtype}.")


def require_local_round(defense: "Defense", local_round: LocalRound | None) -> LocalRound:
    """Return ``local_round``, or raise ``ValueError`` where it is missing."""
    if local_round is None:
        raise ValueError(
            f"{type(defense).__name__} needs local_round, the client's private view of its round, "
            "got None."
        )
    return local_round


class Defense:
    """The identity, and the base of all defenses: override what the defense does.

    A defense is frozen: all of its draws come from the randomness that it is given.

    Attributes:
        replaces_update: whether ``on_update`` recomputes the update from the data, and so drops
            what earlier defenses of a chain did to it.
    """

    replaces_update: ClassVar[bool] = False

    @property
    def encodes_batches(self) -> bool:
        """Whether the training loop must pass its samples through ``on_batch``."""
        return type(self).on_batch is not Defense.on_batch

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Check, before training, that the defense can work on this model and this data.

        Args:
            gradient_map: of the client's model and loss.
            spec: of the inputs.
            num_examples: samples that ``on_batch`` is to encode at once, at least.

        Raises:
            ValueError: it cannot.
        """
        _check_floating("the model's parameters", gradient_map.params)

    def epsilon(self, schedule: LocalSchedule, num_examples: int, num_rounds: int) -> float | None:
        """ε of the differential privacy of a single sample, or ``None``: no guarantee is known.

        Args:
            schedule: the local training.
            num_examples: the client's samples in a round.
            num_rounds: rounds in which the sample takes part.
        """
        return None

    def on_batch(self, batch: Batch, num_classes: int, randomness: Randomness) -> Batch:
        """Encode a mini-batch before a training step, or an epoch before its steps."""
        return batch

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Defend the update before it is released."""
        return update
