"""The one call shape of every attack."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, Observation, Reconstruction, ThreatModel


@dataclass(frozen=True)
class AttackProgress:
    """How far an attack has come.

    Attributes:
        done: targets (observations) that are finished.
        total: all targets of this call.
        iteration: of the targets that are being solved now.
        iterations: the most iterations that they may take.
        objective: the attacker's own best objective, averaged over those targets.
    """

    done: int
    total: int
    iteration: int
    iterations: int
    objective: float


ProgressCallback = Callable[[AttackProgress], None]


@runtime_checkable
class Attack(Protocol):
    """Reconstructs private batches from what a server observes.

    There is no parameter through which the truth could enter: what a threat model grants by
    fiat is in each observation's ``disclosed``, and used only where ``threat`` says so.
    """

    def __call__(
        self,
        gradient_map: GradientMap,
        spec: InputSpec,
        observations: Sequence[Observation],
        threat: ThreatModel,
        generator: torch.Generator,
        progress: ProgressCallback | None = None,
    ) -> list[Reconstruction]:
        """Attack all observations.

        Args:
            gradient_map: the public model and loss, in the BatchNorm mode of the clients.
            spec: the public facts about the data.
            observations: what the server saw, one a target.
            threat: what the attacker knows besides.
            generator: the only source of randomness.
            progress: called from time to time.

        Returns:
            One reconstruction an observation, in the same order. An observation that cannot be
            attacked yields one without a batch, with a NaN objective and the reason in
            ``error``; the others go on.
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
        progress: whom to tell, if anybody.
        done: targets that are finished.
        total: all targets of the call.
        iterations: the most iterations that a target may take.
        last: when it was told last.
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
