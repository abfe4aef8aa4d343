"""Define the LeNet of Deep Leakage from Gradients (Zhu et al. 2019)."""

from collections.abc import Sequence

from torch import Tensor, nn

from flwr_leakage.models.layers import (
    check_positive,
    check_sizes,
    count_features,
    make_activation,
)

_STRIDES = (2, 2, 1, 1)


class LeNet(nn.Module):
    """A network of 5×5 convolutions with sigmoids and one linear layer (Zhu et al. 2019).

    Strides 2, 2, 1, 1 and padding 2 replace the poolings of LeNet-5, so that the network is
    twice differentiable. On CIFAR-10 (3×32×32, 10 classes) four convolutions have 19,438
    parameters. The code that Zhu et al. published, and the "LeNetZhu" of Geiping et al. 2020,
    stop after three (strides 2, 2, 1; 15,826 parameters): ``num_convolutions=3``.

    Args:
        input_shape: (C, H, W) of an input.
        num_classes: the number K of classes.
        channels: the number of channels of every convolution.
        num_convolutions: the number of convolutions, 1 to 4.
        activation: the name of the activation, such as ``sigmoid``; see ``make_activation``.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        channels: int = 12,
        num_convolutions: int = 4,
        activation: str = "sigmoid",
    ) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        check_positive(channels=channels)
        if not 1 <= num_convolutions <= len(_STRIDES):
            raise ValueError(
                f"num_convolutions must lie in 1 … {len(_STRIDES)}, got {num_convolutions}."
            )
        layers: list[nn.Module] = []
        width = input_shape[0]
        for stride in _STRIDES[:num_convolutions]:
            layers += [nn.Conv2d(width, channels, 5, stride, 2), make_activation(activation)]
            width = channels
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(count_features(self.features, input_shape), num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K) of inputs (B, C, H, W)."""
        return self.fc(self.features(inputs).flatten(1))
