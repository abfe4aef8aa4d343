"""Define what every attack takes and returns, and how it reports its progress."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.records import InputSpec, Reconstruction


@dataclass(frozen=True)
class AttackProgress:
    """The progress of an attack on several targets, each of which is one observed update.

    Attributes:
        done: number of targets that are finished.
        total: number of all targets of this call.
        iteration: number of iterations that the targets under attack have taken.
        iterations: largest number of iterations that these targets may take.
        objective: the best objective of the attack, averaged over the targets under attack.
        attack: the name of the running attack if several are tried; else empty.
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
    """An attack, which reconstructs private batches from the updates that a server observes."""

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Return the samples that an attack reconstructs from the observed updates of a job.

        Args:
            job: the updates and the knowledge of the server; see
                :class:`flwr_leakage.attacks.job.AttackJob`.
            progress: a callback that is called from time to time.

        Returns:
            One reconstruction for each observation, in the same order. If an observation cannot be
            attacked, its reconstruction has no batch, a NaN objective, and the reason in
            ``error``. The result of an observation does not depend on the others.
        """
        ...


@runtime_checkable
class DeclaresShare(Protocol):
    """An attack that can be limited to a share of a job's CPU seconds until it nears a solution."""

    def with_share(self, share: float) -> Attack:
        """Return a copy of the attack that takes at most a share, in (0, 1], of ``max_seconds``.

        These are the CPU seconds that a job allows for each observation. Near a solution the copy
        may take all of them.
        """
        ...


def require_kind(attack: object, spec: InputSpec) -> None:
    """Raise ``ValueError`` unless an attack takes the kind of inputs that a spec describes.

    An attack takes token ids if its class says ``reads_text = True``, and continuous inputs if not.
    """
    reads_text = getattr(attack, "reads_text", False)
    if spec.is_text and not reads_text:
        raise ValueError("it moves continuous inputs, such as pixels, and these are token ids.")
    if reads_text and not spec.is_text:
        raise ValueError("it reads texts, and these inputs are no token ids (InputSpec.text).")


def failure(error: Exception | str) -> Reconstruction:
    """Return a reconstruction without a batch, for an observation that could not be attacked.

    Its objective is NaN. Its ``error`` is the message of the given error, or the error's type if
    the message is empty.
    """
    text = str(error) or type(error).__name__
    return Reconstruction(batch=None, objective=float("nan"), error=text)


@dataclass
class Reporter:
    """A function that passes an optimizer's progress to a callback, at most a few times a second.

    A target is an observed update that is attacked.

    Attributes:
        progress: the callback, or ``None`` for none.
        done: number of targets that are finished.
        total: number of all targets of the call.
        iterations: largest number of iterations that a target may take.
        last: time of the last call of the callback, in seconds of the monotonic clock.
    """

    progress: ProgressCallback | None
    done: int
    total: int
    iterations: int
    last: float = 0.0

    def __call__(self, iteration: int, values: Tensor) -> None:
        """Report an iteration's number to the callback, at most every 0.25 seconds.

        ``values`` are the best objectives of the updates under attack. The mean of the finite ones
        is reported.
        """
        now = time.monotonic()
        if self.progress is None or now - self.last < 0.25:
            return
        self.last = now
        finite = values[torch.isfinite(values)]
        mean = float(finite.mean()) if len(finite) else math.nan
        self.progress(AttackProgress(self.done, self.total, iteration, self.iterations, mean))
