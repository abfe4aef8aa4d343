"""Describe local training that is counted in epochs, with more steps for larger clients."""

import math
from dataclasses import dataclass, fields
from typing import Any

from flwr_leakage.records import LocalSchedule

MAX_STEPS = 1_000_000
"""The largest number of steps of a round. A client's claimed number of samples that gives more is
refused as a mistake or an attack."""


def no_sgd(optimizer: str) -> str:
    """Return a text that says why no schedule of SGD describes training by an optimizer, given its
    class name.
    """
    return f"the optimizer is {optimizer}, and no SGD"


@dataclass(frozen=True)
class EpochSchedule:
    """The local training of clients that each go through their own samples for some epochs.

    A client with n samples takes ``num_epochs · ⌈n / batch_size⌉`` steps. The server is told n, and
    so knows each client's schedule.

    Attributes:
        learning_rate: the learning rate of SGD, > 0.
        num_epochs: the number of passes over a client's samples of the round, ≥ 1.
        batch_size: the number of samples in a step, ≥ 1; the last step of an epoch may have fewer.
        momentum: heavy-ball momentum of ``torch.optim.SGD`` in [0, 1).
        weight_decay: L2 penalty of ``torch.optim.SGD``, ≥ 0.

    Example:
        >>> EpochSchedule(0.1, num_epochs=2, batch_size=8).for_client(20).num_steps
        6
    """

    learning_rate: float
    num_epochs: int = 1
    batch_size: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.num_epochs < 1:
            raise ValueError(f"num_epochs must be at least 1, got {self.num_epochs}.")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}.")
        self.for_client(1)

    def for_client(self, num_examples: int) -> LocalSchedule:
        """Return the schedule of a client with ``num_examples`` samples in the round.

        Raises:
            ValueError: ``num_examples`` is 0, or so large that the round has over ``MAX_STEPS``
                steps.
        """
        if num_examples < 1:
            raise ValueError(f"num_examples must be at least 1, got {num_examples}.")
        num_steps = self.num_epochs * math.ceil(num_examples / self.batch_size)
        if num_steps > MAX_STEPS:
            raise ValueError(
                f"a round may have at most {MAX_STEPS:,} steps, got {num_steps:,} for a client "
                f"that says it has {num_examples:,} samples."
            )
        return LocalSchedule(
            self.learning_rate, num_steps, self.batch_size, self.momentum, self.weight_decay
        )


class UntoldSchedule(LocalSchedule):
    """Local training that a ``LocalSchedule`` cannot describe, such as Adam's.

    Its settings, such as ``learning_rate``, are unknown: reading one raises a ``ValueError``, so
    that no code computes with a made-up number.

    Args:
        why: the reason in words, such as "the optimizer is Adam, and no SGD".
    """

    def __init__(self, why: str) -> None:
        object.__setattr__(self, "why", why)

    def __getattribute__(self, name: str) -> Any:
        if name in _SETTINGS:
            why = super().__getattribute__("why")
            raise ValueError(f"the training's {name} cannot be told: {why}")
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        return f"UntoldSchedule({super().__getattribute__('why')!r})"


_SETTINGS = frozenset(each.name for each in fields(LocalSchedule))

Schedule = LocalSchedule | EpochSchedule
"""The local training that a server sets: the same steps for all clients, or the same epochs."""
