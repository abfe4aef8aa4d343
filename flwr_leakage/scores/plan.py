"""When a client scores its samples, which of them, at what cost, and what is kept."""

from dataclasses import dataclass

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Exposure
from flwr_leakage.scores import Budget, select_samples


@dataclass(frozen=True)
class ScorePlan:
    """How much of a client's time and state the scores may take.

    Attributes:
        every: rounds from one scoring to the next, ≥ 1; the first round is scored.
        max_samples: at most so many samples a round, or ``None`` for all that were kept.
        which: of those, the ``first``, a ``random`` set, or those with the
            ``largest_gradient``, which fixed noise protects least.
        products: Jacobian products of one sample that a round may spend, or ``None``.
        seconds: CPU seconds that a round may spend, or ``None``.
        keep_rounds: rounds whose scores stay in the client's state, or ``None`` for all.
        send: whether the scores travel to the server. They describe private data.
    """

    every: int = 1
    max_samples: int | None = None
    which: str = "first"
    products: int | None = None
    seconds: float | None = None
    keep_rounds: int | None = None
    send: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "max_samples", "keep_rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.which not in ("first", "random", "largest_gradient"):
            raise ValueError(
                f"which must be first, random or largest_gradient, got {self.which!r}."
            )
        Budget(self.products, self.seconds)

    @property
    def budget(self) -> Budget:
        """The limit on one round."""
        return Budget(self.products, self.seconds)

    def includes(self, server_round: int) -> bool:
        """Whether a round, counted from 1, is scored."""
        return (server_round - 1) % self.every == 0

    def samples(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[int] | None:
        """Indices of the samples to score, or ``None`` for all."""
        if self.max_samples is None:
            return None
        return select_samples(gradient_map, exposure, self.max_samples, self.which, generator)
