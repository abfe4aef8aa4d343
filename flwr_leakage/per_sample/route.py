"""Choose whether a model is differentiated by ``torch.func`` or, sample by sample, by autograd."""

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.per_sample.samples import separate
from flwr_leakage.records import Batch


def differentiable(
    gradient_map: GradientMap, params: Params, buffers: Params, batch: Batch
) -> GradientMap:
    """Return the gradient map, or one by plain autograd if ``torch.func`` refuses its model.

    ``torch.func.vmap`` refuses recurrent layers, control flow that depends on data, assignment into
    tensors, and autograd functions without ``setup_context``. Plain autograd takes one sample at a
    time. The attribute ``one_by_one`` of the returned map then holds the reason. The check costs
    the gradients of two samples. If both ways fail, the map is returned as it is, and the code that
    uses it reports the error.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        params: the parameters by name.
        buffers: the buffers by name.
        batch: samples, of which two are used.
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
