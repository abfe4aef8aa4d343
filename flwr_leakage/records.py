"""Define the records that the parts of an audit exchange; all are frozen dataclasses.

An attack is given ``Observation``, ``InputSpec`` and ``ThreatModel`` alone. No field of these three
holds the truth, except what the threat model grants by name, in ``Disclosure``. ``Exposure``, which
holds the private samples, exists on the client only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flwr_leakage.measurements import (
    NUMBERS,
    Direction,
    LeakageRecord,
    Measurement,
    RecordKind,
    RunEvent,
    State,
)
from flwr_leakage.params import Params
from flwr_leakage.values import brief, is_count, is_finite

__all__ = [
    "NUMBERS", "Batch", "BatchNormKnowledge", "Direction", "Disclosure", "Exposure", "InputSpec",
    "LeakageRecord", "LocalSchedule", "Measurement", "Observation", "Part", "PartOutcome",
    "Reconstruction", "RecordKind", "RunEvent", "State", "ThreatModel", "Update",
]  # fmt: skip

BatchNormKnowledge = Literal["none", "final", "running", "derived", "exact"]


class _Shapes:
    """A base class of records whose ``repr`` shows the shapes of tensors, not their entries."""

    def __repr__(self) -> str:
        told = (f"{each.name}={_shape(getattr(self, each.name))}" for each in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(told)})"


@dataclass(frozen=True, repr=False)
class Batch(_Shapes):
    """The inputs and targets of B samples.

    Attributes:
        inputs: (B, C, H, W) in the model's input space, that is, after normalisation; or (B, T)
            int64 token ids, where texts of fewer than T tokens are filled up with the padding's id.
        targets: (B,) int64 class indices, or (B, K) class probabilities (soft labels); for a model
            of the next token (B, T), the token ids themselves.
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if self.inputs.shape[:1] != self.targets.shape[:1]:
            raise ValueError(
                f"inputs and targets must hold the same number of samples, got "
                f"{tuple(self.inputs.shape)} and {tuple(self.targets.shape)}."
            )

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def __getitem__(self, index: slice | Tensor | list[int]) -> "Batch":
        return Batch(self.inputs[index], self.targets[index])

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on another device."""
        return Batch(self.inputs.to(device), self.targets.to(device))

    @staticmethod
    def concatenate(batches: Sequence["Batch"]) -> "Batch":
        """Return one batch with the samples of several batches in order; samples must have equal
        shapes.
        """
        return Batch(
            torch.cat([batch.inputs for batch in batches]),
            torch.cat([batch.targets for batch in batches]),
        )


@dataclass(frozen=True)
class InputSpec:
    """Public facts about the data: shapes, classes and the normalisation.

    A model input is ``(pixel − mean) / std`` with pixels in [0, 1]. Inputs that are no images, such
    as the rows of a standardised table or embeddings, lie in no box; see ``table``. Inputs that are
    token ids have a vocabulary and no normalisation; see ``text``.

    Attributes:
        shape: (C, H, W) of one input, or (T,) of a text of at most T tokens.
        num_classes: the number of classes K.
        mean: the mean of each channel, in pixel units; a single entry holds for every channel.
        std: the standard deviation of each channel, in pixel units, > 0; a single entry holds for
            every channel.
        box: whether the inputs are images of 8 bits, whose pixels are multiples of 1/255 in [0, 1].
            Otherwise no reconstruction is clamped, and a proof is about the network's inputs, not
            pixels.
        known: whether the normalisation is known. If not, an audit and ``flwr_leakage.attack`` try
            the given one first, then all public ones, and keep the one whose reconstruction fits
            the update best.
        vocabulary: the number V of token ids; 0 for inputs that are no text.
        padding: the id that fills up short texts, or ``None``. A model takes no notice of it: its
            attention mask is ``ids != padding``.
        next_token: whether the model maps a text to logits (T, V) of the next token at each
            position, instead of the logits (K,) of a class.

    Example:
        >>> InputSpec.table(30, 2).clamp(torch.full((1, 1, 30), 9.0)).max()
        tensor(9.)
    """

    shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    box: bool = True
    known: bool = True
    vocabulary: int = 0
    padding: int | None = None
    next_token: bool = False

    @classmethod
    def table(cls, num_features: int, num_classes: int) -> "InputSpec":
        """Return the spec of standardised rows or embeddings: no box, mean 0, standard deviation 1.

        An attack's prior treats the values as if they were pixels, with mean 0.5 and standard
        deviation about 0.25.

        Args:
            num_features: the number n of features; an input has the shape (1, 1, n).
            num_classes: the number K of classes.
        """
        return cls((1, 1, num_features), num_classes, (0.5,), (0.25,), box=False)

    @classmethod
    def text(
        cls,
        vocabulary: int,
        length: int,
        num_classes: int | None = None,
        padding: int | None = None,
    ) -> "InputSpec":
        """Return the spec of texts: token ids (T,) in [0, V).

        Args:
            vocabulary: the number V of token ids.
            length: T, the largest number of tokens of a text.
            num_classes: the number of classes of a classifier; ``None`` for a model of the next
                token.
            padding: the id that fills up short texts; ``None`` if there is none.

        Example:
            >>> InputSpec.text(1000, 16, padding=0).blank(1, torch.zeros(()))[0, :4]
            tensor([1, 1, 1, 1])
        """
        next_token = num_classes is None
        classes = vocabulary if num_classes is None else num_classes
        return cls(
            (length,), classes, box=False, vocabulary=vocabulary, padding=padding,
            next_token=next_token,
        )  # fmt: skip

    @property
    def sample(self) -> str:
        """Return the noun for an input in messages: ``image``, ``text``, or a table's ``row``."""
        if self.is_text:
            return "text"
        return "row" if not self.box and self.shape[:2] == (1, 1) else "image"

    @property
    def is_text(self) -> bool:
        """Return whether inputs are token ids."""
        return self.vocabulary > 0

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of one input's logits: (K,), or (T, V) for a model of the next token."""
        classes = (self.num_classes,)
        return (*self.shape, *classes) if self.next_token else classes

    def blank(self, count: int, like: Tensor) -> Tensor:
        """Return inputs (count, …) without content: grey images, or texts of one token repeated.

        Args:
            count: the number of inputs.
            like: a tensor that gives the device of the result, and its dtype unless inputs are
                token ids.
        """
        if not self.is_text:
            return self.normalize(like.new_full((count, *self.shape), 0.5))
        token = 1 if self.padding == 0 else 0
        return torch.full((count, *self.shape), token, device=like.device)

    def __post_init__(self) -> None:
        if self.is_text or self.padding is not None or self.next_token:
            self._check_text()
            return
        size = self.shape
        if not isinstance(size, Sequence) or len(size) != 3 or not all(map(is_count, size)):
            raise ValueError(f"shape must be (C, H, W) of inputs, all positive, got {brief(size)}.")
        if not is_count(count := self.num_classes):
            raise ValueError(f"num_classes must be a positive integer, got {brief(count)}.")
        channels = self.shape[0]
        # A client may claim any number of channels, each of which takes memory for its mean.
        if channels > 2**20:
            raise ValueError(f"shape must have at most {2**20:,} channels, got {brief(size)}.")
        for name, kind in (("mean", "finite numbers"), ("std", "positive")):
            values = getattr(self, name)
            if not isinstance(values, Sequence) or not all(map(is_finite, values)):
                raise ValueError(f"{name} must be {kind}, got {brief(values)}.")
            if len(values) not in (1, channels):
                raise ValueError(
                    f"mean and std must have one entry for each of {channels} channels, got "
                    f"{brief(self.mean)} and {brief(self.std)}."
                )
            if len(values) == 1:
                object.__setattr__(self, name, tuple(values) * channels)
        if not all(std > 0 for std in self.std):
            raise ValueError(f"std must be positive, got {brief(self.std)}.")
        for name in ("box", "known"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {brief(value)}.")

    def _check_text(self) -> None:
        """Raise ``ValueError`` unless the fields are valid for inputs that are token ids."""
        size = self.shape
        if not isinstance(size, Sequence) or len(size) != 1 or not all(map(is_count, size)):
            raise ValueError(f"shape must be (T,) of texts of up to T tokens, got {brief(size)}.")
        if not is_count(self.vocabulary) or self.vocabulary < 2:
            raise ValueError(f"vocabulary must be at least 2 ids, got {brief(self.vocabulary)}.")
        if not is_count(self.num_classes):
            raise ValueError(
                f"num_classes must be a positive integer, got {brief(self.num_classes)}."
            )
        if self.next_token and self.num_classes != self.vocabulary:
            raise ValueError(
                f"a model of the next token has one class for each of {self.vocabulary} ids, got "
                f"num_classes={self.num_classes}."
            )
        padding = self.padding
        if padding is not None and not (
            padding == 0 or (is_count(padding) and padding < self.vocabulary)
        ):
            raise ValueError(
                f"padding must be an id in [0, {self.vocabulary}) or None, got {brief(padding)}."
            )
        if (self.box, self.known, self.mean, self.std) != (False, True, (0.0,), (1.0,)):
            raise ValueError("token ids have no box and no normalisation; see InputSpec.text.")

    def _per_channel(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device).reshape(-1, 1, 1)

    def normalize(self, pixels: Tensor) -> Tensor:
        """Return the model inputs of pixels in [0, 1] of shape (..., C, H, W)."""
        return (pixels - self._per_channel(self.mean, pixels)) / self._per_channel(self.std, pixels)

    def denormalize(self, inputs: Tensor) -> Tensor:
        """Return the pixels of model inputs of shape (..., C, H, W); they are not clamped."""
        return inputs * self._per_channel(self.std, inputs) + self._per_channel(self.mean, inputs)

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest valid model inputs, each (C, H, W).

        They are −∞ and ∞ for inputs that are no images. Both have the dtype and device of ``like``.
        """
        zero = torch.zeros((), dtype=like.dtype, device=like.device).expand(self.shape)
        if not self.box:
            return zero - math.inf, zero + math.inf
        return self.normalize(zero), self.normalize(zero + 1)

    def clamp(self, inputs: Tensor) -> Tensor:
        """Return model inputs clamped to the range of pixels in [0, 1]; other inputs than images
        stay.
        """
        lower, upper = self.bounds(inputs)
        return torch.minimum(torch.maximum(inputs, lower), upper)


@dataclass(frozen=True)
class LocalSchedule:
    """The local training of one round: SGD over the client's samples in order, cyclically.

    Step t of an epoch uses samples ``t·batch_size … (t+1)·batch_size − 1``; the last
    mini-batch of an epoch may be smaller, as in a ``DataLoader`` without shuffling.

    Attributes:
        learning_rate: the learning rate of SGD, > 0.
        num_steps: the number of SGD steps in the round, ≥ 1.
        batch_size: the number of samples in a step, ≥ 1.
        momentum: heavy-ball momentum of ``torch.optim.SGD`` in [0, 1).
        weight_decay: L2 penalty of ``torch.optim.SGD``, ≥ 0.
    """

    learning_rate: float
    num_steps: int = 1
    batch_size: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (is_finite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be positive, got {brief(self.learning_rate)}.")
        for name in ("num_steps", "batch_size"):
            if not is_count(value := getattr(self, name)):
                raise ValueError(f"{name} must be an integer of at least 1, got {brief(value)}.")
        if not (is_finite(self.momentum) and 0 <= self.momentum < 1):
            raise ValueError(f"momentum must lie in [0, 1), got {brief(self.momentum)}.")
        if not (is_finite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay must be ≥ 0, got {brief(self.weight_decay)}.")

    def for_client(self, num_examples: int) -> "LocalSchedule":
        """Return this schedule itself, whatever the number of a client's samples is."""
        return self

    def describe(self, num_examples: int, sample: str = "image") -> str:
        """Return in words what a client does in a round: its samples, steps and learning rate.

        Args:
            num_examples: the number of the client's samples in the round.
            sample: the noun for one sample; see ``InputSpec.sample``.

        Example:
            >>> LocalSchedule(0.1, num_steps=2, batch_size=8).describe(10)
            '10 images, 2 steps of at most 8 images, learning rate 0.1'
        """
        samples = f"{num_examples:,} {sample}{'s' * (num_examples != 1)}"
        steps = f"{self.num_steps:,} step{'s' * (self.num_steps != 1)}"
        batch = min(self.batch_size, num_examples)
        extra = f", momentum {self.momentum:g}" if self.momentum else ""
        extra += f", weight decay {self.weight_decay:g}" if self.weight_decay else ""
        most = "at most " * bool(num_examples % batch)
        size = f"{most}{batch:,} {sample}{'s' * (batch != 1)}"
        return f"{samples}, {steps} of {size}, learning rate {self.learning_rate:g}{extra}"

    def slices(self, num_examples: int) -> list[slice]:
        """Return one slice per step, the indices of the samples that the step uses.

        Args:
            num_examples: the number of the client's samples in the round.

        Example:
            >>> LocalSchedule(0.1, num_steps=3, batch_size=2).slices(3)
            [slice(0, 2, None), slice(2, 3, None), slice(0, 2, None)]
        """
        if num_examples < 1:
            raise ValueError(f"num_examples must be at least 1, got {num_examples}.")
        # A range costs no memory, whatever number of samples a client claims.
        epoch = range(0, num_examples, self.batch_size)
        starts = [epoch[step % len(epoch)] for step in range(self.num_steps)]
        return [slice(start, min(start + self.batch_size, num_examples)) for start in starts]

    def num_samples_used(self, num_examples: int) -> int:
        """Return how many of ``num_examples`` samples the steps use; the others do not affect the
        update.
        """
        return min(num_examples, self.num_steps * self.batch_size)

    def sample_weights(self, num_examples: int) -> Tensor:
        """Return the factor wᵢ of each sample's gradient in the pseudo-gradient, (num_examples,) in
        float64.

        The pseudo-gradient is the update divided by minus the learning rate. The factors hold to
        first order in the learning rate, and exactly for one plain step. Step t of T, counted from
        0, contributes (1 − μᵀ⁻ᵗ)/(1 − μ) times the mean gradient of its mini-batch, with μ the
        momentum.

        Example:
            >>> LocalSchedule(0.1, num_steps=3, batch_size=2).sample_weights(3)
            tensor([1., 1., 1.], dtype=torch.float64)
        """
        weights = torch.zeros(num_examples, dtype=torch.float64)
        for step, window in enumerate(self.slices(num_examples)):
            factor = (1 - self.momentum ** (self.num_steps - step)) / (1 - self.momentum)
            weights[window] += factor / (window.stop - window.start)
        return weights


@dataclass(frozen=True, repr=False)
class Update(_Shapes):
    """The change of a model by a client's local training in one round.

    Attributes:
        delta: the change θ_local − θ_t of the parameters, keyed as the model's parameters.
        buffers: the local buffers after training (BatchNorm statistics), or empty.
        schedule: the steps, batch size and learning rate of the local training.
        num_examples: the number of samples that the client says it used.
        mixed: whether the client says that it trained on mixtures of its samples, as MixUp does.
    """

    delta: Params
    buffers: Params
    schedule: LocalSchedule
    num_examples: int
    mixed: bool = False

    def pseudo_gradient(self) -> Params:
        """Return ``−delta / learning_rate``: after one plain SGD step, the gradient itself."""
        return {name: -value / self.schedule.learning_rate for name, value in self.delta.items()}


@dataclass(frozen=True, repr=False)
class Exposure(_Shapes):
    """Everything about one client's training in one round, known to that client only.

    Attributes:
        params: θ_t, the parameters received from the server.
        buffers: the buffers received from the server.
        private: the private samples that the client trained on.
        defended: the samples as the defense encoded them, such as mixtures; ``private`` itself if
            no defense changes samples.
        raw: the update as training gave it, before the defense.
        released: the update that is sent. The defense's perturbation is δ = released − raw.
        part_of: the exposure of the whole round, if this one holds only some of its samples; see
            ``select``. ``None`` for the whole round itself.
        indices: for each sample of this exposure, its index among the samples of the whole round.
    """

    params: Params
    buffers: Params
    private: Batch
    defended: Batch
    raw: Update
    released: Update
    part_of: "Exposure | None" = None
    indices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.part_of is None:
            object.__setattr__(self, "indices", tuple(range(len(self.private))))
        if not len(self.private) == len(self.defended) == len(self.indices):
            raise ValueError(
                f"private, defended and indices must hold the same number of samples, got "
                f"{len(self.private)}, {len(self.defended)} and {len(self.indices)}."
            )

    @property
    def whole(self) -> "Exposure":
        """Return the exposure of the whole round, which is this one unless ``select`` made it."""
        return self if self.part_of is None else self.part_of

    def select(self, indices: Sequence[int]) -> "Exposure":
        """Return the exposure of the same round with only some of the samples.

        The updates ``raw`` and ``released``, the exposure ``whole``, and the weights of the kept
        samples in the update are those of this exposure.

        Args:
            indices: indices of samples of this exposure.

        Raises:
            ValueError: an index is not that of a sample of this exposure.
        """
        chosen = list(indices)
        if not all(0 <= index < len(self.indices) for index in chosen):
            raise ValueError(
                f"indices must lie in 0 … {len(self.indices) - 1}, got {tuple(chosen)}."
            )
        return Exposure(
            self.params,
            self.buffers,
            self.private[chosen],
            self.defended[chosen],
            self.raw,
            self.released,
            self.whole,
            tuple(self.indices[index] for index in chosen),
        )

    def sample_weights(self) -> Tensor:
        """Return the factor wᵢ of each of the S samples' gradients in the round's pseudo-gradient,
        (S,).

        The pseudo-gradient is the update before the defense, divided by minus the learning rate.
        """
        weights = self.raw.schedule.sample_weights(self.raw.num_examples)
        return weights[list(self.indices)]


@dataclass(frozen=True)
class ThreatModel:
    """The knowledge of the honest-but-curious server besides the update. Every result of an attack
    names it.

    Attributes:
        labels: ``known`` (given), or ``inferred`` from the update by the attack.
        batch_norm: the attacker's knowledge of the statistics that a client in train mode
            normalised with. ``exact``: the attacker is given those of the private batch, and uses
            them as a prior. ``derived``: those that follow from the running buffers that the client
            sent, used as a prior. ``running``: the attacker normalises with the buffers that the
            server sent. ``final``: the attacker normalises with the buffers of the finished model,
            the only ones that are released where statistics stay on the clients during training
            (BN_proxy of Huang et al. 2021, section 3.3). ``none``: the attacker has only the
            update. If the update holds the client's buffers after one step, second-order attacks
            compute the statistics from them; otherwise statistics are those of the samples that the
            attacker tries.
        view: ``single`` if the server sees each client's update; ``aggregate`` if it sees only the
            mean of several clients' updates.
        rounds: the number of a client's latest rounds that are attacked jointly, ≥ 1; for clients
            that hold the same private samples in each of them.
        mixing: ``known`` if the attacker is given which samples a defense mixed and with which
            coefficients, so that it can decode the mixtures recovered in all rounds so far. The
            labels must then be known.
    """

    labels: Literal["known", "inferred"] = "inferred"
    batch_norm: BatchNormKnowledge = "none"
    view: Literal["single", "aggregate"] = "single"
    rounds: int = 1
    mixing: Literal["unknown", "known"] = "unknown"

    def __post_init__(self) -> None:
        choices = {
            "mixing": ("unknown", "known"),
            "labels": ("known", "inferred"),
            "batch_norm": ("none", "final", "running", "derived", "exact"),
            "view": ("single", "aggregate"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}.")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}.")
        if self.mixing == "known" and (self.labels, self.view) != ("known", "single"):
            raise ValueError(
                "mixing='known' takes labels='known', which say which encoding is which, and "
                f"view='single', got labels={self.labels!r} and view={self.view!r}."
            )

    def describe(self) -> str:
        """Return the threat model in one line, for tables and records."""
        rounds = f", {self.rounds} rounds jointly" if self.rounds > 1 else ""
        rounds += ", mixing known" if self.mixing == "known" else ""
        return (
            f"labels {self.labels}, batch norm {self.batch_norm}, "
            f"local schedule known, {self.view} view{rounds}"
        )


@dataclass(frozen=True, repr=False)
class Disclosure(_Shapes):
    """Facts that the threat model grants the attacker in addition; empty in a real deployment.

    Attributes:
        targets: the true targets, where ``ThreatModel.labels`` is ``known``.
        statistics: BatchNorm statistics, keyed as the buffers (``….running_mean``,
            ``….running_var``). Where ``ThreatModel.batch_norm`` is ``exact``, they are the mean and
            biased variance of each layer's input on the private batch; where it is ``final``, the
            buffers of the finished model.
    """

    targets: Tensor | None = None
    statistics: Params | None = None


@dataclass(frozen=True, repr=False)
class Observation(_Shapes):
    """The server's view of one client's update in a round, or of the mean update of several
    clients.

    Attributes:
        server_round: counted from 1.
        client_id: the partition id; −1 for several clients.
        params: θ_t, the parameters that the server sent.
        buffers: the buffers that the server sent.
        update: the update as the server received it.
        disclosed: the facts that the threat model grants in addition.
        members: the number of examples of each client where ``update`` is the mean of several
            clients' updates, weighted by these numbers; empty for one client's update.
        earlier: observations of the same client and samples in earlier rounds; an attack seeks one
            reconstruction that explains all rounds.
    """

    server_round: int
    client_id: int
    params: Params
    buffers: Params
    update: Update
    disclosed: Disclosure = field(default_factory=Disclosure)
    members: tuple[int, ...] = ()
    earlier: "tuple[Observation, ...]" = ()


PartOutcome = Literal["solved", "found", "stopped", "refused", "failed", "not run"]


@dataclass(frozen=True)
class Part:
    """The outcome of one of several attacks that were tried on an observation.

    Attributes:
        name: the name of the attack.
        outcome: ``solved``: the reconstruction's gradient meets the observed one, to a tolerance or
            to the noise; or the reconstruction is proven; or it is the mean of the likely samples
            given every entry that pruning kept, and meets these entries. ``found``: another
            reconstruction. ``stopped``: the best reconstruction when the time was up. ``refused``:
            the attack does not apply. ``failed``: an unforeseen error. ``not run``: the time was up
            before, or another attack had solved the target.
        objective: the relative squared distance of the reconstruction's gradient from the observed
            one; NaN without a reconstruction.
        energy: −2 log posterior of the reconstruction up to a constant, by which attacks are
            compared; NaN without one.
        seconds: CPU seconds of the attack.
        reason: why there is no reconstruction, or how far the attack came; may be empty.
    """

    name: str
    outcome: PartOutcome
    objective: float = math.nan
    energy: float = math.nan
    seconds: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        """Return the attack's name and outcome in a few words, with objective, seconds and reason.

        Example:
            >>> str(Part("analytic", "refused", reason="the first layer is no linear one."))
            'analytic refused (the first layer is no linear one)'
            >>> str(Part("gauss_newton", "found", 2.5e-6, -1e5, 3.21))
            'gauss_newton found 2.5e-06 in 3.2 s'
        """
        words = f"{self.name} {self.outcome}"
        if not math.isnan(self.objective):
            words += f" {self.objective:.2g}"
        if self.seconds >= 0.05:
            words += f" in {self.seconds:.1f} s"
        reason = self.reason.strip().rstrip(".")
        return f"{words} ({reason})" if reason else words


@dataclass(frozen=True)
class Reconstruction:
    """An attack's answer for one observation.

    Attributes:
        batch: the reconstructed samples, in the model's input space, in the attacker's own order;
            ``None`` where the attack failed.
        objective: the final value of the attack's own objective; NaN where it failed.
        stats: numbers about the attack by name, such as iterations, gradient evaluations, CPU
            seconds, and the history of the objective.
        error: why ``batch`` is missing; empty if it is not.
        parts: the outcome of each attack, where several were tried.
        spec: the normalisation under which the reconstructed inputs are pixels, if it follows from
            them and differs from the one that the attack was told; else ``None``.
    """

    batch: Batch | None
    objective: float
    stats: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    parts: tuple[Part, ...] = ()
    spec: InputSpec | None = None

    @property
    def summary(self) -> str:
        """Return the outcome of each attack that was tried, in words; empty if ``parts`` is empty.

        The text ends with the dropout that the attack inferred, if any. Consecutive attacks with
        equal outcomes are named together.
        """
        groups: list[tuple[Part, list[str]]] = []
        for part in self.parts:
            if groups and str(replace(part, name="")) == str(replace(groups[-1][0], name="")):
                groups[-1][1].append(part.name)
            else:
                groups.append((part, [part.name]))
        said = "; ".join(str(replace(part, name=", ".join(names))) for part, names in groups)
        if said and "dropout" in self.stats:
            said = f"{said}; {self.stats['dropout']}"
        chosen = self.stats.get("attack", "")
        return f"{chosen} chosen: {said}" if chosen and said else said

    def __repr__(self) -> str:
        """Return the fields as text, with the shapes of tensors in place of their entries."""
        stats = ", ".join(f"{name!r}: {_shape(value)}" for name, value in self.stats.items())
        parts = f", parts: {self.summary}" if self.parts else ""
        parts += f", spec={self.spec!r}" if self.spec else ""
        return (
            f"Reconstruction(batch={self.batch!r}, objective={self.objective:.6g}, "
            f"stats={{{stats}}}, error={self.error!r}{parts})"
        )


def _shape(value: object) -> str:
    """Return a text for a field's value: a tensor's shape; for parameters by name, how many tensors
    and numbers they have; the ``repr`` of anything else.
    """
    if isinstance(value, Mapping) and value and all(isinstance(v, Tensor) for v in value.values()):
        return f"{{{len(value)} tensors of {sum(v.numel() for v in value.values()):,} numbers}}"
    return str(tuple(value.shape)) if isinstance(value, Tensor) else repr(value)
