"""Hook the outermost calls of modules in one thread, and leave the inner calls alone."""

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle


class Calls:
    """A watcher that reports when each outermost call of a module begins and ends.

    A call is outermost if it does not happen within the call of another module. A global hook slows
    every module of a model down. So the global hook is removed when an outermost call begins, and
    set again when the call has ended. A hook of the called module reports its end.

    Args:
        begins: a function that is called with the module before its call.
        ends: a function that is called with the module, its args, its kwargs and its output after
            the call; the output is ``None`` if the call failed.
    """

    def __init__(
        self, begins: Callable[[nn.Module], None], ends: Callable[[nn.Module, Any, Any, Any], None]
    ) -> None:
        self._thread = threading.get_ident()
        self._begins, self._ends = begins, ends
        self._looks = False
        self._waiting: RemovableHandle | None = None
        self._own: list[RemovableHandle] = []
        self._called: nn.Module | None = None
        self._deeper = 0

    def look(self) -> None:
        """Report outermost calls of modules from now on."""
        self._looks = True
        self._waiting = register_module_forward_pre_hook(self._begin)

    def rest(self) -> None:
        """Report no further call, and remove all hooks."""
        self._looks = False
        self._remove()

    def _remove(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
        for handle in self._own:
            handle.remove()
        self._waiting, self._own = None, []

    def _begin(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._remove()
        self._begins(module)
        if not self._looks:
            return
        self._called, self._deeper = module, 0
        how = {"with_kwargs": True, "always_call": True}
        try:
            self._own.append(module.register_forward_pre_hook(self._call_itself))
            self._own.append(module.register_forward_hook(self._end, **how))
        except Exception:  # a ScriptModule allows no hook that gets keyword arguments
            self._own.append(register_module_forward_hook(self._end, **how))

    def _call_itself(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._deeper += 1

    def _end(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if threading.get_ident() != self._thread or module is not self._called:
            return
        if self._deeper:
            self._deeper -= 1
            return
        self._called = None
        # After a failed call, torch passes ``None`` as output, and to a global hook no kwargs.
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        for handle in self._own[:-1] if output is None else self._own:
            # After a failed call the last hook is not removed, as torch still iterates over the
            # hooks then.
            handle.remove()
        if self._looks:
            self._waiting = register_module_forward_pre_hook(self._begin)
        self._ends(module, args, kwargs, output)
