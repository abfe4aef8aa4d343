"""Define the interface of defenses, which change the samples to train on, the update, or both."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from flwr_leakage.defenses.accounting import Adjacency
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.per_sample import Samples, separate
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Update


@dataclass(frozen=True)
class LocalRound:
    """The private data of a client's round that its defense may use.

    Attributes:
        gradient_map: the gradient map of the client's model and loss.
        params: θ_t, the parameters that the server sent.
        buffers: the buffers that the server sent.
        private: the client's samples of the round before ``on_batch``; a client of many samples
            may keep the first ones only.
        defended: the same samples after ``on_batch``.
        num_examples: how many samples the client has in the round; by default as many as
            ``private`` holds.
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

    def samples(self, schedule: LocalSchedule) -> Samples:
        """Return the samples as the client trained on them, each on its own.

        Args:
            schedule: the local training, which gives each sample its weight in the update.
        """
        weights = schedule.sample_weights(self.num_examples)[: len(self.defended)]
        return separate(self.gradient_map, self.params, self.buffers, self.defended, weights)


def check_update(update: Update) -> None:
    """Raise ``ValueError`` for an update without entries or with one that is not floating point."""
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
    """The base of all defenses. As it stands it changes nothing.

    A defense overrides ``on_batch``, ``on_update`` or both. It holds its settings only and is
    frozen: all of its draws come from the randomness that it is given.

    Attributes:
        takes_texts: whether it works for inputs that are token ids, which can be neither mixed nor
            differentiated.
    """

    takes_texts: ClassVar[bool] = True

    @property
    def replaces_update(self) -> bool:
        """Return whether ``on_update`` recomputes the update from the data.

        It then discards the changes that earlier defenses of a chain made to the update.
        """
        return False

    @property
    def carries(self) -> bool:
        """Return whether a client adds to each update what earlier ones left out."""
        return False

    @property
    def encodes_batches(self) -> bool:
        """Return whether the training loop must pass its samples through ``on_batch``."""
        return type(self).on_batch is not Defense.on_batch

    @property
    def flips_signs(self) -> bool:
        """Return whether ``on_batch`` draws the sign of each entry anew after mixing."""
        return False

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense on an update or a batch.

        The report puts it into its own sentences: "Pruning, by which only the largest 1 % of the
        update’s numbers are sent, hides it from this attack". A defense that does not override it
        is called by its name.
        """
        return f"the defense {type(self).__name__} is applied"

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Check, before training, that the defense can work on this model and this data.

        Args:
            gradient_map: the gradient map of the client's model and loss.
            spec: the public facts about the inputs.
            num_examples: the least number of samples that ``on_batch`` will get at once.

        Raises:
            ValueError: the defense cannot work there; the message says why.
        """
        _check_floating("the model's parameters", gradient_map.params)
        if spec.is_text and not self.takes_texts:
            raise ValueError(
                f"{type(self).__name__} mixes or differentiates continuous inputs, and these are "
                f"token ids: take a defense of updates, such as noise, pruning, clipping or DP-SGD."
            )

    def epsilon(
        self,
        schedule: LocalSchedule,
        num_examples: int,
        num_rounds: int,
        adjacency: Adjacency = "replace-one",
    ) -> float | None:
        """Return ε of the differential privacy of a single sample; ``None`` if none is guaranteed.

        It is infinite where it is known that no finite ε holds.

        Args:
            schedule: the local training.
            num_examples: the client's samples in a round.
            num_rounds: rounds in which the sample takes part.
            adjacency: what is compared: ``replace-one``, the sample with another in its place, or
                ``add-or-remove``, the sample with none.
        """
        return None

    def on_batch(self, batch: Batch, num_classes: int, randomness: Randomness) -> Batch:
        """Change the samples that the client trains on: a mini-batch, or a whole epoch at once."""
        return batch

    def mixing_matrix(
        self, num_samples: int, randomness: Randomness
    ) -> Float[Tensor, "B n"] | None:
        """Return W (B, n) of encodings W · samples as ``on_batch`` draws it, ``None`` without
        mixing.

        A threat model may grant it to an attacker who decodes: fresh draws of the same seed give
        the mixing that ``on_batch`` used.

        Args:
            num_samples: the number n of samples that are encoded at once.
            randomness: the source of draws as ``on_batch`` got it, before any draw.
        """
        return None

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Change the update before the client sends it."""
        return update
