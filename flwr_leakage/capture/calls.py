"""The outermost calls of modules in one thread, by hooks that what they call does not feel."""

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class Calls:
    """Tells where an outermost call begins, and where it ends.

    A global hook is felt by every module of a model. So it waits for the next call only, and is
    removed when that begins; a hook of the module that was called waits for the end.

    Args:
        begins: (module), before the call.
        ends: (module, args, kwargs, output), after it; the output of one that failed is ``None``.
    """

    def __init__(
        self, begins: Callable[[nn.Module], None], ends: Callable[[nn.Module, Any, Any, Any], None]
    ) -> None:
        self._thread = threading.get_ident()
        self._begins, self._ends = begins, ends
        self._looks = False
        self._waiting: RemovableHandle | None = None
        self._own: RemovableHandle | None = None

    def look(self) -> None:
        """Look from now on."""
        self._looks = True
        self._waiting = register_module_forward_pre_hook(self._begin)

    def rest(self) -> None:
        """Look at no further call, and leave no hook."""
        self._looks = False
        self._remove()

    def _remove(self) -> None:
        for handle in (self._waiting, self._own):
            if handle is not None:
                handle.remove()
        self._waiting = self._own = None

    def _begin(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._remove()
        self._begins(module)
        if self._looks:
            self._own = module.register_forward_hook(self._end, with_kwargs=True, always_call=True)

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if output is not None:  # after a failure torch walks through the very hooks
            self._remove()
        if self._looks:
            self._waiting = register_module_forward_pre_hook(self._begin)
        self._ends(module, args, kwargs, output)
