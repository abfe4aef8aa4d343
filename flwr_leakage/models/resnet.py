"""Residual networks for 32×32 inputs, with or without their skip connections."""

from collections.abc import Sequence

from torch import Tensor, nn

from flwr_leakage.models.layers import check_positive, check_sizes, make_activation


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm; the input is added before the last activation.

    Where the shape changes, the shortcut is a 1×1 convolution with BatchNorm (option B of
    He et al. 2016). Without ``skip_connection`` the block is the two convolutions alone.
    """

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
        self.shortcut: nn.Module | None = None
        if skip_connection and (stride != 1 or in_channels != channels):
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
        elif skip_connection:
            self.shortcut = nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, channels, H/stride, W/stride)."""
        residual = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(inputs)))))
        if self.shortcut is not None:
            residual = residual + self.shortcut(inputs)
        return self.act2(residual)


class ResNet(nn.Module):
    """A 3×3 convolution, stages of basic blocks, global average pooling, a linear layer.

    The first convolution has stride 1 and no max pooling follows it, as is usual at 32×32
    (He et al. 2016, Section 4.2). Each stage after the first halves the resolution and doubles
    the channels.

    Args:
        input_shape: (C, H, W).
        num_classes: K.
        blocks_per_stage: one entry a stage.
        width: channels of the first stage before widening.
        width_factor: multiplies the channels of all stages.
        skip_connections: whether blocks add their input.
        activation: see ``make_activation``.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        blocks_per_stage: Sequence[int],
        width: int,
        width_factor: int = 1,
        skip_connections: bool = True,
        activation: str = "relu",
    ) -> None:
        super().__init__()
        check_sizes(input_shape, num_classes)
        check_positive(width=width, width_factor=width_factor)
        channels = width * width_factor
        self.conv1 = nn.Conv2d(input_shape[0], channels, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.act1 = make_activation(activation)
        blocks: list[nn.Module] = []
        in_channels = channels
        for stage, num_blocks in enumerate(blocks_per_stage):
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                stage_channels = channels * 2**stage
                blocks.append(
                    BasicBlock(in_channels, stage_channels, stride, skip_connections, activation)
                )
                in_channels = stage_channels
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(in_channels, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (B, K) of inputs (B, C, H, W)."""
        features = self.blocks(self.act1(self.bn1(self.conv1(inputs))))
        return self.fc(features.mean((2, 3)))


class ResNet8(ResNet):
    """He et al. 2016's CIFAR family with n = 1: 6n + 2 = 8 layers of 16, 32, 64 channels.

    Shortcuts are 1×1 convolutions (option B), where the paper's CIFAR networks pad with zeros
    (option A).

    Args:
        input_shape: (C, H, W).
        num_classes: K.
        width: channels of the first stage before widening.
        width_factor: multiplies the channels of all stages.
        skip_connections: whether blocks add their input.
        activation: see ``make_activation``.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        width: int = 16,
        width_factor: int = 1,
        skip_connections: bool = True,
        activation: str = "relu",
    ) -> None:
        super().__init__(
            input_shape, num_classes, (1, 1, 1), width, width_factor, skip_connections, activation
        )


class ResNet18(ResNet):
    """ResNet-18 (He et al. 2016) for 32×32 inputs: 2, 2, 2, 2 blocks of 64 … 512 channels.

    11,173,962 parameters on CIFAR-10 with the default width.

    Args:
        input_shape: (C, H, W).
        num_classes: K.
        width: channels of the first stage before widening; 16 for a narrow one.
        width_factor: multiplies the channels of all stages (1, 2, 4 in the papers).
        skip_connections: whether blocks add their input.
        activation: see ``make_activation``.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        width: int = 64,
        width_factor: int = 1,
        skip_connections: bool = True,
        activation: str = "relu",
    ) -> None:
        super().__init__(
            input_shape,
            num_classes,
            (2, 2, 2, 2),
            width,
            width_factor,
            skip_connections,
            activation,
        )
