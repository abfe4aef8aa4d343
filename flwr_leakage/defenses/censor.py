"""Send random noise orthogonal to the gradient in place of the gradient (CENSOR)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.defenses.base import Defense, LocalRound, check_update, require_local_round
from flwr_leakage.params import Params
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update
from flwr_leakage.values import require


def orthogonal_noise(delta: Mapping[str, Tensor], randomness: Randomness) -> Params:
    """Return random noise r that is orthogonal to each tensor v and has its norm: ``r = z − ⟨z, v⟩
    / ⟨v, v⟩ · v`` with z ~ N(0, I), scaled to ``‖r‖ = ‖v‖`` (Zhang et al. 2025, equation 12). The
    noise r is zero for a tensor that is zero or has a single entry.
    """
    found = {}
    for name, value in delta.items():
        v = value.double().flatten()
        z = randomness.normal(v.shape, torch.float64).to(v)
        r = z - (z @ v) / (v @ v).clamp_min(1e-300) * v
        # For a tensor of one entry, r is a rounding error, which must not be scaled up.
        norm = r.norm() if len(v) > 1 else torch.inf
        found[name] = (r * (v.norm() / norm)).reshape(value.shape).to(value.dtype)
    return found


@dataclass(frozen=True)
class Censor(Defense):
    """A defense that sends the best of several random directions orthogonal to the update.

    It makes ``trials`` draws of :func:`orthogonal_noise`, and sends the one after whose step the
    client's loss is lowest (Zhang et al., CENSOR, NDSS 2025, algorithm 1, with the settings of the
    authors' code, github.com/KaiyuanZh/censor). **If no draw lowers the loss, the update is sent
    undefended**, as the algorithm's first candidate is the update itself. To first order, a step
    orthogonal to the gradient does not change the loss, so that curvature and rounding decide. The
    defense gives no guarantee.

    The paper applies the defense only in the first ten epochs; here the caller decides when.

    Attributes:
        trials: the number of draws, ≥ 1.
        step: the length of the trial steps, in units of the gradient, > 0.
    """

    trials: int = 20
    step: float = 1e-4

    def __post_init__(self) -> None:
        require(self, "be at least 1", "trials")
        require(self, "be positive", "step")

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, for the sentences of the report."""
        return (
            "random numbers orthogonal to each layer’s update are sent in its place, or the update "
            f"itself if none of {self.trials} draws lowers the loss"
        )

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Return the update with noise orthogonal to it in place of ``delta``.

        The noise is the one of ``trials`` draws that lowers the loss on the samples of
        ``local_round`` most. If none lowers it, the update is returned as it is.

        Raises:
            ValueError: ``local_round`` is ``None``.
        """
        check_update(update)
        seen = require_local_round(self, local_round)
        length = self.step / update.schedule.learning_rate

        def loss(delta: Mapping[str, Tensor]) -> float:
            moved = {name: seen.params[name] + length * delta[name] for name in seen.params}
            with torch.no_grad():
                return float(seen.gradient_map.loss_value(moved, seen.defended, seen.buffers))

        best = dict(update.delta)
        lowest = loss({name: torch.zeros_like(value) for name, value in best.items()})
        for _ in range(self.trials):
            drawn = orthogonal_noise(update.delta, randomness)
            reached = loss(drawn)
            if reached < lowest:
                lowest, best = reached, drawn
        return replace(update, delta=best)
