"""Plan in which rounds a client scores its samples, which of them, and at what cost."""

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
    """Return the indices of all samples in the order in which to score them, and a list with the
    measurement that ranked them, empty for ``first`` and ``random``.

    ``how`` names the order: ``most_at_risk`` begins with the largest ``InputGradientNorm``, which
    costs about one training pass; in most networks this is the order of the expensive scores.
    ``first`` keeps the given order. ``random`` draws an order by ``seed``. ``largest_gradient``
    begins with the largest gradient norms, which noise of fixed strength hides least; it costs one
    gradient per sample.
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
    # If the ranking score fails, all its values are ``None``, and the samples keep their order.
    found = score_client({name: score}, client, seed)[name].measurements[0]
    return sorted(range(count), key=lambda place: -(found.values[place] or 0.0)), [found]


@dataclass(frozen=True)
class ScorePlan:
    """Limits on the rounds, samples, time and state that a client's scores take.

    Attributes:
        every: the number of rounds from one scoring to the next, ≥ 1; the first round is scored.
        relative_cost: the limit on the cost of a client's scores over all rounds, as a share of the
            cost of its training, > 0; ``None`` for no such limit.
        min_samples: the number of samples that are scored in each scored round at any cost, ≥ 0.
        which: the rule that chooses the samples to score first, see ``rank_samples``.
        product_price: ``None`` to measure costs in CPU seconds, which depend on the machine. A
            number > 0 is the cost of one Jacobian product in training gradients of one sample.
            Costs are then counted and not measured, so that a simulation can be repeated exactly.
        max_samples: the largest number of samples that are scored in a round, or ``None`` for all
            that the client kept.
        products: the largest number of Jacobian products, of one sample each, in a round; ``None``
            for no limit.
        seconds: the largest number of CPU seconds in a round; ``None`` for no limit.
        keep_rounds: the number of latest rounds whose results stay in the client's state; ``None``
            for all, so that the state grows with every round.
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
        """Return the limit on the Jacobian products and CPU seconds of the scores of one round."""
        return Budget(self.products, self.seconds)

    def includes(self, server_round: int) -> bool:
        """Return whether the samples of a round, counted from 1, are scored."""
        return (server_round - 1) % self.every == 0
