"""Protect a training from its observer: its random states, its handling of SIGTERM, and its
course.
"""

import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from flwr_leakage.audit import ServerAudit
from flwr_leakage.randomness import generators_kept

_LOG = logging.getLogger(__name__)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the states of the generators of ``random``, NumPy and torch after a ``with`` block.

    Flower's strategies sample clients by ``random`` and draw the noise of differential privacy from
    NumPy. Code within the block, such as an attack, may draw from any of them.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with generators_kept():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def seeded_sampling(seed: str) -> Iterator[None]:
    """Seed Python's ``random``, by which Flower's strategies sample clients, in a ``with`` block.

    The generator's state is restored afterwards.
    """
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM raise ``SystemExit(143)`` in a ``with`` block, so that ``finally`` clauses run.

    Nothing changes in a process that has a handler of its own, nor in threads other than the main
    one, which cannot handle signals.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _unwind(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def guarded(audit: ServerAudit, server_round: int, action: Callable[..., Any], *args: Any) -> Any:
    """Return ``action(*args)``, a function of the audit; ``None`` after an error.

    The error is recorded by the audit under the round, and never reaches the training.
    """
    try:
        with random_states_kept() if audit.draws else nullcontext():
            return action(*args)
    except Exception as error:
        _LOG.exception("flwr_leakage: the audit of round %d failed", server_round)
        message = f"the audit failed, the training goes on: {type(error).__name__}: {error}"
        try:
            audit.warn(server_round, -1, message)
        except Exception:
            _LOG.exception("flwr_leakage: this could not be recorded")
        return None
