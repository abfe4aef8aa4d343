"""Send only the entries of an update with the largest magnitudes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flwr_leakage.defenses.base import UpdateDefense
from flwr_leakage.params import Params, ravel, unravel
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update


def _prune(vector: Tensor, prune_ratio: float) -> Tensor:
    # In floating point 0.29 · 100 lies below 29. Rounding first makes the floor 29, not 28.
    dropped = math.floor(round(prune_ratio * vector.numel(), 6))
    if not dropped:
        return vector.clone()
    # NumPy's partition takes a third to a half of the time of torch.topk, and torch.quantile fails
    # above 2²⁴ entries. NaN counts as the largest magnitude, as it does in torch.topk.
    magnitudes = vector.abs().to("cpu", torch.promote_types(vector.dtype, torch.float32))
    threshold = float(np.partition(magnitudes.numpy(), dropped - 1)[dropped - 1])
    kept = ~(magnitudes <= threshold)
    missing = len(vector) - dropped - int(kept.sum())
    # Of several entries equal to the threshold, the first ones are kept, so that exactly
    # ``dropped`` entries are pruned.
    if missing:
        kept[(magnitudes == threshold).nonzero()[:missing, 0]] = True
    return torch.where(kept.to(vector.device), vector, 0.0)


def prune_update(
    delta: Mapping[str, Tensor], prune_ratio: float, per_layer: bool = False
) -> Params:
    """Return new tensors, with the ``floor(prune_ratio · n)`` entries of least magnitude of an
    update's n entries set to zero.

    Zhu, Liu, Han (2019, section 5) propose pruning against gradient inversion; Huang et al. (2021,
    section 3.1) evaluate ratios from 0.5 to 0.999. ``prune_ratio`` lies in [0, 1), and at least one
    entry is kept. With ``per_layer`` each tensor is pruned by itself; otherwise the n entries are
    those of all tensors together.

    Raises:
        ValueError: ``prune_ratio`` lies outside of [0, 1).

    Example:
        >>> prune_update({"w": torch.tensor([3.0, -1.0]), "b": torch.tensor([-2.0])}, 0.4)
        {'w': tensor([3., 0.]), 'b': tensor([-2.])}
    """
    _check_ratio(prune_ratio)
    if per_layer:
        return {
            name: _prune(value.reshape(-1), prune_ratio).reshape(value.shape)
            for name, value in delta.items()
        }
    pruned = unravel(_prune(ravel(delta), prune_ratio), delta)
    return {name: value.to(delta[name].dtype) for name, value in pruned.items()}


def _check_ratio(prune_ratio: float) -> None:
    if not 0 <= prune_ratio < 1:
        raise ValueError(f"prune_ratio must lie in [0, 1), got {prune_ratio}.")


@dataclass(frozen=True)
class GradientPruning(UpdateDefense):
    """A defense that sends only the entries of largest magnitude; see :func:`prune_update`.

    Attributes:
        prune_ratio: the share of pruned entries, in [0, 1).
        per_layer: whether the share is of each tensor's entries, and not of all tensors' together.
    """

    prune_ratio: float = 0.99
    per_layer: bool = False

    def __post_init__(self) -> None:
        _check_ratio(self.prune_ratio)

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, for the sentences of the report."""
        of = "of each layer’s numbers" if self.per_layer else "of the update’s numbers"
        return f"only the largest {100 * (1 - self.prune_ratio):g} % {of} are sent"

    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the update's tensors with their entries of least magnitude set to zero."""
        return prune_update(update.delta, self.prune_ratio, self.per_layer)
