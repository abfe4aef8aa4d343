"""Check whether a model, in its present mode, computes the function that is scored."""

import torch
from torch import Tensor, nn

from flwr_leakage.forward import logits_of
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.normalization import BatchNormMode, with_stateless_batch_norm
from flwr_leakage.records import Batch

SAME = 1e-4
"""The relative difference up to which the logits of two forward passes count as equal. With a
larger one, weak dropout would not be noticed; with a smaller one, rounding would be reported."""
_MOST_SAMPLES = 8


def mode_warnings(
    model: nn.Module, mode: BatchNormMode, gradient_map: GradientMap, batch: Batch
) -> list[str]:
    """Return warnings of parts of a model in train mode that scores leave out, such as dropout.

    A copy of the model, with BatchNorm made stateless in ``mode``, is run twice on a few samples of
    ``batch``. If the two runs differ, the model draws random numbers. If they differ from the
    logits of ``gradient_map``, which is scored, the model computes another function in train mode
    than in eval mode. A model in eval mode is not run.
    """
    switched = [
        f"{name or type(layer).__name__} ({layer})"
        for name, layer in model.named_modules()
        if layer.training and "dropout" in type(layer).__name__.lower()
    ]
    if not any(layer.training for layer in model.modules()) or not len(batch):
        return []
    few = batch.inputs[:_MOST_SAMPLES]
    own = with_stateless_batch_norm(model, mode)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            first, second = logits_of(own(few)), logits_of(own(few))
            scored = gradient_map.logits(gradient_map.params, few)
    except (RuntimeError, TypeError, ValueError, IndexError):
        # There is no warning: if the model or its inputs are wrong, the scores report the error.
        return []
    named = f": {', '.join(switched[:3])}" if switched else ""
    if _differ(first, second):
        return [
            f"the model draws random numbers while it trains{named}; they were switched off to "
            f"score it, so that these numbers are not of the gradient that is sent, whose masks "
            f"nobody knows"
        ]
    if _differ(first, scored):
        return [
            f"the model computes something else in train mode{named}: its eval mode was scored, "
            f"which is not what trains"
        ]
    return []


def _differ(left: Tensor, right: Tensor) -> bool:
    scale = float(left.abs().max().clamp_min(torch.finfo(left.dtype).tiny))
    return left.shape != right.shape or float((left - right).abs().max()) > SAME * scale
