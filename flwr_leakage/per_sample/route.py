"""Choose how a model is differentiated: all samples at once, or one by one."""

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.per_sample.samples import separate
from flwr_leakage.records import Batch


def differentiable(
    gradient_map: GradientMap, params: Params, buffers: Params, batch: Batch
) -> GradientMap:
    """Return the map itself, or, where ``torch.func`` cannot take its model, one by plain autograd.

    ``torch.func.vmap`` refuses recurrent layers, flow that depends on data, assignment into
    tensors, and autograd functions without ``setup_context``. Plain autograd takes them, one sample
    at a time; ``one_by_one`` of the result says why. It costs the gradients of two samples.

    A model that fails both ways is returned as it is: what uses it says what is wrong.
    """
    if gradient_map.one_by_one or not len(batch):
        return gradient_map
    few = batch[:2]
    ones = torch.ones(len(few), dtype=torch.float64)
    try:
        separate(gradient_map, params, buffers, few, ones).gradients()
    except Exception as error:  # torch.func may raise any error
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {lines[0][:200]}"
        plain = gradient_map.differentiated_by_autograd(reason)
        try:
            separate(plain, params, buffers, few, ones).gradients()
        except Exception:
            return gradient_map
        return plain
    return gradient_map
