"""A preconditioner that is costly to compute and serves several steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Kept(Generic[T]):
    """A preconditioner that serves several steps, until conjugate gradients take long with it.

    Attributes:
        many: number of iterations of a step above which another preconditioner is needed.
        least: number of iterations that a preconditioner serves at least.
        is_due: whether the next step computes one. If False at first, none is computed before the
            first long step.
        made: the preconditioner; ``None`` before the first one.
        served: number of iterations taken with it.
    """

    many: int
    least: float = 0.0
    is_due: bool = True
    made: T | None = None
    served: int = 0

    def get(self, make: Callable[[], T | None]) -> T | None:
        """Return the preconditioner, which is computed anew if it is due."""
        if self.is_due:
            self.made, self.served, self.is_due = make(), 0, False
        return self.made

    def note(self, iterations: int) -> None:
        """Count a step's iterations, and decide whether another preconditioner is due."""
        self.served += iterations
        is_old = self.made is None or self.served > self.least
        self.is_due = is_old and iterations > self.many
