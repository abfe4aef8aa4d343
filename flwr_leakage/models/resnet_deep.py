"""The deeper residual networks of He et al. 2016, for 32×32 and 224×224 inputs."""

from collections.abc import Sequence
from typing import ClassVar

from flwr_leakage.models.resnet import BasicBlock, Bottleneck, ResNet, Stem


class _DeepResNet(ResNet):
    """Four stages of blocks, whose numbers and kind a subclass says.

    Args:
        input_shape: (C, H, W).
        num_classes: K.
        width: channels of the first stage before widening.
        width_factor: multiplies the channels of all stages.
        skip_connections: whether blocks add their input.
        activation: see ``make_activation``.
        stem: ``small`` for 32×32, ``large`` for 224×224.
    """

    stage_sizes: ClassVar[tuple[int, ...]]
    block_kind: ClassVar[type[BasicBlock] | type[Bottleneck]] = Bottleneck

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        width: int = 64,
        width_factor: int = 1,
        skip_connections: bool = True,
        activation: str = "relu",
        stem: Stem = "small",
    ) -> None:
        super().__init__(
            input_shape,
            num_classes,
            self.stage_sizes,
            width,
            width_factor,
            skip_connections,
            activation,
            self.block_kind,
            stem,
        )


class ResNet34(_DeepResNet):
    """ResNet-34 (He et al. 2016): 3, 4, 6, 3 basic blocks, 512 channels at the end.

    21,797,672 parameters with 1,000 classes, 224×224 inputs and the default width.
    """

    stage_sizes = (3, 4, 6, 3)
    block_kind = BasicBlock


class ResNet50(_DeepResNet):
    """ResNet-50 (He et al. 2016): 3, 4, 6, 3 bottlenecks, 2,048 channels at the end.

    25,557,032 parameters with 1,000 classes, 224×224 inputs and the default width.
    """

    stage_sizes = (3, 4, 6, 3)


class ResNet101(_DeepResNet):
    """ResNet-101 (He et al. 2016): 3, 4, 23, 3 bottlenecks, 2,048 channels at the end.

    44,549,160 parameters with 1,000 classes, 224×224 inputs and the default width.
    """

    stage_sizes = (3, 4, 23, 3)


class ResNet152(_DeepResNet):
    """ResNet-152 (He et al. 2016): 3, 8, 36, 3 bottlenecks, 2,048 channels at the end.

    60,192,808 parameters with 1,000 classes, 224×224 inputs and the default width.
    """

    stage_sizes = (3, 8, 36, 3)
