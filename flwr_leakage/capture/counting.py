"""Count the optimizer's steps after the last step that is recorded in full, at little cost."""

import threading
from collections.abc import Callable, Container, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

_version: Callable[[Tensor], int] = attrgetter("_version")


class Counting:
    """A counter of an optimizer's steps, which also detects writes to parameters between the steps.

    It reads the version counters of autograd twice in each step. A write between steps raises the
    counter of a tensor and is detected, but not a write through ``.data``. Within a step the
    optimizer writes, and a closure may write too. So a step with a closure sets ``unclear_within``
    if it wrote to a parameter more or less often than earlier steps did. The argument ``before``
    has the counters of the trained parameters when the latest step began; it is ``None`` before the
    first step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        before: Sequence[int] | None = None,
    ) -> None:
        self._thread = threading.get_ident()
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._versions = versions_of(self._parameters)
        # The number of writes to each parameter in one step. It is 0 as long as no step has written
        # to the parameter, as a step may have no gradient for it.
        then = self._versions if before is None else before
        self._by_step = [now - past for now, past in zip(self._versions, then, strict=True)]
        self._settings = _settled(optimizer)
        self.settings_changed = False
        self.num_steps = 0
        self.changed_outside = False
        self.unclear_within = False
        self.problem = ""

    def before_step(self, optimizer: Optimizer) -> None:
        """Note that a step begins, and check whether parameters or settings changed before it."""
        if threading.get_ident() != self._thread:
            return
        if optimizer is not self._optimizer:
            own = set(map(id, self._parameters))
            if own.isdisjoint(map(id, parameters_of(optimizer))):
                return  # ignore the steps of other optimizers, which train other models
            self.problem = "two optimizers take steps"
        if list(map(_version, self._parameters)) != self._versions:
            self.changed_outside = True
        self.settings_changed = self.settings_changed or self._are_set_anew()

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count an ended step, and set ``unclear_within`` if its closure wrote to parameters."""
        if optimizer is not self._optimizer or threading.get_ident() != self._thread:
            return
        versions = list(map(_version, self._parameters))
        if (len(args) > 1 or kwargs) and has_closure(args, kwargs):
            for index, (now, then) in enumerate(zip(versions, self._versions, strict=True)):
                usual = self._by_step[index]
                self.unclear_within |= now != then and usual not in (0, now - then)
                self._by_step[index] = usual or now - then
        self._versions = versions
        self.num_steps += 1

    @property
    def changed_at_end(self) -> bool:
        """Return whether parameters were written to since the last step."""
        return self._versions != versions_of(self._parameters)

    def _are_set_anew(self) -> bool:
        """Return whether the optimizer's settings now differ from those when the counting began.

        Settings that cannot be compared, such as tensors of several entries, count as different.
        This is called when a step begins, so that a scheduler's change after the last step is not
        seen.
        """
        try:
            return _settled(self._optimizer) != self._settings
        except Exception:
            return True


def has_closure(args: Any, kwargs: Any) -> bool:
    """Return whether the arguments of an optimizer's step hold a closure."""
    return kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:])


def versions_of(parameters: Sequence[Tensor]) -> list[int]:
    """Return the version counter of each tensor: how often it was written to."""
    return list(map(_version, parameters))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer holds, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the learning rate and all other settings of each parameter group of an optimizer."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def writes_of(parameters: Sequence[Tensor], args: Any, kwargs: Any) -> int:
    """Return how often gradients were written to before a step: the maximum over the parameters.

    The first ``backward``, which creates the gradient, counts as 0; clipping and accumulation add
    to it. The result is −1 if there is no gradient, or if ``args`` or ``kwargs`` of the step hold a
    closure, which computes the gradient only within the step.
    """
    if has_closure(args, kwargs):
        return -1
    return max((p.grad._version for p in parameters if p.grad is not None), default=-1)


def _settled(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return an optimizer's settings without ``initial_lr``, which a scheduler adds."""
    return [
        {name: value for name, value in group.items() if name != "initial_lr"}
        for group in settings_of(optimizer)
    ]


def batch_size(args: Any, kwargs: Any) -> int:
    """Return the number of samples in a call: the first dimension of its first tensor.

    It is 1 if no tensor has a dimension.
    """
    for argument in (*args, kwargs):
        for tensor in tensors_of(argument):
            if tensor.ndim:
                return int(tensor.shape[0])
    return 1


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors within nested lists, tuples and dictionaries."""
    # A single tensor is frequent, and is returned at once, as torch's tree functions take longer
    # than the call of a small layer.
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def reaches(loss: Tensor, parameters: Container[int]) -> bool:
    """Return whether a gradient of a loss reaches a parameter with one of these ids (``id(p)``)."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in parameters:
            return True
        waiting += [each for each, _ in node.next_functions]
    return False


def requires_gradient(value: Any) -> bool:
    """Return whether a tensor among nested arguments requires a gradient."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, tuple | list):
        return any(map(requires_gradient, value))
    return isinstance(value, dict) and any(map(requires_gradient, value.values()))
