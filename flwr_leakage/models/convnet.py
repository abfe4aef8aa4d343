"""Define plain convolutional networks, among them that of Geiping et al. 2020."""

from collections.abc import Sequence

from torch import Tensor, nn

from flwr_leakage.models.layers import (
    check_positive,
    check_sizes,
    count_features,
    make_activation,
)


class ConvNet(nn.Module):
    """A stack of 3×3 convolutions, whose flattened output enters one linear layer.

    The defaults are the ConvNet of Geiping et al. 2020, as their published code builds it for
    32×32 inputs: eight convolutions of w, 2w, 2w, 4w, 4w, 4w, 4w, 4w channels with w = 64, each
    followed by BatchNorm and ReLU, and 3×3 max pooling after the sixth and the eighth. The
    linear layer takes all values of the last output: 36·w at 32×32.

    With ``channel_multipliers=(1, 2, 2)``, ``strides=(1, 2, 2)``, ``width=16``,
    ``pool_after=()`` and ``use_batch_norm=False`` it is a small ReLU network without pooling,
    of 16, 32 and 32 channels.

    Args:
        input_shape: (C, H, W) of an input.
        num_classes: the number K of classes.
        width: the unit w of the numbers of channels.
        channel_multipliers: the number of channels of each convolution, in units of w.
        strides: the stride of each convolution; ``None`` for strides of 1.
        pool_after: the numbers, from 1, of the convolutions that are followed by 3×3 max pooling.
        use_batch_norm: whether BatchNorm stands between each convolution and its activation.
        activation: the name of the activation, such as ``relu``; see ``make_activation``.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        width: int = 64,
        channel_multipliers: Sequence[int] = (1, 2, 2, 4, 4, 4, 4, 4),
        strides: Sequence[int] | None = None,
        pool_after: Sequence[int] = (6, 8),
        use_batch_norm: bool = True,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        check_positive(width=width)
        depth = len(channel_multipliers)
        strides = [1] * depth if strides is None else strides
        if len(strides) != depth:
            raise ValueError(f"strides must have one entry for each of {depth} convolutions.")
        if not set(pool_after) <= set(range(1, depth + 1)):
            raise ValueError(f"pool_after must name convolutions 1 … {depth}, got {pool_after}.")
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for index, (multiplier, stride) in enumerate(
            zip(channel_multipliers, strides, strict=True), start=1
        ):
            layers.append(nn.Conv2d(channels, multiplier * width, 3, stride, 1))
            channels = multiplier * width
            if use_batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            layers.append(make_activation(activation))
            if index in pool_after:
                layers.append(nn.MaxPool2d(3))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(count_features(self.features, input_shape), num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K) of inputs (B, C, H, W)."""
        return self.fc(self.features(inputs).flatten(1))
