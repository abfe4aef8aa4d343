"""Which samples to score, where there are more than one can afford."""

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Exposure
from flwr_leakage.scores.gradient_norm import GradientNorm


def select_samples(
    gradient_map: GradientMap,
    exposure: Exposure,
    max_samples: int,
    how: str,
    generator: torch.Generator,
) -> list[int]:
    """Indices of at most ``max_samples`` samples, ascending, for ``compute_scores(samples=…)``.

    Args:
        gradient_map: of the client's model and loss.
        exposure: the client's round.
        max_samples: at least 1.
        how: ``first`` ones; a ``random`` set; those with the ``largest_gradient``, which fixed
            noise protects least, at the cost of one gradient each.
        generator: for ``random``.
    """
    if max_samples < 1:
        raise ValueError(f"max_samples must be at least 1, got {max_samples}.")
    count = len(exposure.private)
    keep = min(max_samples, count)
    if how == "first":
        return list(range(keep))
    if how == "random":
        return sorted(torch.randperm(count, generator=generator)[:keep].tolist())
    if how == "largest_gradient":
        norms = GradientNorm()(gradient_map, exposure, generator)[0].values
        order = sorted(range(count), key=lambda i: -(norms[i] or 0.0))
        return sorted(order[:keep])
    raise ValueError(f"how must be 'first', 'random' or 'largest_gradient', got {how!r}.")
