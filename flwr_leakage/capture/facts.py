"""Describe a client's training by facts that say nothing of its samples."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from flwr_leakage.capture.samples import (
    CPU,
    LossCall,
    TapedLoss,
    captured_batches,
    captured_schedule,
    cross_entropy_settings,
    drops_out,
    has_parameter_term,
    see_inputs,
    takes_in_order,
)
from flwr_leakage.capture.sent import ANOTHER_MULTIPLE, PARAMETERS, SENDS
from flwr_leakage.capture.training import CapturedTraining, sgd_settings
from flwr_leakage.conventions import (
    normalizations_agree,
    public_normalization,
    public_statistics,
)
from flwr_leakage.normalization import BatchNormMode
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.schedules import MAX_STEPS, no_sgd
from flwr_leakage.values import as_count, as_flag, as_list, as_number, as_text

CROSS_ENTROPY, OWN_LOSS = "cross_entropy", "a loss of the app's own"

OWN_TERM = "a loss with a term in the parameters, as FedProx's and FedDyn's"
"""A value of ``TrainingFacts.loss``, for a loss such as FedProx's. Its term in the parameters is
zero at the first step, and small while the parameters stay near their start."""

SEVERAL_LABELS = "a loss of several labels for each input, as MixUp's"
"""A value of ``TrainingFacts.loss``, for a loss such as MixUp's. The client then trained on
mixtures of samples, and an attack recovers these mixtures."""

SMOOTHED = "the cross-entropy with smoothed labels"
"""A value of ``TrainingFacts.loss``, for a cross-entropy with ``label_smoothing``."""

WEIGHTED = "the cross-entropy with class weights"
"""A value of ``TrainingFacts.loss``. The mean over a batch of a single class has no weights."""

UNLIKE = "a loss that is not the mean cross-entropy"
"""A value of ``TrainingFacts.loss``, for a loss that has another value than the mean cross-entropy
on random logits, such as the focal loss or a sum over the batch."""

_LOSSES = (CROSS_ENTROPY, OWN_LOSS, OWN_TERM, SEVERAL_LABELS, SMOOTHED, WEIGHTED, UNLIKE)
"""The values of ``TrainingFacts.loss`` that a client may send to the server."""

UNCOUNTED = "the app reports no number of samples from which its mini-batches would follow"
"""The value of ``TrainingFacts.unscheduled`` if a client tells neither its number of steps nor its
batch size."""

UNTOLD = (
    "what it sends is not what its training made, so that it tells neither its steps nor its inputs"
)
"""The value of ``TrainingFacts.unscheduled`` if a client withholds the facts that were read off its
samples."""

_ALIKE = 1e-4
"""The relative difference up to which two losses of the same logits count as equal. Rounding in
single precision is a hundredth of that, and the smallest usual label smoothing, 0.01, changes the
loss of random logits by a percent."""

_CLOSE = 1e-6
"""The relative difference up to which two settings, such as learning rates, count as equal."""

MAX_CHANNELS, MAX_VALUES = 4096, 2**24
"""The largest number of channels and of values of an input in the facts that a client sends. A
colour image of 2,364 × 2,364 pixels takes 64 MB, and is larger than any that an attack has
recovered."""

SLOWEST, FASTEST = 1e-12, 1e6
"""The least and the largest learning rate in the facts that a client sends. Beyond them parameters
near 1 in float32, whose spacing is 1e-7, do not move, or overflow within a few steps."""


@dataclass(frozen=True)
class TrainingFacts:
    """The settings and steps of a client's training.

    Attributes:
        optimizer: the class name of the optimizer.
        learning_rate: the learning rate of the first step.
        momentum: the momentum of SGD, or 0.
        weight_decay: the weight decay of the optimizer, or 0.
        num_steps: the number of steps of the optimizer.
        batch_size: the number of samples in the largest mini-batch.
        batch_norm: ``batch`` if a BatchNorm layer trained in train mode, ``running`` if none did,
            and empty if there is no such layer.
        randomness: whether the model drew random numbers, as dropout does.
        precision: the type of mixed precision, or empty.
        loss: the kind of loss: ``CROSS_ENTROPY``, ``SMOOTHED``, ``WEIGHTED``, ``UNLIKE``,
            ``OWN_LOSS`` (the app's own, of which nothing else is known), ``OWN_TERM`` (a term in
            the parameters) or ``SEVERAL_LABELS`` (as MixUp's); else why it is of no known kind.
        label_smoothing: torch's ``label_smoothing`` of a cross-entropy of the kind ``SMOOTHED``.
        shape: (C, H, W) of an input, if all inputs are images of the same shape; otherwise empty.
        num_classes: the number of classes K, or 0 if it is not known.
        normalization: the name of the public normalisation of the inputs, a key of
            ``conventions.PUBLIC``; empty where none fits.
        mean: the mean of the normalisation per channel, if the client's owner gives it; otherwise
            empty.
        std: the standard deviation of the normalisation per channel, if the owner gives it.
        box: whether the client's owner says that the inputs are images of 8 bits; see
            ``InputSpec``.
        unscheduled: the reason why no ``LocalSchedule`` expresses the training, or why the client
            does not tell it; empty if a schedule expresses it.
        rewritten: the number, from 1, of the first step whose gradients something changed after
            ``backward`` (clipping, noise); 0 if there was none.
        repeated: whether the training was not captured. Then the optimizer, its settings and the
            number of steps are of this training, and all other facts are of an earlier one.
        counted: whether ``num_steps`` and ``batch_size`` follow from the number of samples that the
            app reports.
        sends: the quantity that the client sends: its parameters or a multiple of its update, by a
            name of ``flwr_leakage.capture.sent``.
    """

    optimizer: str
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    num_steps: int = 0
    batch_size: int = 0
    batch_norm: str = ""
    randomness: bool = False
    precision: str = ""
    loss: str = ""
    label_smoothing: float = 0.0
    shape: tuple[int, ...] = ()
    num_classes: int = 0
    normalization: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    box: bool = True
    unscheduled: str = ""
    rewritten: int = 0
    repeated: bool = False
    counted: bool = False
    sends: str = PARAMETERS

    def travelling(self, as_trained: bool) -> "TrainingFacts":
        """Return the facts that may be sent to the server.

        The optimizer's settings, and the inputs' facts that the client's owner gives, are always
        among them. Facts that were read off the samples are included only if ``as_trained``: the
        client sends the update as the training made it, without a defense or mod that changed it
        (docs/threat-model.md, "What travels").
        """
        loss = self.loss if self.loss in _LOSSES else ""
        told = replace(self, loss=loss, rewritten=0)
        if not as_trained:
            # The reason that the optimizer is no SGD may travel: the server is told the optimizer
            # in any case.
            why = no_sgd(self.optimizer)
            if self.unscheduled != why:
                why = UNTOLD
            told = replace(
                told, loss="", label_smoothing=0.0, unscheduled=why, counted=False, normalization=""
            )
            told = replace(told, repeated=False)
            if not self.mean:
                told = replace(told, shape=(), num_classes=0)
        if not told.counted:
            why = told.unscheduled or UNCOUNTED
            told = replace(told, num_steps=0, batch_size=0, unscheduled=why)
        return told

    def sending(self, sends: str) -> "TrainingFacts":
        """Return the same facts with ``sends``, the name of the quantity that the client sends.

        The name is one of those in ``capture.sent``, for the parameters or a multiple of the
        update.
        """
        if sends == ANOTHER_MULTIPLE and not self.unscheduled:
            why = f"what it sends is {ANOTHER_MULTIPLE}, and no method that is known here"
            return replace(self, sends=sends, unscheduled=why)
        return replace(self, sends=sends)

    def schedule(self) -> LocalSchedule:
        """Return the schedule of local training, for attacks.

        Raises:
            ValueError: no schedule expresses the training. The message says why.
        """
        if self.unscheduled:
            raise ValueError(self.unscheduled)
        return LocalSchedule(
            self.learning_rate,
            self.num_steps,
            self.batch_size,
            self.momentum,
            self.weight_decay,
        )

    def spec(self) -> InputSpec:
        """Return the shape, classes and normalisation of the inputs, for attacks.

        The normalisation is unknown (``known=False``) if none is told, as after interpolation.

        Raises:
            ValueError: the inputs are no images, or the client told nothing of them.
        """
        if len(self.shape) != 3 or not self.num_classes:
            raise ValueError(
                self.unscheduled if self.unscheduled in (UNTOLD, no_sgd(self.optimizer))
                else "the inputs are no images of one shape with a class each; for token ids give "
                "observe a spec, InputSpec.text(…)"
            )  # fmt: skip
        channels, height, width = self.shape
        mean, std = self.mean, self.std
        if self.normalization and not mean:
            mean, std = public_statistics(self.normalization, channels)
        shape = channels, height, width
        if not mean:
            return InputSpec(shape, self.num_classes, known=False)
        return InputSpec(shape, self.num_classes, mean, std, self.box)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain values by name, for JSON."""
        return dict(vars(self))

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> "TrainingFacts":
        """Return the facts that a client sent in the form of ``to_dict``, after checking them.

        Raises:
            ValueError: ``content`` has not this form, or no training has such facts.
            KeyError: a fact is missing.
        """
        facts = TrainingFacts(
            **{
                field.name: _READERS[field.type](content[field.name])
                for field in fields(TrainingFacts)
                if field.name in content or field.name not in _NEWER
            }
        )
        _check_told(facts)
        return facts


def facts_of(
    training: CapturedTraining,
    num_examples: int,
    reported: int = 0,
    spec: InputSpec | None = None,
) -> TrainingFacts:
    """Return the facts about a client's training, from its capture.

    Args:
        training: the captured training.
        num_examples: the number of samples that the client reports.
        reported: the number of samples that the app itself reports to the server; 0 where it
            reports none.
        spec: shapes, classes and normalisation of the inputs, if the client's owner gives them.

    Raises:
        ValueError: nothing was captured.
    """
    if training.problem or training.optimizer_class is None:
        raise ValueError(training.problem or "no optimizer was captured")
    entries = training.backwards[0].entries
    dtypes = {str(e.autocast.dtype).removeprefix("torch.") for e in entries if e.autocast.enabled}
    try:
        captured_schedule(training, num_examples)
        unscheduled = ""
    except ValueError as error:
        unscheduled = str(error)
    facts = TrainingFacts(
        optimizer=training.optimizer_class.__name__,
        **sgd_settings(training.steps[0].options),
        num_steps=training.num_steps,
        batch_size=max(training.batch_sizes, default=0),
        batch_norm=training.batch_norm,
        randomness=drops_out(training),
        precision=", ".join(sorted(dtypes)),
        unscheduled=unscheduled,
        rewritten=_rewritten(training),
        counted=takes_in_order(training, reported),
        **_inputs(training),
    )
    # A given spec of texts is not put into the facts: it serves only the client's own scores.
    if spec is None or spec.is_text:
        return facts
    given = replace(facts, shape=spec.shape, num_classes=spec.num_classes, normalization="")
    return replace(given, mean=spec.mean, std=spec.std, box=spec.box) if spec.known else given


def _rewritten(training: CapturedTraining) -> int:
    """Return the number, from 1, of the first step whose gradients were changed; 0 if none was."""
    changed = (n for n, step in enumerate(training.steps, 1) if step.rescaled_to is not None)
    return next(changed, 0)


def _inputs(training: CapturedTraining) -> dict[str, Any]:
    """Return the values of the fields of ``TrainingFacts`` on the loss and the inputs, by field
    name.
    """
    try:
        seen = [see_inputs(training, backward) for backward in training.backwards]
    except ValueError as error:
        return {"loss": str(error)}
    try:
        calls = captured_batches(training)
        plain = (CROSS_ENTROPY, 0.0)
        loss, smoothing = next(filter(plain.__ne__, map(_loss_of, calls)), plain)
        if loss == UNLIKE and len(training.backwards) > len(training.steps):
            loss = OWN_LOSS  # a part of a mean over the several mini-batches of a step
        told: dict[str, Any] = {"loss": loss, "label_smoothing": smoothing}
        classes = calls[0].num_outputs
    except ValueError as error:
        has_term = any(has_parameter_term(training, backward) for backward in training.backwards)
        mixes = any(each.num_targets > 1 for each in seen)
        told = {"loss": OWN_TERM if has_term else SEVERAL_LABELS if mixes else str(error)}
        classes = seen[0].num_outputs
        if not classes:
            return told
    inputs = seen[0].inputs
    shape = tuple(inputs.shape[1:])
    alike = all(tuple(each.inputs.shape[1:]) == shape for each in seen)
    if len(shape) != 3 or not inputs.is_floating_point() or not alike:
        return told
    normalization = public_normalization(inputs.to(CPU))
    return {**told, "shape": shape, "num_classes": classes, "normalization": normalization}


def _loss_of(call: LossCall) -> tuple[str, float]:
    """Return the kind of a mini-batch's loss, a value of ``TrainingFacts.loss``, and its label
    smoothing.

    The captured loss L is compared with the mean cross-entropy on random logits z for the
    mini-batch's targets. If they agree on z, the kind is ``CROSS_ENTROPY``. If they agree only on
    log-softmax(z), as for a model that returns log-probabilities, or the loss takes other arguments
    than logits (B, K) and targets, the kind is ``OWN_LOSS``.
    """
    if call.loss is F.cross_entropy:
        return CROSS_ENTROPY, 0.0
    if not call.num_outputs or not isinstance(call.loss, TapedLoss):
        return OWN_LOSS, 0.0
    targets = call.batch.targets
    # The focal loss takes class ids as a column, for example.
    ids = targets.flatten() if targets.numel() == len(targets) else targets
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(len(targets), call.num_outputs, generator=draws)
    settings = next(filter(None, map(cross_entropy_settings, call.loss.tail)), {})
    smoothing = float(settings.get("label_smoothing", 0.0))
    try:
        value, other = (call.loss(z, targets).float() for z in (logits, logits.log_softmax(1)))
        plain = F.cross_entropy(logits, ids)  # log-softmax(z) has the same value
        smoothed = F.cross_entropy(logits, ids, label_smoothing=smoothing)
    except Exception:  # the app's loss may raise any error on other values than its own
        return OWN_LOSS, 0.0
    if torch.allclose(value, plain, rtol=_ALIKE):
        return CROSS_ENTROPY, 0.0
    if torch.allclose(other, plain, rtol=_ALIKE):
        return OWN_LOSS, 0.0
    if settings.get("weight") is not None:
        return WEIGHTED, 0.0
    if smoothing and torch.allclose(value, smoothed, rtol=_ALIKE):
        return SMOOTHED, smoothing
    return UNLIKE, 0.0


def differences(
    facts: TrainingFacts,
    schedule: LocalSchedule,
    spec: InputSpec,
    batch_norm: BatchNormMode,
    label_smoothing: float = 0.0,
    has_own_loss: bool = False,
    num_examples: int | None = None,
) -> tuple[str, ...]:
    """Return sentences on each setting in which a client's training differs from an assumed one.

    Args:
        facts: the facts about the client's training.
        schedule: the schedule that an audit assumes.
        spec: the inputs that it assumes.
        batch_norm: the mode of BatchNorm that it assumes.
        label_smoothing: the label smoothing that it assumes.
        has_own_loss: whether it assumes another loss than the mean cross-entropy. The clients' loss
            is then not compared.
        num_examples: the number of the client's samples in the round. A client with fewer samples
            than a mini-batch takes all of them in one step, which is no difference. If the number
            is ``None``, a batch size below the assumed one is never reported.
    """
    most = facts.batch_size if num_examples is None else num_examples
    found = []
    if facts.optimizer != "SGD":
        found.append(f"optimizer {facts.optimizer}, assumed SGD")
    # Momentum has no effect on a training of one step, so that a difference is not reported.
    is_single = facts.num_steps == schedule.num_steps == 1
    momentum = schedule.momentum if is_single else facts.momentum
    numbers = (
        ("learning rate", facts.learning_rate, schedule.learning_rate),
        ("momentum", momentum, schedule.momentum),
        ("weight decay", facts.weight_decay, schedule.weight_decay),
        ("steps", facts.num_steps, schedule.num_steps),
        ("batch size", facts.batch_size, min(schedule.batch_size, most)),
    )
    for name, told, assumed in numbers if facts.num_steps else numbers[:3]:
        if not math.isclose(told, assumed, rel_tol=_CLOSE):
            found.append(f"{name} {told:g}, assumed {assumed:g}")
    if facts.batch_norm and facts.batch_norm != batch_norm:
        found.append(f"BatchNorm in mode {facts.batch_norm}, assumed {batch_norm}")
    is_other = facts.loss in (SMOOTHED, WEIGHTED, UNLIKE)
    if facts.loss == SMOOTHED:
        is_other = not math.isclose(facts.label_smoothing, label_smoothing, rel_tol=_CLOSE)
    if is_other and not has_own_loss and not facts.precision:
        found.append(f"{facts.loss}, assumed the mean cross-entropy")
    if facts.loss == OWN_TERM:
        found.append(f"{facts.loss}, assumed none")
    if facts.loss == SEVERAL_LABELS:
        found.append(f"{facts.loss}, assumed one; what is found are then mixtures")
    if facts.randomness:
        found.append("dropout or another random layer, assumed none")
    if facts.precision:
        found.append(f"mixed precision ({facts.precision}), assumed none")
    if facts.shape and facts.shape != spec.shape:
        found.append(f"inputs of shape {facts.shape}, assumed {spec.shape}")
    elif facts.shape and (facts.normalization or facts.mean):
        by = facts.spec()
        if not normalizations_agree(by, spec):
            found.append(
                f"normalisation by mean {by.mean} and std {by.std}, assumed {spec.mean} and "
                f"{spec.std}"
            )
    # Facts that the client withholds cannot be compared, and count as no difference.
    silent = facts.unscheduled in (UNTOLD, UNCOUNTED)
    if facts.unscheduled and not silent and facts.optimizer == "SGD":
        found.append(facts.unscheduled)
    return tuple(found)


def _check_told(facts: TrainingFacts) -> None:
    """Raise an error for facts that no training can have.

    Numbers are checked only if a schedule describes the training, as they are not used otherwise.

    Raises:
        ValueError: a number of steps, learning rate, shape or normalisation is impossible or too
            large. The message tells what was expected and what came.
    """
    if facts.sends not in (PARAMETERS, ANOTHER_MULTIPLE, *SENDS):
        raise ValueError("sends must be one of the names of what methods send.")
    if not 0 <= facts.label_smoothing <= 1:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {facts.label_smoothing:g}.")
    if facts.num_steps > MAX_STEPS:
        raise ValueError(f"num_steps must be at most {MAX_STEPS:,}, got {facts.num_steps:,}.")
    if not facts.unscheduled:
        schedule = facts.schedule()
        if not SLOWEST <= schedule.learning_rate <= FASTEST:
            raise ValueError(
                f"learning_rate must lie in [{SLOWEST:g}, {FASTEST:g}], got "
                f"{schedule.learning_rate:g}."
            )
    given = bool(facts.mean or facts.std)
    if not (facts.shape or given or facts.normalization):
        return
    if len(facts.shape) != 3:
        raise ValueError(f"shape must be (C, H, W) or empty, got {facts.shape}.")
    channels, height, width = facts.shape
    # Both numbers are limited, as the normalisation takes memory for each channel, and an attack
    # for each value of an input.
    if channels > MAX_CHANNELS or math.prod(facts.shape) > MAX_VALUES:
        raise ValueError(
            f"shape must have at most {MAX_CHANNELS:,} channels and {MAX_VALUES:,} values, got "
            f"{facts.shape}."
        )
    if facts.normalization:
        public_statistics(facts.normalization, channels)
    statistics = (facts.mean, facts.std) if given else ((0.0,), (1.0,))
    InputSpec((channels, height, width), max(facts.num_classes, 1), *statistics)


def _text(value: object) -> str:
    return as_text(value, 200).encode("utf-8", "replace").decode()


_count = partial(as_count, below=2**31)
_number = partial(as_number, below=1e12)

_READERS: dict[Any, Callable[[object], Any]] = {
    str: _text,
    bool: as_flag,
    int: _count,
    float: _number,
    tuple[int, ...]: lambda value: tuple(map(_count, as_list(value, 64))),
    tuple[float, ...]: lambda value: tuple(map(_number, as_list(value, 64))),
}
"""For each type of a field of ``TrainingFacts``, the function that checks a value that a client
sent, and returns it."""

_NEWER = ("box", "label_smoothing", "rewritten", "repeated", "counted", "sends")
"""The fields of ``TrainingFacts`` that clients with earlier versions of this package do not send. A
missing field has its default."""
