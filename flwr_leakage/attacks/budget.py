"""How long an attack may work: CPU seconds, not wall time, which a busy machine would stretch."""

import math
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Budget:
    """A moment of this process's CPU clock after which an attack ends with its best so far.

    Attacks look at it between their steps, and end at the first look that finds it spent. So a
    result does not depend on it as long as it is not spent, and a step may overrun it.

    Attributes:
        ends: the moment, of ``time.process_time()``; infinite for no limit.

    Example:
        >>> Budget().is_spent, Budget.of(0.0).is_spent
        (False, True)
    """

    ends: float = math.inf

    @classmethod
    def of(cls, seconds: float | None) -> "Budget":
        """From now on so many CPU seconds; ``None`` for no limit."""
        return cls() if seconds is None else cls(time.process_time() + seconds)

    @property
    def left(self) -> float:
        """CPU seconds until the end, ≥ 0."""
        return max(self.ends - time.process_time(), 0.0)

    def part(self, share: float) -> "Budget":
        """From now on a share in (0, 1] of what is left."""
        return Budget.of(share * self.left) if self.left < math.inf else self

    def affordable(self, count: int, seconds: float) -> int:
        """How many of ``count`` pieces of work, each of so many seconds, fit into what is left."""
        return int(min(count, self.left / max(seconds, 1e-9)))

    @property
    def is_spent(self) -> bool:
        """Whether the end has come."""
        return time.process_time() >= self.ends


@dataclass(frozen=True)
class Stopwatch:
    """Tell how many CPU seconds passed since it was made.

    Attributes:
        began: the moment when it was made, of ``time.process_time()``.

    Example:
        >>> 0 <= Stopwatch().seconds < 1
        True
    """

    began: float = field(default_factory=lambda: time.process_time())

    @property
    def seconds(self) -> float:
        """CPU seconds since then."""
        return time.process_time() - self.began


UNLIMITED = Budget()
"""No limit."""


def stop_mark(stopped: bool) -> dict[str, str]:
    """The entry of a result's stats that says that its attack ended as its budget was spent."""
    return {"stopped": "budget"} if stopped else {}
