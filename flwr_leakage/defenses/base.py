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
        private: the client's samples before ``on_batch`` changed them; if there are many, only the
            first ones.
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
        """Return the samples that the client trained on, with their own gradients and weights in
        the update.

        Args:
            schedule: the local training, which determines each sample's weight in the update.
        """
        weights = schedule.sample_weights(self.num_examples)[: len(self.defended)]
        return separate(self.gradient_map, self.params, self.buffers, self.defended, weights)


def check_update(update: Update) -> None:
    """Raise ``ValueError`` if an update has no entries, or if one of its tensors has no floats."""
    _check_floating("update.delta", update.delta)


def _check_floating(what: str, values: Params) -> None:
    if sum(value.numel() for value in values.values()) == 0:
        raise ValueError(f"{what} must hold at least one entry, got none.")
    for name, value in values.items():
        if not value.is_floating_point():
            raise ValueError(f"{what}[{name!r}] must be floating point, got {value.dtype}.")


def require_local_round(defense: "Defense", local_round: LocalRound | None) -> LocalRound:
    """Return ``local_round``, the private data of the client's round. If it is ``None``, raise a
    ``ValueError`` that says that ``defense`` needs it.
    """
    if local_round is None:
        raise ValueError(
            f"{type(defense).__name__} needs local_round, the client's private view of its round, "
            "got None."
        )
    return local_round


class Defense:
    """The base class of all defenses, whose own methods change nothing.

    A defense overrides ``on_batch``, ``on_update`` or both. It is frozen and holds only its
    settings. All random draws come from an argument of its methods.

    Attributes:
        takes_texts: whether the defense works if inputs are token ids. They can be neither mixed
            nor differentiated.
        effect: the result of ``in_words``, for a defense whose clause does not depend on its
            settings.
    """

    takes_texts: ClassVar[bool] = True
    effect: ClassVar[str] = ""

    @property
    def replaces_update(self) -> bool:
        """Return whether ``on_update`` computes a new update from the samples. Changes that earlier
        defenses of a chain made to the update are then lost.
        """
        return False

    @property
    def carries(self) -> bool:
        """Return whether the client adds the part that the defense left out of an update to its
        next one.
        """
        return False

    @property
    def changes_updates(self) -> bool:
        """Return whether the defense overrides ``on_update``, and so changes updates."""
        return type(self).on_update is not Defense.on_update

    @property
    def encodes_batches(self) -> bool:
        """Return whether ``on_batch`` changes the samples. If so, the training loop must call
        ``on_batch``.
        """
        return type(self).on_batch is not Defense.on_batch

    @property
    def flips_signs(self) -> bool:
        """Return whether ``on_batch`` draws a random sign for each entry of the mixed samples."""
        return False

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, which the report puts into its sentences:
        "Pruning, by which only the largest 1 % of the update’s numbers are sent, hid them from this
        attack". The default is a clause with the class's name.
        """
        return self.effect or f"the defense {type(self).__name__} is applied"

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Check, before training, that the defense can work on this model and this data.

        Args:
            gradient_map: the gradient map of the client's model and loss.
            spec: the public facts about the inputs.
            num_examples: the smallest number of samples that ``on_batch`` will be given at once.

        Raises:
            ValueError: the defense cannot work with this model or data; the message says why.
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
        """Return the ε of the defense's differential privacy for one sample. It is ``None`` if the
        defense guarantees none, and infinite if no finite ε holds.

        Args:
            schedule: the local training.
            num_examples: the number of the client's samples in a round.
            num_rounds: the number of rounds in which the sample takes part.
            adjacency: ``replace-one`` compares the data set with one that has another sample in
                this one's place; ``add-or-remove`` compares it with one without the sample.
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

        The encodings are W · samples. ``None`` is returned if the defense mixes nothing. From the
        same state of ``randomness``, the draws are those of ``on_batch``. So W can be given to an
        attacker whom the threat model grants the mixing.

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

        Names, shapes and dtypes are those of ``update.delta``.
        """

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Return the update with ``delta`` replaced by the tensors of :meth:`released`."""
        check_update(update)
        return replace(update, delta=self.released(update, randomness))
