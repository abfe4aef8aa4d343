"""Define a ShuffleNet V2 for 32×32 inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flwr_leakage.models.layers import check_positive, check_sizes, make_activation
from flwr_leakage.models.shufflenet import shuffle_channels

_STAGE_BLOCKS = (4, 8, 4)
_STEM_CHANNELS = 24


class ShuffleUnitV2(nn.Module):
    """A unit of 1×1, depthwise 3×3 and 1×1 convolutions on one half of the channels.

    With stride 1 the other half of the channels stays as it is. With stride 2 these convolutions
    take all channels, and so does a second branch of a depthwise 3×3 and a 1×1 convolution. Both
    results are concatenated, and the channels shuffled (Ma et al. 2018, Figure 3 c and d).
    """

    def __init__(self, in_channels: int, channels: int, stride: int, activation: str) -> None:
        super().__init__()
        half = channels // 2
        entering = in_channels if stride == 2 else half
        self.branch = nn.Sequential(
            nn.Conv2d(entering, half, 1, bias=False),
            nn.BatchNorm2d(half),
            make_activation(activation),
            nn.Conv2d(half, half, 3, stride, 1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            make_activation(activation),
        )
        self.shortcut: nn.Module | None = None
        if stride == 2:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, in_channels, 3, 2, 1, groups=in_channels, bias=False),
                nn.BatchNorm2d(in_channels),
                nn.Conv2d(in_channels, half, 1, bias=False),
                nn.BatchNorm2d(half),
                make_activation(activation),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the unit's output (B, channels, H/stride, W/stride) for inputs (B, C, H, W)."""
        if self.shortcut is None:
            kept, entering = inputs.chunk(2, 1)
        else:
            kept, entering = self.shortcut(inputs), inputs
        return shuffle_channels(torch.cat([kept, self.branch(entering)], 1), 2)


class ShuffleNetV2(nn.Module):
    """ShuffleNet V2, by default at scale 1 (Ma, Zhang, Zheng, Sun 2018).

    It has stages of 4, 8, 4 units, a 1×1 convolution, global average pooling and a linear layer
    (the paper's Table 5). The paper takes inputs of 224×224; for 32×32 the first convolution has
    stride 1 here, and no max pooling follows it. This is the ShuffleNet that LAVP (Hong et al.
    2024) cites.

    Args:
        input_shape: (C, H, W) of an input.
        num_classes: the number K of classes.
        stage_channels: the numbers of channels of the three stages, all even; (48, 96, 192) is the
            paper's scale 0.5.
        last_channels: the number of channels of the last convolution.
        activation: the name of the activation, such as ``relu``; see ``make_activation``.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        stage_channels: Sequence[int] = (116, 232, 464),
        last_channels: int = 1024,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        check_positive(last_channels=last_channels)
        if len(stage_channels) != 3 or any(c < 2 or c % 2 for c in stage_channels):
            raise ValueError(
                f"stage_channels must be 3 positive even numbers, got {list(stage_channels)}."
            )
        self.stem = nn.Sequential(
            nn.Conv2d(input_shape[0], _STEM_CHANNELS, 3, 1, 1, bias=False),
            nn.BatchNorm2d(_STEM_CHANNELS),
            make_activation(activation),
        )
        units: list[nn.Module] = []
        in_channels = _STEM_CHANNELS
        for channels, count in zip(stage_channels, _STAGE_BLOCKS, strict=True):
            for index in range(count):
                stride = 2 if index == 0 else 1
                units.append(ShuffleUnitV2(in_channels, channels, stride, activation))
                in_channels = channels
        self.units = nn.Sequential(*units)
        self.last = nn.Sequential(
            nn.Conv2d(in_channels, last_channels, 1, bias=False),
            nn.BatchNorm2d(last_channels),
            make_activation(activation),
        )
        self.fc = nn.Linear(last_channels, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K) of inputs (B, C, H, W)."""
        return self.fc(self.last(self.units(self.stem(inputs))).mean((2, 3)))
