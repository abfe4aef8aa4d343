"""Limits on Jacobian products and CPU seconds, and the meter that enforces them."""

import time
from dataclasses import dataclass


class BudgetExhausted(RuntimeError):  # noqa: N818 - an outcome, not a mistake
    """The error that is raised if the next product or step would exceed the budget."""


@dataclass(frozen=True)
class Budget:
    """The limits of a computation; ``None`` stands for no limit.

    Attributes:
        products: the largest number of Jacobian products, of one sample each.
        seconds: the largest number of CPU seconds of this process.
    """

    products: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("products", "seconds"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be ≥ 0 or None, got {value}.")


class Meter:
    """The count of products and CPU seconds that operators with this meter have used.

    Args:
        budget: the limits on both; none by default.
    """

    def __init__(self, budget: Budget | None = None) -> None:
        self.budget = budget or Budget()
        self.products = 0
        self.start = time.process_time()

    @property
    def seconds(self) -> float:
        """Return the CPU seconds since the meter started."""
        return time.process_time() - self.start

    def spend(self, products: int) -> None:
        """Count this number of Jacobian products, or raise ``BudgetExhausted`` if the budget does
        not allow them.
        """
        limit = self.budget.products
        if limit is not None and self.products + products > limit:
            raise BudgetExhausted(f"the budget of {limit} products is spent")
        if self.budget.seconds is not None and self.seconds > self.budget.seconds:
            raise BudgetExhausted(f"the budget of {self.budget.seconds:g} CPU seconds is spent")
        self.products += products
