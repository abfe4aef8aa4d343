"""Starts of Krylov methods for the largest eigenvalue of JJᵀ."""

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators import FunctionJacobian
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.spectral.estimate import normalize_rows
from flwr_leakage.spectral.largest import largest_eigenvalue

LAST_LAYER_TOLERANCE = 1e-3
LAST_LAYER_STEPS = 20


def gradient_start(operator: FunctionJacobian, generator: Draws) -> Float[Tensor, "S N"]:
    """Return Jg plus a tenth of noise; Jg has a large component along JJᵀ's top eigenvectors.

    Args:
        operator: the operator Jᵀ, whose value is g.
        generator: draws the noise, without which a start could miss an eigenvector completely.
    """
    return _with_noise(operator.value_product, generator)


def last_layer_start(
    operator: FunctionJacobian, last_layer: FunctionJacobian, generator: Draws
) -> Float[Tensor, "S N"]:
    """Return the top eigenvector of the last layer's share of JJᵀ, plus a tenth of noise.

    JJᵀ is a sum over the layers' parameters. The last layer's term needs no other layer's weight
    gradient, and a product with it costs a third (LeNet) to a tenth (ResNet-18) of a whole one.
    If the largest eigenvalues lie close together, as on untrained ReLU networks, most steps then
    use the cheap product. If few steps are enough anyway, this start saves none.

    Args:
        operator: the operator Jᵀ of the whole gradient.
        last_layer: the operator Jᵀ of the last layer's gradient.
        generator: draws the noise.
    """
    start = gradient_start(operator, generator)
    found = largest_eigenvalue(last_layer, start, LAST_LAYER_TOLERANCE, LAST_LAYER_STEPS)
    return _with_noise(found.vectors, generator)


def _with_noise(vectors: Tensor, generator: Draws) -> Tensor:
    unit, length = normalize_rows(vectors)
    noise, _ = normalize_rows(normal_rows(unit.shape, generator).to(unit))
    return torch.where(length[:, None] > 0, unit + 0.1 * noise, noise)
