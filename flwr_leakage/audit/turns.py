"""Order the attacks of a round whose time is too short for all, and avoid repeated messages."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from flwr_leakage.attacks.budget import Budget

T = TypeVar("T")


def in_turns(
    targets: Sequence[T], budget: Budget, seconds: float | None, seed: str
) -> Iterator[list[T]]:
    """Yield groups of targets to attack as long as a budget of CPU seconds is not spent.

    Each group holds as many targets as the rest of the budget pays for at ``seconds`` each, and at
    least one; it holds all if ``seconds`` is ``None``. As most attacks end before their limit, a
    group is formed only when the one before it is done, from what is then left of the budget. Where
    the budget may not be enough for all, the targets come in an order drawn by ``seed``, so that
    each has the same chance, whatever names clients give themselves.

    Example:
        >>> [part for part in in_turns("abc", Budget(), 60.0, "round 1")]
        [['a', 'b', 'c']]
    """
    left = list(targets)
    fits = len(left) if seconds is None else budget.affordable(len(left), seconds)
    if fits < len(left):
        random.Random(seed).shuffle(left)
    while left and not budget.is_spent:
        count = max(1, len(left) if seconds is None else budget.affordable(len(left), seconds))
        part, left = left[:count], left[count:]
        yield part


def least(*limits: float | None) -> float | None:
    """Return the smallest of several limits; ``None`` stands for no limit.

    Example:
        >>> least(60.0, None, 4.0), least(None)
        (4.0, None)
    """
    return min((limit for limit in limits if limit is not None), default=None)


def seconds_each(seconds: float | None, budget: Budget, count: int) -> float | None:
    """Return the CPU seconds that each of ``count`` targets may take; ``None`` for no limit.

    The result is the smaller of each target's own limit, ``seconds``, and an equal share of the
    rest of the common ``budget``, at least 0.01 s.

    Example:
        >>> seconds_each(60.0, Budget(), 3), seconds_each(None, Budget(), 3)
        (60.0, None)
    """
    # A budget may end between two readings of the clock, and an attack accepts no limit of 0.
    least = min(math.inf if seconds is None else seconds, max(budget.left / count, 0.01))
    return None if least == math.inf else least


@dataclass
class Once:
    """A memory of the messages about each client, by which each message is recorded once, up to a
    limit.

    Attributes:
        limit: the largest number of different messages about a client, ≥ 1.
    """

    limit: int = 32
    _said: dict[int, set[int]] = field(default_factory=dict)

    def says(self, client_id: int, message: str) -> str:
        """Return a message about a client if it is new, and else an empty text.

        The first message beyond the limit is replaced by a remark that no more are recorded.
        """
        said = self._said.setdefault(client_id, set())
        # Hashes are kept instead of messages, as a client chooses how long its messages are.
        if hash(message) in said or len(said) > self.limit:
            return ""
        said.add(hash(message))
        if len(said) <= self.limit:
            return message
        return (
            f"client {client_id}: {self.limit} different things were recorded of it; what it tells "
            f"beyond them is not."
        )
