"""Plan when a client scores its samples, which of them, and at what cost."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from flwr_leakage.operators import Budget
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Measurement
from flwr_leakage.scores.compute import score_client
from flwr_leakage.scores.gradient_norm import GradientNorm
from flwr_leakage.scores.input_gradient_norm import InputGradientNorm

Selection = Literal["most_at_risk", "first", "random", "largest_gradient"]


def rank_samples(
    client: ClientSamples, how: str, seed: int = 0
) -> tuple[list[int], list[Measurement]]:
    """Return the places of all samples in the order in which they are to be scored.

    Args:
        client: the samples.
        how: ``most_at_risk``: by ``InputGradientNorm``, which costs about one training pass over
            the samples and ranks most networks' samples as the dear scores do; ``first`` ones
            first; ``random``; ``largest_gradient``: those that fixed noise protects least, at one
            per-sample gradient each.
        seed: the seed of the order ``random``.

    Returns:
        The places, and the quantity that ranked them.
    """
    if how not in get_args(Selection):
        raise ValueError(f"how must be one of {get_args(Selection)}, got {how!r}.")
    count = len(client)
    if how == "first":
        return list(range(count)), []
    if how == "random":
        order = torch.randperm(count, generator=make_generator(seed, purpose="select samples"))
        return order.tolist(), []
    name = "gradient_norm" if how == "largest_gradient" else "input_gradient_norm"
    score = GradientNorm() if how == "largest_gradient" else InputGradientNorm()
    # A score that fails gives a reason in place of numbers; the samples then keep their order.
    found = score_client({name: score}, client, seed)[name].measurements[0]
    return sorted(range(count), key=lambda place: -(found.values[place] or 0.0)), [found]


@dataclass(frozen=True)
class ScorePlan:
    """The share of a client's time and state that the scores may take; see ``score_round``.

    Attributes:
        every: rounds from one scoring to the next, ≥ 1; the first round is scored.
        relative_cost: limit on the cost of scores over a client's rounds, as a share of its
            training, > 0. ``None`` is no limit, and scores all samples.
        min_samples: number of samples that each scored round scores at any cost, ≥ 0.
        which: the rule that chooses the samples to score first, see ``rank_samples``.
        product_price: ``None`` measures CPU seconds, of the training and of the scores: a true
            limit, but how many samples a round scores then depends on the machine. A number > 0
            counts instead, so that a simulation can be repeated: a Jacobian product of one sample
            counts as so many training gradients of one sample.
        max_samples: most samples that are scored in a round, or ``None`` for all that were kept.
        products: Jacobian products of one sample that a round may spend, or ``None``.
        seconds: CPU seconds that a round may spend, or ``None``.
        keep_rounds: the latest rounds whose notes stay in the client's state, or ``None`` for all,
            with which the state grows without bound. The owner's folder keeps every round.
        send: whether the scores travel to the server. They describe private data.
    """

    every: int = 1
    relative_cost: float | None = 1.0
    min_samples: int = 0
    which: str = "most_at_risk"
    product_price: float | None = None
    max_samples: int | None = None
    products: int | None = None
    seconds: float | None = None
    keep_rounds: int | None = 10
    send: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "max_samples", "keep_rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name in ("relative_cost", "product_price"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, or None, got {value}.")
        if self.min_samples < 0:
            raise ValueError(f"min_samples must be at least 0, got {self.min_samples}.")
        if self.which not in get_args(Selection):
            raise ValueError(f"which must be one of {get_args(Selection)}, got {self.which!r}.")
        Budget(self.products, self.seconds)

    @property
    def budget(self) -> Budget:
        """Return the limit on the cost of one round."""
        return Budget(self.products, self.seconds)

    def includes(self, server_round: int) -> bool:
        """Return whether a round, counted from 1, is scored."""
        return (server_round - 1) % self.every == 0
