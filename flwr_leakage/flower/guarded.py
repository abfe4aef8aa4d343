"""Call functions of the audit so that none of their errors ends or changes a training."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from flwr_leakage.audit import ServerAudit
from flwr_leakage.flower.undisturbed import random_states_kept

_LOG = logging.getLogger(__name__)


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
