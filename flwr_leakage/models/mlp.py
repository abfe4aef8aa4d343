"""Define a multilayer perceptron."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from flwr_leakage.models.layers import check_positive, check_sizes, make_activation


class MLP(nn.Module):
    """A network of fully connected layers with an activation between them.

    The default widths are those of Geiping et al. 2020's published code: three hidden layers
    of 1,024 units.

    Args:
        input_shape: (C, H, W) of an input.
        num_classes: the number K of classes.
        hidden_features: the widths of the hidden layers; empty for a linear model.
        activation: the name of the activation, such as ``relu``; see ``make_activation``.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        hidden_features: Sequence[int] = (1024, 1024, 1024),
        activation: str = "relu",
    ) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        layers: list[nn.Module] = []
        width = math.prod(input_shape)
        for hidden in hidden_features:
            check_positive(hidden_features=hidden)
            layers += [nn.Linear(width, hidden), make_activation(activation)]
            width = hidden
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K) of inputs (B, C, H, W)."""
        return self.fc(self.features(inputs.flatten(1)))
