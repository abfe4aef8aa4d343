"""J of each sample as a matrix in float64: what scores are compared with."""

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import SampleJacobian
from flwr_leakage.records import Batch


def dense_jacobian(gradient_map: GradientMap, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """J (S, N, P) and the gradients (S, P)."""
    params = {name: value.double() for name, value in gradient_map.params.items()}
    operator = SampleJacobian(gradient_map, params, Batch(batch.inputs.double(), batch.targets))
    return operator.to_dense().transpose(1, 2), operator.value
