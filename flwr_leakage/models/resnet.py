"""Define residual networks (He et al. 2016) for 32×32 and 224×224 inputs.

Their skip connections can be switched off.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor, nn

from flwr_leakage.models.layers import check_positive, check_sizes, make_activation

Stem = Literal["small", "large"]


class BasicBlock(nn.Module):
    """A block of two 3×3 convolutions with BatchNorm, to whose result its input is added.

    The last activation follows the addition. If the shape changes, the input first passes through a
    1×1 convolution with BatchNorm (option B of He et al. 2016). Without ``skip_connection`` the
    input is not added.
    """

    expansion = 1

    def __init__(
        self, in_channels: int, channels: int, stride: int, skip_connection: bool, activation: str
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.act2 = make_activation(activation)
        self.shortcut = make_shortcut(in_channels, channels, stride, skip_connection)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the block's output (B, channels, H/stride, W/stride) for inputs (B, C, H, W)."""
        residual = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(inputs)))))
        if self.shortcut is not None:
            residual = residual + self.shortcut(inputs)
        return self.act2(residual)


class Bottleneck(nn.Module):
    """A block of 1×1, 3×3 and 1×1 convolutions with BatchNorm, to whose result its input is added.

    The last convolution has four times as many channels as the others (He et al. 2016, Fig. 5
    right). The stride is that of the 3×3 convolution, as in torchvision. The shortcut of the input
    is that of ``BasicBlock``.
    """

    expansion = 4

    def __init__(
        self, in_channels: int, channels: int, stride: int, skip_connection: bool, activation: str
    ) -> None:
        super().__init__()
        out_channels = self.expansion * channels
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.act2 = make_activation(activation)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.act3 = make_activation(activation)
        self.shortcut = make_shortcut(in_channels, out_channels, stride, skip_connection)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the block's output (B, 4·channels, H/stride, W/stride) for inputs (B, C, H, W)."""
        residual = self.act1(self.bn1(self.conv1(inputs)))
        residual = self.bn3(self.conv3(self.act2(self.bn2(self.conv2(residual)))))
        if self.shortcut is not None:
            residual = residual + self.shortcut(inputs)
        return self.act3(residual)


def make_shortcut(
    in_channels: int, out_channels: int, stride: int, skip_connection: bool
) -> nn.Module | None:
    """Return the shortcut of a residual block: the layers through which its input passes before the
    addition.

    The shortcut is the identity, or a 1×1 convolution with BatchNorm if the shape changes. It is
    ``None`` without a skip connection.
    """
    if not skip_connection:
        return None
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResNet(nn.Module):
    """A residual network: a convolution, stages of blocks, global average pooling, a linear layer.

    At 32×32 (``stem="small"``) the first convolution is 3×3 with stride 1 and no max pooling
    follows it (He et al. 2016, Section 4.2). At 224×224 (``stem="large"``) it is 7×7 with stride 2,
    before a 3×3 max pooling with stride 2 (their Section 3.3). Each stage after the first halves
    the resolution and doubles the channels. A subclass sets how many blocks each stage has, their
    class, and the default width.

    Args:
        input_shape: (C, H, W) of an input.
        num_classes: the number K of classes.
        width: the number of channels of the first stage, before ``width_factor``; ``None`` for the
            class's ``default_width``.
        width_factor: the factor of the number of channels of all stages.
        skip_connections: whether blocks add their input.
        activation: the name of the activation, such as ``relu``; see ``make_activation``.
        stem: the first layers: ``small`` for 32×32 inputs, ``large`` for 224×224.
    """

    stage_sizes: ClassVar[tuple[int, ...]]
    block_kind: ClassVar[type[BasicBlock] | type[Bottleneck]] = Bottleneck
    default_width: ClassVar[int] = 64

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        width: int | None = None,
        width_factor: int = 1,
        skip_connections: bool = True,
        activation: str = "relu",
        stem: Stem = "small",
    ) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        width = self.default_width if width is None else width
        check_positive(width=width, width_factor=width_factor)
        if stem not in ("small", "large"):
            raise ValueError(f"stem must be small or large, got {stem!r}.")
        channels = width * width_factor
        size, stride, padding = (3, 1, 1) if stem == "small" else (7, 2, 3)
        self.conv1 = nn.Conv2d(input_shape[0], channels, size, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.act1 = make_activation(activation)
        self.pool1 = nn.Identity() if stem == "small" else nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        in_channels, block = channels, self.block_kind
        for stage, num_blocks in enumerate(self.stage_sizes):
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                stage_channels = channels * 2**stage
                blocks.append(
                    block(in_channels, stage_channels, stride, skip_connections, activation)
                )
                in_channels = block.expansion * stage_channels
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(in_channels, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, K) of inputs (B, C, H, W)."""
        features = self.blocks(self.pool1(self.act1(self.bn1(self.conv1(inputs)))))
        return self.fc(features.mean((2, 3)))


class ResNet8(ResNet):
    """The smallest network of He et al. 2016's CIFAR family: 8 layers of 16, 32, 64 channels.

    The family has 6n + 2 layers, and here n = 1. Where the shape changes, a block's input is added
    after a 1×1 convolution (option B); the paper's CIFAR networks pad it with zeros (option A).
    """

    stage_sizes = (1, 1, 1)
    block_kind = BasicBlock
    default_width = 16


class ResNet18(ResNet):
    """ResNet-18 (He et al. 2016): stages of 2, 2, 2, 2 basic blocks with 64 to 512 channels.

    It has 11,173,962 parameters on CIFAR-10 with the default width.
    """

    stage_sizes = (2, 2, 2, 2)
    block_kind = BasicBlock


class ResNet34(ResNet):
    """ResNet-34 (He et al. 2016): stages of 3, 4, 6, 3 basic blocks, with 512 channels at the end.

    It has 21,797,672 parameters with 1,000 classes, 224×224 inputs and the default width.
    """

    stage_sizes = (3, 4, 6, 3)
    block_kind = BasicBlock


class ResNet50(ResNet):
    """ResNet-50 (He et al. 2016): stages of 3, 4, 6, 3 bottlenecks, with 2,048 channels at the end.

    It has 25,557,032 parameters with 1,000 classes, 224×224 inputs and the default width.
    """

    stage_sizes = (3, 4, 6, 3)


class ResNet101(ResNet):
    """ResNet-101 (He et al. 2016): stages of 3, 4, 23, 3 bottlenecks, 2,048 channels at the end.

    It has 44,549,160 parameters with 1,000 classes, 224×224 inputs and the default width.
    """

    stage_sizes = (3, 4, 23, 3)


class ResNet152(ResNet):
    """ResNet-152 (He et al. 2016): stages of 3, 8, 36, 3 bottlenecks, 2,048 channels at the end.

    It has 60,192,808 parameters with 1,000 classes, 224×224 inputs and the default width.
    """

    stage_sizes = (3, 8, 36, 3)
