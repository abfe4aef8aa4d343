"""Share one pair of optimizer hooks among all captures of the process.

Torch iterates over a dictionary of global hooks in each step. The step fails if another thread
changes the dictionary meanwhile. So one pair of hooks is registered once and stays. Captures are
added to and removed from a tuple, which the pair reads.
"""

import threading
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Hook = Callable[..., None]

_lock = threading.Lock()
_watching: tuple[tuple[Hook, Hook], ...] = ()


def watch_steps(before: Hook, after: Hook) -> Callable[[], None]:
    """Call ``before`` and ``after`` each step of any optimizer, until the returned function is
    called.
    """
    global _watching
    own = (before, after)
    with _lock:
        _watching = (*_watching, own)

    def end() -> None:
        global _watching
        with _lock:
            _watching = tuple(each for each in _watching if each is not own)

    return end


def _before(*args: Any) -> None:
    for before, _ in _watching:
        before(*args)


def _after(*args: Any) -> None:
    for _, after in _watching:
        after(*args)


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
