"""Limit an attack by CPU seconds, as wall time would depend on the load of the machine."""

import math
import time
from dataclasses import dataclass, field

from flwr_leakage.operators.budget import BudgetExhausted


@dataclass(frozen=True)
class Budget:
    """A moment of this process's CPU clock at which an attack ends with its best result so far.

    Attacks check the budget between their steps, and end at the first check after that moment. So
    results depend on the budget only if it is spent, and the step under way may exceed it.

    Attributes:
        ends: the moment in seconds of ``time.process_time()``; infinite for no limit.

    Example:
        >>> Budget().is_spent, Budget.of(0.0).is_spent
        (False, True)
    """

    ends: float = math.inf

    @classmethod
    def of(cls, seconds: float | None) -> "Budget":
        """Return a budget that ends ``seconds`` CPU seconds from now; ``None`` for no limit."""
        return cls() if seconds is None else cls(time.process_time() + seconds)

    @property
    def left(self) -> float:
        """CPU seconds that are left until the budget ends, ≥ 0; infinite without a limit."""
        return max(self.ends - time.process_time(), 0.0)

    def part(self, share: float) -> "Budget":
        """Return a new budget, of a share in (0, 1] of the CPU seconds that this one has left."""
        return Budget.of(share * self.left) if self.left < math.inf else self

    def affordable(self, count: int, seconds: float) -> int:
        """Return how many of ``count`` tasks the budget allows, at ``seconds`` CPU seconds each."""
        return int(min(count, self.left / max(seconds, 1e-9)))

    def require(self, seconds: float, what: str) -> None:
        """Raise an error if a task of about ``seconds`` CPU seconds does not fit into the budget.

        ``what`` is the name of the task, with which the message begins.

        Raises:
            BudgetExhausted: fewer seconds are left.
        """
        if seconds > self.left:
            raise BudgetExhausted(
                f"{what} takes about {seconds:.2g} CPU s, and {self.left:.2g} are left."
            )

    @property
    def is_spent(self) -> bool:
        """Whether the budget's CPU seconds are used up."""
        return time.process_time() >= self.ends


@dataclass(frozen=True)
class Stopwatch:
    """A stopwatch of this process's CPU seconds, which runs from the moment it is made.

    Attributes:
        began: that moment, in seconds of ``time.process_time()``.

    Example:
        >>> 0 <= Stopwatch().seconds < 1
        True
    """

    began: float = field(default_factory=lambda: time.process_time())

    @property
    def seconds(self) -> float:
        """CPU seconds of this process since the stopwatch was made."""
        return time.process_time() - self.began


UNLIMITED = Budget()
"""A budget without a limit."""


def stop_mark(stopped: bool) -> dict[str, str]:
    """Return ``{"stopped": "budget"}`` for an attack's stats if its budget ended it, else {}."""
    return {"stopped": "budget"} if stopped else {}
