"""Define multinomial logistic regression, the model that leaks its input in closed form."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from flwr_leakage.models.layers import check_sizes


class Linear(nn.Module):
    """The linear model with logits W x + b of the flattened input x.

    The gradient of the cross-entropy L on one sample tells the sample exactly:
    ∂L/∂W[k] = (p_k − y_k)·x and ∂L/∂b[k] = p_k − y_k, where p are the predicted probabilities and y
    is the one-hot label (Phong et al. 2018, Section 3).

    Args:
        input_shape: (C, H, W) of an input.
        num_classes: the number K of classes.
    """

    def __init__(self, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        self.fc = nn.Linear(math.prod(input_shape), num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K) of inputs (B, C, H, W)."""
        return self.fc(inputs.flatten(1))
