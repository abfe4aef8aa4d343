"""What is dear to compute serves several steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Kept(Generic[T]):
    """A preconditioner that serves several steps, until conjugate gradients take long with it.

    Attributes:
        many: a step of more iterations than this asks for another preconditioner.
        least: how many iterations a preconditioner serves at least before it is replaced.
        is_due: whether the next step computes one; not before the first long step if it is False.
        made: the preconditioner; ``None`` before the first one.
        served: how many iterations were taken with it.
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
        """Count a step's iterations, and see whether another preconditioner is due."""
        self.served += iterations
        is_old = self.made is None or self.served > self.least
        self.is_due = is_old and iterations > self.many
