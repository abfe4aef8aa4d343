"""Estimate an attack's memory and time before it allocates memory of a size that a client told."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.records import InputSpec, Observation

SAMPLES = 2
"""The number of samples of a trial forward pass. BatchNorm by batch statistics does not accept a
single one.
"""

COPIES = 48
"""The estimated bytes that an attack holds at its peak for each byte of a forward pass: the pass,
its gradient by the parameters, the gradient of both by the inputs, and scratch space. Measured were
19 to 27 (a convolution, its activation and a pooling of 256² to 1024² pixels, one to eight images,
``idlg`` and ``strongest``), 37 in a process that had attacked inputs of other sizes before, and 76
where ``strongest`` searches half a million pixels. A larger value refuses more attacks.
"""

STEPS = 4
"""The estimated number of copies of the parameters that an attack holds for each local step but the
first. A larger value refuses more attacks on updates of many steps. A server that trains the model
has memory for four copies anyway, which are subtracted from the estimate.
"""

OPERATIONS_PER_SECOND = 5e9
"""The number of floating-point operations that a slow CPU core is assumed to do in a second. With a
larger value, fewer attacks are refused because they would take too long.
"""

LEAST_GRADIENTS = 10
"""The least number of gradients for which an attack must have time, else it is refused. The value
is a choice: attacks by optimisation take tens to hundreds.
"""

_MAX_CALLS = 50_000
_REAL_BYTES = 2**20  # most bytes of an input that is passed with values; 3 × 224² takes 0.6 MB
_MAX_KEPT = 256


@runtime_checkable
class HasObservation(Protocol):
    """An object that holds an observation, the input of an attack."""

    @property
    def observation(self) -> Observation:
        """Return the observation, which is all that the attack is given of a target."""


T = TypeVar("T", bound=HasObservation)


@dataclass(frozen=True)
class Needs:
    """The memory and work of a forward pass on one sample.

    Attributes:
        num_bytes: the bytes of all intermediate results.
        operations: the floating-point operations of its matrix products and convolutions.
        num_classes: the number of logits.
    """

    num_bytes: float
    operations: float
    num_classes: int


@dataclass
class Trials:
    """A meter of the memory and time of attacks on a model, which refuses attacks beyond limits.

    A forward pass of meta tensors, which have a shape and no values, tells the bytes and
    operations. The results of the latest models and inputs are kept.

    Attributes:
        max_bytes: the limit of the bytes of an attack on one target; ``None`` for no limit.
        max_seconds: the CPU seconds that an attack on one target may take; ``None`` for no limit.
    """

    max_bytes: int | None = None
    max_seconds: float | None = None
    _known: "OrderedDict[tuple[InputSpec, str], Needs | str]" = field(default_factory=OrderedDict)

    def needs(self, gradient_map: GradientMap, spec: InputSpec) -> Needs:
        """Return the memory and work of a forward pass on one sample.

        Raises:
            ValueError: the model does not accept inputs of the spec's shape, or one input alone
                needs more memory than ``max_bytes``.
        """
        key = (spec, gradient_map.batch_norm)
        if key not in self._known:
            try:
                limit = math.inf
                if self.max_bytes is not None:
                    limit = (self.max_bytes + STEPS * _size(gradient_map.params)) / COPIES
                self._known[key] = measure(gradient_map, spec, limit)
            except ValueError as error:
                self._known[key] = str(error)
            while len(self._known) > _MAX_KEPT:
                self._known.popitem(last=False)
        found = self._known[key]
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def refusal(self, gradient_map: GradientMap, spec: InputSpec, seen: Observation) -> str:
        """Return in words why an attack on an observation is refused; empty if the attack may run.

        An attack is refused if its memory would exceed ``max_bytes``, if ten gradients would take
        longer than ``max_seconds``, or if the model does not accept inputs of the spec's shape.
        Without limits, nothing is estimated or refused.
        """
        if self.max_bytes is None and self.max_seconds is None:
            return ""
        schedule, samples = seen.update.schedule, _samples(seen)
        try:
            needs = self.needs(gradient_map, spec)
        except ValueError as error:
            return str(error)
        needed = _bytes(needs, seen)
        if self.max_bytes is not None and needed > self.max_bytes:
            return (
                f"an attack on {samples:,} samples of shape {spec.shape} in {schedule.num_steps:,} "
                f"steps would need about {_megabytes(needed)} MB, more than "
                f"max_bytes={self.max_bytes} ({_megabytes(self.max_bytes)} MB)"
            )
        # A gradient by the inputs costs as much as three forward passes.
        seconds = 3 * samples * needs.operations / OPERATIONS_PER_SECOND
        if self.max_seconds is not None and LEAST_GRADIENTS * seconds > self.max_seconds:
            return (
                f"one gradient of {samples:,} samples of shape {spec.shape} would take about "
                f"{seconds:.0f} CPU seconds, so that no {LEAST_GRADIENTS} fit into "
                f"max_seconds={self.max_seconds:g}"
            )
        return ""

    def together(
        self, gradient_map: GradientMap, spec: InputSpec, several: Sequence[T]
    ) -> Iterator[list[T]]:
        """Yield targets in groups, each small enough to be attacked within ``max_bytes``. A target
        that alone needs more is a group of its own.
        """
        part: list[T] = []
        left = math.inf if self.max_bytes is None else float(self.max_bytes)
        for case in several:
            needed = 0.0
            if self.max_bytes is not None:
                needed = _bytes(self.needs(gradient_map, spec), case.observation)
            if part and needed > left:
                yield part
                part, left = [], float(self.max_bytes or 0)
            part.append(case)
            left -= needed
        if part:
            yield part


def _samples(seen: Observation) -> int:
    """Return the number of samples of all steps of an update together.

    For the mean of updates, each client counts as many as the steps may use at most.
    """
    schedule = seen.update.schedule
    used = min(schedule.batch_size, seen.update.num_examples)
    return schedule.num_steps * used * max(len(seen.members), 1)


def _bytes(needs: Needs, seen: Observation) -> float:
    """Return an estimate of the bytes that an attack on an update takes in addition to those that
    the server's training of the model takes.
    """
    copies = STEPS * (seen.update.schedule.num_steps - 2) * _size(seen.params)
    return max(COPIES * _samples(seen) * needs.num_bytes + copies, 0.0)


def _size(params: Params) -> int:
    return sum(value.nbytes for value in params.values())


def measure(gradient_map: GradientMap, spec: InputSpec, max_bytes: float = math.inf) -> Needs:
    """Return the memory and work of a forward pass on one sample, by a pass of tensors without
    values.

    If the model's computation depends on values, zeros are passed instead; for this, one input may
    have at most 1 MiB. ``spec`` holds the inputs' shapes, which an untrusted client may have told;
    the intermediate results of one sample may take ``max_bytes``.

    Raises:
        ValueError: the model does not accept inputs of this shape, or one input takes more than
            ``max_bytes``.
    """
    size = 4 * math.prod(spec.shape)
    if size > min(max_bytes, 2**40):
        raise ValueError(_too_large(spec, max_bytes))
    counted = _Counted(SAMPLES * max_bytes)
    try:
        try:
            logits, operations = _pass(gradient_map, spec, counted, torch.device("meta"))
        except (NotImplementedError, RuntimeError) as error:
            if not _decides_by_values(error):
                raise
            if size > _REAL_BYTES:
                raise ValueError(_too_large(spec, _REAL_BYTES)) from error
            counted = _Counted(SAMPLES * max_bytes)
            logits, operations = _pass(gradient_map, spec, counted, None)
    except _TooMuchError:
        raise ValueError(_too_large(spec, max_bytes)) from None
    except Exception as error:  # a model may raise any error
        reason = f"{type(error).__name__}: {error}"[:300]
        message = f"the model does not take inputs of shape {spec.shape} ({reason})"
        raise ValueError(message) from error
    if logits.ndim != 1 + len(spec.output_shape) or len(logits) != SAMPLES:
        each = "at each position of a text" if spec.next_token else "a sample"
        raise ValueError(
            f"the model must give one row of logits {each}, got {tuple(logits.shape)} for "
            f"{SAMPLES} inputs of shape {spec.shape}"
        )
    return Needs(counted.num_bytes / SAMPLES, operations / SAMPLES, logits.shape[-1])


def _decides_by_values(error: Exception) -> bool:
    """Return whether a forward pass failed because its tensors hold no values, and not because of
    their shape.
    """
    return isinstance(error, NotImplementedError) or "meta" in str(error)


def _pass(
    gradient_map: GradientMap, spec: InputSpec, counted: "_Counted", device: torch.device | None
) -> tuple[Tensor, float]:
    """Return the logits of a forward pass on zeros, and its floating-point operations.

    ``counted`` counts the bytes of the intermediate results; ``device`` is the device of the pass,
    ``None`` for the model's own.
    """
    own = next(iter(gradient_map.params.values()))
    place = own.device if device is None else device
    params = {name: value.to(place) for name, value in gradient_map.params.items()}
    buffers = {name: value.to(place) for name, value in gradient_map.model.named_buffers()}
    inputs = own.new_zeros(SAMPLES, *spec.shape, device=place)
    if spec.is_text:
        inputs = spec.blank(SAMPLES, inputs)
    with torch.no_grad(), place, FlopCounterMode(display=False) as flops, counted:
        logits = gradient_map.logits(params, inputs, buffers)
    return logits, float(flops.get_total_flops())


class _TooMuchError(Exception):
    """The error of a forward pass whose intermediate results, or whose operations,
    exceed a limit.
    """


class _Counted(TorchDispatchMode):
    """A PyTorch mode that counts the bytes of results, and raises an error beyond a limit.

    Results that share memory with the arguments of their operation do not count.
    """

    def __init__(self, max_bytes: float) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.calls = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        # In this mode PyTorch marks no views, such as a linear layer's transposed weight. A view is
        # recognised by the storage that it shares with an argument.
        held = {_storage(value) for value in tree_leaves((args, kwargs)) if _is_tensor(value)}
        for value in tree_leaves(result):
            if _is_tensor(value) and _storage(value) not in held:
                self.num_bytes += value.nbytes
        if self.num_bytes > self.max_bytes or self.calls > _MAX_CALLS:
            raise _TooMuchError
        return result


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor)


def _storage(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def _too_large(spec: InputSpec, max_bytes: float) -> str:
    return (
        f"inputs of shape {spec.shape} are too large: one alone takes more than "
        f"{_megabytes(max_bytes)} MB of intermediate results, or over {_MAX_CALLS:,} operations"
    )


def _megabytes(count: float) -> str:
    return f"{count / 2**20:,.0f}"
