"""When a client scores its samples, which of them, at what cost, and what is kept."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import Budget
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Exposure
from flwr_leakage.scores.gradient_norm import GradientNorm

Selection = Literal["first", "random", "largest_gradient"]


def select_samples(
    gradient_map: GradientMap,
    exposure: Exposure,
    max_samples: int,
    how: str,
    seed: int = 0,
) -> list[int]:
    """Indices of at most ``max_samples`` samples, ascending, for ``compute_scores(samples=…)``.

    Args:
        gradient_map: of the client's model and loss.
        exposure: the client's round.
        max_samples: at least 1.
        how: ``first`` ones; a ``random`` set; those with the ``largest_gradient``, which fixed
            noise protects least, at the cost of one gradient each.
        seed: for ``random``.
    """
    if max_samples < 1:
        raise ValueError(f"max_samples must be at least 1, got {max_samples}.")
    _check_selection("how", how)
    count = len(exposure.private)
    keep = min(max_samples, count)
    if how == "first":
        return list(range(keep))
    if how == "random":
        order = torch.randperm(count, generator=make_generator(seed, purpose="select samples"))
        return sorted(order[:keep].tolist())
    norms = GradientNorm()(ClientSamples(gradient_map, exposure), seed)[0].values
    return sorted(sorted(range(count), key=lambda i: -(norms[i] or 0.0))[:keep])


def _check_selection(name: str, value: str) -> None:
    if value not in get_args(Selection):
        raise ValueError(f"{name} must be one of {get_args(Selection)}, got {value!r}.")


@dataclass(frozen=True)
class ScorePlan:
    """How much of a client's time and state the scores may take.

    Attributes:
        every: rounds from one scoring to the next, ≥ 1; the first round is scored.
        max_samples: most samples that are scored in a round, or ``None`` for all that were kept.
        which: which samples are scored: the ``first``, a ``random`` set, or those with the
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
        _check_selection("which", self.which)
        Budget(self.products, self.seconds)

    @property
    def budget(self) -> Budget:
        """The limit on one round."""
        return Budget(self.products, self.seconds)

    def includes(self, server_round: int) -> bool:
        """Whether a round, counted from 1, is scored."""
        return (server_round - 1) % self.every == 0

    def samples(self, gradient_map: GradientMap, exposure: Exposure, seed: int) -> list[int] | None:
        """Indices of the samples to score, or ``None`` for all."""
        if self.max_samples is None:
            return None
        return select_samples(gradient_map, exposure, self.max_samples, self.which, seed)
