"""Define the interface of defenses, which change the samples to train on, the update, or both."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
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
        private: the client's samples before ``on_batch`` changed them, or the first ones of many.
        defended: the same samples as ``on_batch`` changed them.
        num_examples: the number of the client's samples; by default as many as in ``private``.
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
        """Return the samples that the client trained on, each with its own gradient and weight.

        Args:
            schedule: the local training, which determines each sample's weight in the update.
        """
        weights = schedule.sample_weights(self.num_examples)[: len(self.defended)]
        return separate(self.gradient_map, self.params, self.buffers, self.defended, weights)


def check_update(update: Update) -> None:
    """Raise ``ValueError`` for an update without entries, or with a tensor that holds no floats."""
    _check_floating("update.delta", update.delta)


def _check_floating(what: str, values: Params) -> None:
    if sum(value.numel() for value in values.values()) == 0:
        raise ValueError(f"{what} must hold at least one entry, got none.")
    for name, value in values.items():
        if not value.is_floating_point():
            raise ValueError(f"{what}[{name!r}] must be floating point, got {value.dtype}.")


def require_local_round(defense: "Defense", local_round: LocalRound | None) -> LocalRound:
    """Return ``local_round``, the private data of the client's round, or raise a ``ValueError``
    that names ``defense``, which needs it, if it is ``None``.
    """
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
        takes_texts: whether the defense works for inputs that are token ids, which can be neither
            mixed nor differentiated.
        effect: the text of ``in_words``, for a defense whose text does not depend on its settings.
    """

    takes_texts: ClassVar[bool] = True
    effect: ClassVar[str] = ""

    @property
    def replaces_update(self) -> bool:
        """Return whether ``on_update`` computes a new update from the data, so that changes by
        earlier defenses of a chain are lost.
        """
        return False

    @property
    def carries(self) -> bool:
        """Return whether the client adds to later updates the part that the defense left out."""
        return False

    @property
    def changes_updates(self) -> bool:
        """Return whether ``on_update`` changes updates."""
        return type(self).on_update is not Defense.on_update

    @property
    def encodes_batches(self) -> bool:
        """Return whether ``on_batch`` changes the samples; the training loop must then call it."""
        return type(self).on_batch is not Defense.on_batch

    @property
    def flips_signs(self) -> bool:
        """Return whether ``on_batch`` draws a random sign for each entry of the mixed samples."""
        return False

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, which the report puts into its sentences:
        "Pruning, by which only the largest 1 % of the update’s numbers are sent, hides it from this
        attack". By default it only gives the class's name.
        """
        return self.effect or f"the defense {type(self).__name__} is applied"

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Check, before training, that the defense can work on this model and this data.

        Args:
            gradient_map: the gradient map of the client's model and loss.
            spec: the public facts about the inputs.
            num_examples: the smallest number of samples that ``on_batch`` will be given at once.

        Raises:
            ValueError: the defense cannot work with them; the message says why.
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
        """Return ε of the differential privacy of one sample; ``None`` if none is guaranteed, and
        infinite if no finite ε holds.

        Args:
            schedule: the local training.
            num_examples: the number of the client's samples in a round.
            num_rounds: the number of rounds in which the sample takes part.
            adjacency: ``replace-one`` if data sets with this sample and with another in its place
                must look alike; ``add-or-remove`` for data sets with and without it.
        """
        return None

    def on_batch(self, batch: Batch, num_classes: int, randomness: Randomness) -> Batch:
        """Return the samples that the client trains on in place of its private ones.

        Args:
            batch: the private samples, of a mini-batch or of a whole epoch.
            num_classes: the number of classes.
            randomness: the source of random draws.
        """
        return batch

    def mixing_matrix(
        self, num_samples: int, randomness: Randomness
    ) -> Float[Tensor, "B n"] | None:
        """Return the matrix W (B, n) by which ``on_batch`` mixes n samples into B encodings.

        The encodings are W · samples; ``None`` stands for no mixing. With the same seed, the draws
        are those of ``on_batch``, so that a threat model may grant W to an attacker.

        Args:
            num_samples: the number n of samples that are encoded at once.
            randomness: the source of random draws, in the state in which ``on_batch`` gets it.
        """
        return None

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Return the update that the client sends in place of the given one.

        Args:
            update: the update as local training gave it.
            randomness: the source of random draws.
            local_round: the private data of the round, for defenses that need them.
        """
        return update


class UpdateDefense(Defense, ABC):
    """A base class of defenses whose result depends on the update and random draws alone."""

    @abstractmethod
    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the tensors, by name, that are sent in place of ``update.delta``.

        They have the same names, shapes and dtypes.
        """

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Return the update with its ``delta`` as the defense releases it."""
        check_update(update)
        return replace(update, delta=self.released(update, randomness))
