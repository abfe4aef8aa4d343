"""Define a ShuffleNet (version 1) for 32×32 inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flwr_leakage.models.layers import check_positive, check_sizes, make_activation

_STAGE_BLOCKS = (4, 8, 4)
# For each number g of groups, the channels of stage 2 at scale 1 (Zhang et al. 2018, Table 1).
_STAGE2_CHANNELS = {1: 144, 2: 200, 3: 240, 4: 272, 8: 384}
_STEM_CHANNELS = 24


def shuffle_channels(inputs: Tensor, groups: int) -> Tensor:
    """Return inputs (B, C, H, W) with the channels of several groups interleaved.

    Channel j of group i, of n consecutive channels each, becomes channel j · ``groups`` + i. The
    number of groups divides C.

    Example:
        >>> shuffle_channels(torch.arange(4.0).reshape(1, 4, 1, 1), 2).flatten()
        tensor([0., 2., 1., 3.])
    """
    batch, channels, height, width = inputs.shape
    grouped = inputs.reshape(batch, groups, channels // groups, height, width)
    return grouped.transpose(1, 2).reshape(batch, channels, height, width)


class ShuffleUnit(nn.Module):
    """A unit of grouped 1×1, depthwise 3×3 and grouped 1×1 convolutions with BatchNorm.

    The channels are shuffled after the first convolution (Zhang et al. 2018, Figure 2). With stride
    1 the input is added to the result; with stride 2 the average-pooled input is concatenated with
    the result.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        groups: int,
        first_groups: int,
        stride: int,
        activation: str,
    ) -> None:
        super().__init__()
        self.groups = groups
        bottleneck = channels // 4
        branch = channels - in_channels if stride == 2 else channels
        self.conv1 = nn.Conv2d(in_channels, bottleneck, 1, groups=first_groups, bias=False)
        self.bn1 = nn.BatchNorm2d(bottleneck)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(bottleneck, bottleneck, 3, stride, 1, groups=bottleneck, bias=False)
        self.bn2 = nn.BatchNorm2d(bottleneck)
        self.conv3 = nn.Conv2d(bottleneck, branch, 1, groups=groups, bias=False)
        self.bn3 = nn.BatchNorm2d(branch)
        self.act3 = make_activation(activation)
        self.pool = nn.AvgPool2d(3, 2, 1) if stride == 2 else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the unit's output (B, channels, H/stride, W/stride) for inputs (B, C, H, W)."""
        hidden = shuffle_channels(self.act1(self.bn1(self.conv1(inputs))), self.groups)
        hidden = self.bn3(self.conv3(self.bn2(self.conv2(hidden))))
        if self.pool is None:
            return self.act3(inputs + hidden)
        return self.act3(torch.cat([self.pool(inputs), hidden], 1))


class ShuffleNet(nn.Module):
    """ShuffleNet, version 1 at scale 1 (Zhang, Zhou, Lin, Sun 2018).

    It has stages of 4, 8, 4 units, with 200, 400, 800 channels for two groups (the paper's Table
    1). As in the paper, the first 1×1 convolution of the first stage is not grouped. The paper
    takes inputs of 224×224; for 32×32 the first convolution has stride 1 here, and no max pooling
    follows it.

    Args:
        input_shape: (C, H, W) of an input.
        num_classes: the number K of classes.
        groups: the number of groups of the 1×1 convolutions, one of 1, 2, 3, 4, 8. It determines
            the numbers of channels.
        activation: the name of the activation, such as ``relu``; see ``make_activation``.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        groups: int = 2,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        check_positive(groups=groups)
        if groups not in _STAGE2_CHANNELS:
            raise ValueError(f"groups must be one of {sorted(_STAGE2_CHANNELS)}, got {groups}.")
        self.conv1 = nn.Conv2d(input_shape[0], _STEM_CHANNELS, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(_STEM_CHANNELS)
        self.act1 = make_activation(activation)
        units: list[nn.Module] = []
        in_channels = _STEM_CHANNELS
        for stage, num_units in enumerate(_STAGE_BLOCKS):
            channels = _STAGE2_CHANNELS[groups] * 2**stage
            for index in range(num_units):
                first_groups = 1 if stage == 0 and index == 0 else groups
                stride = 2 if index == 0 else 1
                units.append(
                    ShuffleUnit(in_channels, channels, groups, first_groups, stride, activation)
                )
                in_channels = channels
        self.units = nn.Sequential(*units)
        self.fc = nn.Linear(in_channels, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K) of inputs (B, C, H, W)."""
        features = self.units(self.act1(self.bn1(self.conv1(inputs))))
        return self.fc(features.mean((2, 3)))
