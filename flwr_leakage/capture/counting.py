"""What follows the steps that are kept: counted, and hardly felt by the training."""

import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle


class Counting:
    """Counts calls and steps, and sees whether something else changes what is trained.

    It reads a few attributes a step and holds on to no tensor but the parameters. A global hook is
    felt by every module of a model. So, where the kept steps called one model once each, a hook
    waits for its call, and is removed when that begins, until the step has ended.

    Args:
        optimizer: that takes the steps.
        roots: ids of the modules whose calls count.
        parameters: that are trained.
        batch_sizes: of the calls so far, to be continued.
        once: whether a step calls one module of ``roots``, once, by position.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        roots: Collection[int],
        parameters: Sequence[nn.Parameter],
        batch_sizes: list[int],
        *,
        once: bool,
    ) -> None:
        self._thread = threading.get_ident()
        self._once = once
        self._handle: RemovableHandle | None = None
        self._optimizer = optimizer
        self._roots = frozenset(roots)
        self._parameters = list(parameters)
        self._versions = [p._version for p in self._parameters]
        self._settings = [dict(group) for group in optimizer.param_groups]
        self._batch_sizes = batch_sizes
        self.num_steps = 0
        self.changed_outside = False
        self.settings_changed = False

    def wait(self) -> None:
        """Look at calls from now on."""
        if self._handle is None and self._once:
            self._handle = register_module_forward_pre_hook(self._begins)
        elif self._handle is None:
            self._handle = register_module_forward_hook(self._ends, with_kwargs=True)

    def rest(self) -> None:
        """Look at no further call."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _begins(self, module: nn.Module, args: Any) -> None:
        if (
            id(module) in self._roots
            and torch.is_grad_enabled()
            and threading.get_ident() == self._thread
        ):
            self.rest()
            self._batch_sizes.append(batch_size(args, {}))

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if (
            id(module) in self._roots
            and threading.get_ident() == self._thread
            and any(leaf.requires_grad for leaf in tensors_of(output))
        ):
            self._batch_sizes.append(batch_size(args, kwargs))

    def before_step(self, optimizer: Optimizer) -> None:
        """A step begins.

        Raises:
            ValueError: it is another optimizer's.
        """
        if optimizer is not self._optimizer:
            raise ValueError("two optimizers take steps")
        self.changed_outside |= self.versions_differ()
        if optimizer.param_groups != self._settings:
            now, then = _settled(optimizer.param_groups), _settled(self._settings)
            self.settings_changed |= now != then

    def after_step(self, optimizer: Optimizer) -> None:
        """A step has ended."""
        if optimizer is self._optimizer:
            self.num_steps += 1
            self._versions = [p._version for p in self._parameters]
            if self._once:
                self.wait()

    def versions_differ(self) -> bool:
        """Whether parameters were changed since the last step."""
        return self._versions != [p._version for p in self._parameters]


class Tally:
    """Counts steps only: a training between two replays feels two readings of the versions a step.

    It sees what goes through autograd's version counter between the steps. A write through
    ``.data`` raises no version and is not seen. Within a step the optimizer itself writes, and a
    closure may: a step with one that writes to a parameter otherwise than earlier ones is unclear.
    Settings are read again at the end.

    Args:
        optimizer: that takes the steps, after its first one.
        parameters: that are trained.
        before: their versions when the first step began.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], before: Sequence[int]
    ) -> None:
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._versions = [p._version for p in self._parameters]
        # 0 where no step has written yet: not each step has a gradient of each parameter.
        self._by_step = [now - then for now, then in zip(self._versions, before, strict=True)]
        self._settings = [dict(group) for group in optimizer.param_groups]
        self.num_steps = 0
        self.changed_outside = False
        self.unclear_within = False

    def before_step(self, optimizer: Optimizer) -> None:
        """A step begins.

        Raises:
            ValueError: it is another optimizer's.
        """
        if optimizer is not self._optimizer:
            raise ValueError("two optimizers take steps")
        self.changed_outside |= self.versions_differ()

    def after_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """A step has ended; a closure may have written within it."""
        if optimizer is not self._optimizer:
            return
        versions = [p._version for p in self._parameters]
        if closure:
            for index, (now, then) in enumerate(zip(versions, self._versions, strict=True)):
                usual = self._by_step[index]
                self.unclear_within |= now != then and usual not in (0, now - then)
                self._by_step[index] = usual or now - then
        self._versions = versions
        self.num_steps += 1

    def versions_differ(self) -> bool:
        """Whether parameters were written to since the last step."""
        return self._versions != [p._version for p in self._parameters]

    def settings_differ(self) -> bool:
        """Whether the settings are others than those of the first step."""
        return _settled(self._optimizer.param_groups) != _settled(self._settings)


def _settled(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The settings without what a scheduler adds when it is made."""
    left_out = ("params", "initial_lr")
    return [{k: v for k, v in group.items() if k not in left_out} for group in groups]


def batch_size(args: Any, kwargs: Any) -> int:
    """Samples in a call of a model: the first dimension of the first tensor that has one."""
    for argument in (*args, kwargs):
        for tensor in tensors_of(argument):
            if tensor.ndim:
                return int(tensor.shape[0])
    return 1


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of any nested arguments or results."""
    if isinstance(value, Tensor):  # the usual case, and walking a tree costs more than a layer
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
