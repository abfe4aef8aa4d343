"""Capture one training of unmodified code, by hooks that are removed even after an error.

The hooks only observe. They see the outermost calls of modules (by ``Calls``), the steps of
optimizers, and torch functions that are called outside of modules and steps (by a
``TorchFunctionMode`` that is active only there). Hooks of torch are global: calls from other
threads are ignored.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS, Optimizer
from torch.overrides import _get_current_function_mode_stack

from flwr_leakage.capture.calls import Calls
from flwr_leakage.capture.counting import (
    Counting,
    batch_size,
    has_closure,
    parameters_of,
    reaches,
    requires_gradient,
    settings_of,
    tensors_of,
    versions_of,
    writes_of,
)
from flwr_leakage.capture.outside import Outside
from flwr_leakage.capture.step_hooks import watch_steps
from flwr_leakage.capture.tape import Autocast, Backward, Tape
from flwr_leakage.capture.training import (
    CapturedTraining,
    Root,
    Step,
    copy_optimizer,
    copy_root,
    rate_of,
)
from flwr_leakage.function_mode import FunctionMode
from flwr_leakage.randomness import States, generator_states, have_drawn
from flwr_leakage.values import require


@dataclass(frozen=True)
class Limits:
    """The limits of how much of a training is kept; further steps are only counted.

    Attributes:
        max_samples: the number of samples to keep, ≥ 1; the step that reaches this number is kept
            as a whole, and is the last one kept.
        max_bytes: the bytes that the tensors of the kept steps may take, ≥ 1; the step that reaches
            this size is the last one kept.
    """

    max_samples: int = 1024
    max_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        require(self, "be at least 1", "max_samples", "max_bytes")


_IN_A_MODE = "the model was called inside a torch function mode, such as a device"


@contextmanager
def capture(limits: Limits | None = None) -> Iterator["Recorder"]:
    """Observe the training in a ``with`` block, as far as it runs in this thread.

    Args:
        limits: the limits of what is kept; by default those of :class:`Limits`.

    Yields:
        The recorder, whose ``training()`` returns the captured training after the block.
    """
    recorder = Recorder(limits or Limits())
    recorder.look()
    try:
        with _told_of_compiling(recorder.see_less):
            yield recorder
    finally:
        recorder.close()


@contextmanager
def _told_of_compiling(tell: Callable[[], None]) -> Iterator[None]:
    """Call ``tell`` before each call of ``torch.compile`` in a ``with`` block.

    ``tell`` can end the recorder's torch function mode, which would otherwise be compiled together
    with the code.
    """
    original, told = torch.compile, [tell]

    @wraps(original)
    def compile_and_tell(*args: Any, **kwargs: Any) -> Any:
        for each in told:
            each()
        return original(*args, **kwargs)

    torch.compile = compile_and_tell
    try:
        yield
    finally:
        told.clear()
        # If another thread replaced ``torch.compile`` meanwhile, its replacement stays.
        if torch.compile is compile_and_tell:
            torch.compile = original


def _has_compiled() -> bool:
    """Return whether this process has run a function or model that ``torch.compile`` made."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["total"])


