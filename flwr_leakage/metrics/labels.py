"""Whether an attack found the private labels."""

import torch
from jaxtyping import Int
from torch import Tensor


def class_indices(targets: Tensor) -> Int[Tensor, " B"]:
    """Class indices of targets (B,), or the largest entry of soft targets (B, K)."""
    if targets.ndim == 1:
        return targets.long()
    if targets.ndim == 2:
        return targets.argmax(1)
    raise ValueError(f"targets must be (B,) or (B, K), got {tuple(targets.shape)}.")


def label_accuracy(predicted: Tensor, truth: Tensor) -> tuple[float, ...]:
    """1 for each sample whose label was found, else 0.

    Args:
        predicted: (B,) class indices or (B, K) probabilities.
        truth: likewise; soft labels count by their largest entry.

    Example:
        >>> label_accuracy(torch.tensor([3, 1]), torch.tensor([[0.1, 0.9], [0.2, 0.8]]))
        (0.0, 1.0)
    """
    hits = class_indices(predicted) == class_indices(truth)
    return tuple(hits.to(torch.float64).tolist())
