"""The one call shape of every attack."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.records import Reconstruction


@dataclass(frozen=True)
class AttackProgress:
    """How far an attack has come.

    Attributes:
        done: targets (observations) that are finished.
        total: all targets of this call.
        iteration: how many iterations the targets being solved now have taken.
        iterations: the most iterations that they may take.
        objective: the attacker's own best objective, averaged over those targets.
        attack: the name of the one that works now, where several are tried; else empty.
    """

    done: int
    total: int
    iteration: int
    iterations: int
    objective: float
    attack: str = ""


ProgressCallback = Callable[[AttackProgress], None]


@runtime_checkable
class Attack(Protocol):
    """Reconstructs private batches from what a server observes."""

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Attack all observations of a job.

        Args:
            job: what the server knows; see :class:`flwr_leakage.attacks.job.AttackJob`.
            progress: called from time to time.

        Returns:
            One reconstruction an observation, in the same order. An observation that cannot be
            attacked yields one without a batch, with a NaN objective and the reason in
            ``error``; the others go on. The result of an observation does not depend on the
            others.
        """
        ...


@runtime_checkable
class DeclaresShare(Protocol):
    """An attack that shares its budget out itself, as it knows when it is near a solution."""

    def with_share(self, share: float) -> Attack:
        """Return the attack that takes this share of its budget unless it needs more.

        Args:
            share: in (0, 1].
        """
        ...


def failure(error: Exception | str) -> Reconstruction:
    """The answer for a target that could not be attacked."""
    text = str(error) or type(error).__name__
    return Reconstruction(batch=None, objective=float("nan"), error=text)


@dataclass
class Reporter:
    """Passes an optimizer's progress on, at most a few times a second.

    Attributes:
        progress: the callback, or ``None`` where nobody listens.
        done: targets that are finished.
        total: all targets of the call.
        iterations: the most iterations that a target may take.
        last: seconds of the monotonic clock when the callback was called last.
    """

    progress: ProgressCallback | None
    done: int
    total: int
    iterations: int
    last: float = 0.0

    def __call__(self, iteration: int, finished: int, values: Tensor) -> None:
        """Tell the progress if the last time is long enough ago."""
        now = time.monotonic()
        if self.progress is None or now - self.last < 0.25:
            return
        self.last = now
        finite = values[torch.isfinite(values)]
        mean = float(finite.mean()) if len(finite) else math.nan
        self.progress(AttackProgress(self.done, self.total, iteration, self.iterations, mean))