def _looking(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a method of the recorder, in the recorder's thread only.

    An error of the method ends the capture, and never the training.
    """

    @wraps(method)
    def hook(self: "Recorder", *args: Any) -> None:
        if threading.get_ident() != self._thread or self._in_backward:
            return
        try:
            method(self, *args)
        except Exception as error:
            self.give_up(str(error) or type(error).__name__)

    return hook


class _Window(FunctionMode):
    """A torch function mode that passes every call of a torch function to the recorder, and returns
    its result unchanged.
    """

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def on_call(self, function: Any, args: Any, kwargs: Any) -> Any:
        return self._recorder.call(function, args, kwargs)


class Recorder:
    """An observer of one training, which records the model's calls, the losses and the steps.

    :func:`capture` makes it, and removes its hooks afterwards.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._thread = threading.get_ident()
        self._modes = len(_get_current_function_mode_stack())
        self._window: _Window | None = None
        self._sees_less = _has_compiled()
        self._calls = Calls(self.before_forward, self.after_forward)
        self._end_of_steps: Callable[[], None] | None = None
        self._inside = False
        self._in_backward = False
        self._tape = Tape()
        self._used = 0  # the number of recorded calls before the latest ``backward``
        self._states: States | None = None
        self._memo: dict[Any, Any] = {}
        self._roots: dict[int, Root] = {}
        self._models: set[int] = set()
        self._trained: list[nn.Parameter] = []
        self._optimizer: Optimizer | None = None
        self._copied_optimizer: Optimizer | None = None
        self._writes = -1
        self._norms: set[bool] = set()
        self._rest: Counting | None = None
        self._begin_versions: list[int] = []
        self._pending: list[Backward] = []
        self._gradients: dict[int, tuple[Tensor, int]] = {}
        self._steps: list[Step] = []
        self._options: tuple[dict[str, Any], ...] = ()
        self._num_steps = 0
        # Each entry is the ``id`` of a model that was called, and the call's number of samples.
        self._batch_sizes: list[tuple[int, int]] = []
        self._samples = 0
        self._constants: dict[int, Tensor] = {}
        self._bytes = 0
        self._keeps = True
        self._after_kept: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        self._changed_outside = False
        self._outside = Outside()
        self._ignored: set[int] = set()  # ids of models that a second optimizer trains
        # These models belong to a second optimizer, and were called before the first step.
        self._besides: list[Root] = []
        self._problem = ""
        self._stepped = False

    def give_up(self, reason: str) -> None:
        """Stop observing, with a reason in words; the training goes on."""
        if not self._problem:
            self._problem = reason
        self._keep_no_more()

    def _keep_no_more(self) -> None:
        """Keep no further step; steps from now on are only counted."""
        self._keeps = False
        self._tape = Tape()
        self._calls.rest()

    def _count_the_rest(self, optimizer: Optimizer) -> None:
        """Count further steps of ``optimizer``, and the samples of calls, without keeping them."""
        self._keeps = False
        self._tape = Tape()
        self._rest = Counting(optimizer, self._trained, self._begin_versions)
        self._after_kept = {id(p): p.detach().clone() for p in self._trained}

    # The following methods observe the calls of models.

    def look(self) -> None:
        """Begin to observe calls of modules and torch functions, and steps of optimizers."""
        self._end_of_steps = watch_steps(self.before_step, self.after_step)
        self._calls.look()
        self._open_window(early=True)

    def see_less(self) -> None:
        """From now on, record torch functions in each step only after the first call of a model.

        Before this call, ``torch.compile`` may compile a function. It would compile the recording
        together with the function, whose results would then differ in the last bits.
        """
        if threading.get_ident() == self._thread and not self._sees_less:
            self._sees_less = True
            self._close_window()

    @_looking
    def before_forward(self, module: nn.Module) -> None:
        """Note that the outermost call of a module begins, and copy the module if it is new."""
        self._inside = True
        self._close_window()
        if not torch.is_grad_enabled() or not self._keeps:
            return
        self._outside.look()
        if self._used:
            self._tape.forget(self._used)
            self._used = 0
        self._copy_root(module)
        self._states = generator_states()

    @_looking
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the outermost call of a module; ``output`` is ``None`` if the call failed."""
        self._inside = False
        if not self._keeps:
            self._count_call(module, args, kwargs, output)
            return
        if torch.is_grad_enabled():
            self._record_call(module, args, kwargs, output)
        self._open_window(early=not torch.is_grad_enabled())

    def _record_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves = tensors_of(output)
        if id(module) in self._ignored or not any(leaf.requires_grad for leaf in leaves):
            return
        before = self._states
        if before is not None and not have_drawn(before):
            before = None
        samples = batch_size(args, kwargs) if id(module) in self._models else 0
        self._tape.record(module, args, kwargs, output, before, _autocast(leaves), samples)

    def _count_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Count the samples of a model's call in a step that is counted and not recorded."""
        if id(module) not in self._models or not torch.is_grad_enabled():
            return
        if any(leaf.requires_grad for leaf in tensors_of(output)):
            self._batch_sizes.append((id(module), batch_size(args, kwargs)))

    def _copy_root(self, module: nn.Module) -> None:
        if id(module) in self._roots:
            return
        # The module tree is traversed only once, as a traversal takes longer than the call of a
        # small layer.
        modules = list(module.modules())
        own = list(
            {id(p): p for m in modules for p in m._parameters.values() if p is not None}.values()
        )
        if not own and next(module.buffers(), None) is None:
            return
        if self._num_steps and any(p.requires_grad for p in own):
            if not {id(p) for p in own} & self._held():
                self._ignored.add(id(module))
                return
            raise ValueError(f"{type(module).__name__} was first called after the first step")
        self._roots[id(module)] = Root(module, copy_root(module, self._memo))
        self._trained += own
        # A module without trainable parameters, such as a loss with class weights, is no model to
        # train.
        if any(p.requires_grad for p in own):
            self._models.add(id(module))
        # A closure may call a model for the first time within a step, after the versions of all
        # known parameters were read. So those of this model's parameters are added.
        self._begin_versions += versions_of(own)
        self._norms |= {m.training for m in modules if isinstance(m, _BatchNorm)}

    # The following methods record the torch functions from which a loss is computed.

    def _open_window(self, *, early: bool) -> None:
        """Record torch functions from now on. ``early`` says that no model was called since the
        last step.

        Raises:
            ValueError: another torch function mode is active, so that calls cannot be recorded.
        """
        stack = _get_current_function_mode_stack()
        if self._window is not None:
            if self._keeps and stack[-1] is not self._window:
                raise ValueError(_IN_A_MODE)
            return
        if not self._keeps or (early and self._sees_less):
            return
        if len(stack) != self._modes:
            raise ValueError(_IN_A_MODE)
        self._window = _Window(self)
        self._window.__enter__()

    def _close_window(self) -> None:
        if self._window is not None and _get_current_function_mode_stack()[-1] is self._window:
            self._window.__exit__(None, None, None)
            # The attribute is cleared, as a reference cycle would keep recorded tensors in memory.
            self._window = None

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function and return its result; record it if it depends on trained
        parameters.
        """
        if (
            self._inside
            or self._in_backward
            or not self._keeps
            or not torch.is_grad_enabled()
            # Nothing is recorded while ``torch.jit`` traces, as the trace would store this file's
            # lines of code as the origin of the call.
            or torch.jit.is_tracing()
            or not requires_gradient((args, kwargs))
        ):
            return function(*args, **kwargs)
        if function is Tensor.backward:
            return self._backward(function, args, kwargs)
        before = generator_states()
        given = None
        try:
            given = self._tape.before_call(function, args, kwargs)
        except Exception as error:
            self.give_up(str(error) or type(error).__name__)
        result = function(*args, **kwargs)
        try:
            leaves = tensors_of(result)
            # A call that initialises a parameter returns the parameter, which has no ``grad_fn``,
            # and is not recorded.
            if any(leaf.grad_fn is not None for leaf in leaves):
                states = before if have_drawn(before) else None
                self._tape.record(
                    function, args, kwargs, result, states, _autocast(leaves), given=given
                )
        except Exception as error:
            self.give_up(str(error) or type(error).__name__)
        return result

    def _backward(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            gradient = args[1] if len(args) > 1 else kwargs.get("gradient")
            found = self._tape.cut(args[0], gradient)
            frozen = frozenset(id(p) for p in self._trained if not p.requires_grad)
            found = replace(found, frozen=frozen)
            self._pending.append(found)
            self._count(found)
        except Exception as error:
            # A loss that reaches no parameter of the optimizer belongs to a model that a second
            # optimizer trains, and its error does not end the capture.
            if self._optimizer is None or reaches(args[0], self._held()):
                self.give_up(str(error) or type(error).__name__)
        self._in_backward = True
        try:
            return function(*args, **kwargs)
        finally:
            self._in_backward = False
            self._used = len(self._tape)
            self._gradients = {
                id(p): (p.grad, p.grad._version)
                for p in self._trained if p.grad is not None
            }  # fmt: skip

    def _count(self, found: Backward) -> None:
        for entry in found.entries:
            if entry.samples:
                self._batch_sizes.append((id(entry.function), entry.samples))
            for leaf in entry.inputs():
                tensor = getattr(leaf, "tensor", None)
                if isinstance(tensor, Tensor) and tensor.data_ptr() not in self._constants:
                    self._constants[tensor.data_ptr()] = tensor
                    self._bytes += tensor.nbytes

    # The following methods observe the steps of optimizers.

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note that a step of an optimizer begins."""
        if self._rest is None:
            self._begin_step(optimizer, args, kwargs)
        else:
            self._rest.before_step(optimizer)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record that a step of an optimizer has ended."""
        if self._rest is None:
            self._end_step(optimizer)
        else:
            self._rest.after_step(optimizer, args, kwargs)

    @_looking
    def _begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record the beginning of a step, and copy the optimizer before its first one.

        The step may run a closure, which computes the loss and its gradients only then.
        """
        self._stepped = True
        if not has_closure(args, kwargs):
            self._close_window()
        if not self._roots and not has_closure(args, kwargs):
            return
        if self._problem:
            return
        if isinstance(optimizer, LBFGS):
            raise ValueError("LBFGS calls the loss several times in a step")
        if self._optimizer is None:
            self._optimizer = optimizer
            self._copied_optimizer = copy_optimizer(optimizer, self._memo)
            self._writes = writes_of(parameters_of(optimizer), args, kwargs)
            self._outside = Outside(parameters_of(optimizer))
        elif optimizer is not self._optimizer:
            self._leave_out(frozenset(map(id, parameters_of(optimizer))))
            return
        self._options = tuple(settings_of(optimizer))
        self._outside.look()
        self._changed_outside |= self._versions_differ()
        self._begin_versions = versions_of(self._trained)

    def _leave_out(self, others: frozenset[int]) -> None:
        """Remove all models of a second optimizer from the capture, such as a personal model in
        Ditto.

        ``others`` are the ids of the parameters that the second optimizer holds.

        Raises:
            ValueError: the second optimizer trains a part of what the first one trains, or of what
                the recorded losses use.
        """
        left = {
            key for key, root in self._roots.items()
            if any(id(p) in others for p in root.live.parameters())
        }  # fmt: skip
        backwards = (*self._pending, *(each for step in self._steps for each in step.backwards))
        entries = [entry for each in backwards for entry in each.entries]
        used = {id(each) for entry in entries for each in (entry.function, *entry.inputs())}
        held = self._held()
        shared = any(id(p) in held for key in left for p in self._roots[key].live.parameters())
        if others & held or shared or (left | others) & used:
            raise ValueError("two optimizers take steps")
        for key in left:
            self._besides.append(self._roots.pop(key))
        self._ignored |= left
        self._models -= left
        self._trained = [p for p in self._trained if id(p) not in others]

    @_looking
    def _end_step(self, optimizer: Optimizer) -> None:
        self._close_window()
        if optimizer is self._optimizer:
            self._keep_step(optimizer)
        self._open_window(early=True)

    def _keep_step(self, optimizer: Optimizer) -> None:
        self._num_steps += 1
        self._versions = {id(p): p._version for p in self._trained}
        if not self._keeps:
            return
        self._tape, self._used = Tape(), 0
        self._outside.step(rate_of(self._options))
        self._steps.append(Step(tuple(self._pending), self._options, *self._rewritten()))
        self._pending, self._gradients = [], {}
        self._samples = sum(self._sizes())
        if self._samples >= self._limits.max_samples or self._bytes >= self._limits.max_bytes:
            self._count_the_rest(optimizer)

    def _versions_differ(self) -> bool:
        then = self._versions
        return bool(then) and any(then.get(id(p), p._version) != p._version for p in self._trained)

    def _held(self) -> frozenset[int]:
        """Return the ids of the parameters that the optimizer holds."""
        return frozenset(map(id, parameters_of(self._optimizer) if self._optimizer else ()))

    def _sizes(self) -> tuple[int, ...]:
        """Return the number of samples of each call of a model that the optimizer trains."""
        held = self._held()
        trains = {
            key for key in self._models
            if any(id(p) in held for p in self._roots[key].live.parameters())
        }  # fmt: skip
        return tuple(size for key, size in self._batch_sizes if key in trains)

    def _rewritten(self) -> tuple[float | None, float | None]:
        """Return the norm of gradients that were changed before the step, and the bound of clipping
        by value.

        The first number is the Euclidean norm of all gradients together; ``None`` if they are as
        ``backward`` left them. The second is the largest absolute entry if several entries have it,
        as after clipping by value; otherwise ``None``.
        """
        now = {id(p): p.grad for p in self._trained if p.grad is not None}
        same = now.keys() == self._gradients.keys() and all(
            gradient is self._gradients[key][0] and gradient._version == self._gradients[key][1]
            for key, gradient in now.items()
        )
        if same:
            return None, None
        if not now:
            return 0.0, None
        with torch.no_grad():
            gradients = [gradient.detach() for gradient in now.values()]
            norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
            norm = float(torch.linalg.vector_norm(torch.stack(norms)))
            largest = float(torch.stack([gradient.abs().max() for gradient in gradients]).max())
            count = sum(int((gradient.abs() == largest).sum()) for gradient in gradients)
            return norm, largest if count > 1 else None

    # The following methods end the capture, and return its result.

    def close(self) -> None:
        """Remove all hooks and modes from torch."""
        if self._end_of_steps is not None:
            self._end_of_steps()
        self._calls.rest()
        self._close_window()
        if (
            self._window is not None
            # Torch can only leave the mode that was entered last. If that is another one, this mode
            # stays, and ignores all calls.
        ):
            self._keeps = False

    def training(self) -> CapturedTraining:
        """Return the training that was captured until :meth:`close`: its steps with their samples
        and settings, and the models before the first step.
        """
        rest = self._rest
        if rest is None:
            self._outside.look(at_end=True)
        correction, outside = self._outside.correction(), self._outside
        changed_at_end = outside.changed_at_end or (self._num_steps > 0 and self._versions_differ())
        held = self._held()
        # Trained models come first, as the arrays that server and client exchange are theirs.
        roots = sorted(
            self._roots.values(), key=lambda r: not any(id(p) in held for p in r.live.parameters())
        )
        return CapturedTraining(
            roots=tuple(roots),
            optimizer=self._copied_optimizer,
            optimizer_class=None if self._optimizer is None else type(self._optimizer),
            batch_norm="batch" if True in self._norms else "running" if self._norms else "",
            steps=tuple(self._steps),
            num_steps=self._num_steps + (rest.num_steps if rest else 0),
            batch_sizes=self._sizes(),
            after_kept=self._after_kept,
            changed_outside=(
                (correction is None and (self._changed_outside or outside.changed))
                or (rest is not None and rest.changed_outside)
            ),
            changed_at_end=rest.changed_at_end if rest else changed_at_end and correction is None,
            settings_changed=rest is not None and rest.settings_changed,
            writes=self._writes,
            held=held,
            correction=correction,
            trains_another=bool(self._ignored),
            besides=tuple(self._besides),
            # A problem counts only if an optimizer took a step. Without a step, ``_missing`` gives
            # the reason why nothing was captured.
            problem=(self._problem * self._stepped)
            or (rest.problem if rest else "")
            or self._missing(),
        )

    def _missing(self) -> str:
        if not self._num_steps:
            return (
                "no step of a torch.optim.Optimizer was seen in this thread: train with one, or "
                "pass the mini-batches through encode() and use a ClientAudit"
            )
        if not self._steps or not self._steps[0].backwards:
            return "no loss.backward() was seen after a call of a torch.nn.Module"
        return ""


def _autocast(leaves: list[Tensor]) -> Autocast:
    return Autocast.now(leaves[0].device.type)
