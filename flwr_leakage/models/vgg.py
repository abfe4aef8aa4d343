"""Define the VGG-9 of federated learning papers."""

from collections.abc import Sequence

from torch import Tensor, nn

from flwr_leakage.models.layers import (
    check_positive,
    check_sizes,
    count_features,
    make_activation,
    make_classifier,
)

_STAGES = ((1, 2), (4, 4), (8, 8))


class VGG9(nn.Module):
    """A network of six 3×3 convolutions in three stages and three fully connected layers.

    Simonyan and Zisserman 2015 define no nine-layer VGG; this is the one of Wang et al. 2020
    (FedMA): 32, 64 | 128, 128 | 256, 256 channels, 2×2 max pooling after each stage, two
    hidden layers of 512 units. Its dropout is left out, as no observer knows the masks.

    Args:
        input_shape: (C, H, W) of an input, at least 8×8.
        num_classes: the number K of classes.
        hidden_features: the width of the two hidden fully connected layers.
        use_batch_norm: whether BatchNorm follows each convolution, which it does not in FedMA.
        activation: the name of the activation, such as ``relu``; see ``make_activation``.
        width: the number of channels of the first convolution. All other numbers of channels are
            multiples of it.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        hidden_features: int = 512,
        use_batch_norm: bool = False,
        activation: str = "relu",
        width: int = 32,
    ) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        check_positive(hidden_features=hidden_features, width=width)
        layers: list[nn.Module] = []
        in_channels = input_shape[0]
        for stage in _STAGES:
            for multiplier in stage:
                channels = multiplier * width
                layers.append(nn.Conv2d(in_channels, channels, 3, 1, 1))
                if use_batch_norm:
                    layers.append(nn.BatchNorm2d(channels))
                layers.append(make_activation(activation))
                in_channels = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = make_classifier(
            count_features(self.features, input_shape), hidden_features, num_classes, activation
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K) of inputs (B, C, H, W)."""
        return self.classifier(self.features(inputs).flatten(1))
