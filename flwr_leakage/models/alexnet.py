"""Define an AlexNet for 32×32 inputs."""

from collections.abc import Sequence

from torch import Tensor, nn

from flwr_leakage.models.layers import (
    check_positive,
    check_sizes,
    count_features,
    make_activation,
    make_classifier,
)


class AlexNet(nn.Module):
    """A network of five convolutions and three fully connected layers (Krizhevsky et al. 2012).

    Channels 64, 192, 384, 256, 256 are those of the one-column version (Krizhevsky 2014), which
    torchvision has too. The paper defines it for inputs of 224×224. Here it is adapted to small
    inputs, for any ``input_shape``: the first convolution is 3×3 with stride 2, not 11×11 with
    stride 4; the second is 3×3 in place of 5×5; the three poolings are 2×2 and do not overlap.
    Local response normalisation and dropout are left out. At 32×32 the convolutions leave 256×2×2
    values.

    Args:
        input_shape: (C, H, W) of an input, at least 16×16.
        num_classes: the number K of classes.
        hidden_features: the width of the two hidden fully connected layers.
        activation: the name of the activation, such as ``relu``; see ``make_activation``.
        width: the number of channels of the first convolution. All other numbers of channels are
            multiples of it.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        hidden_features: int = 4096,
        activation: str = "relu",
        width: int = 64,
    ) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        check_positive(hidden_features=hidden_features, width=width)
        self.features = nn.Sequential(
            nn.Conv2d(input_shape[0], width, 3, 2, 1),
            make_activation(activation),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 3 * width, 3, 1, 1),
            make_activation(activation),
            nn.MaxPool2d(2),
            nn.Conv2d(3 * width, 6 * width, 3, 1, 1),
            make_activation(activation),
            nn.Conv2d(6 * width, 4 * width, 3, 1, 1),
            make_activation(activation),
            nn.Conv2d(4 * width, 4 * width, 3, 1, 1),
            make_activation(activation),
            nn.MaxPool2d(2),
        )
        self.classifier = make_classifier(
            count_features(self.features, input_shape), hidden_features, num_classes, activation
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K) of inputs (B, C, H, W)."""
        return self.classifier(self.features(inputs).flatten(1))
