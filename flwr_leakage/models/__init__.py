"""Define the networks of papers on gradient leakage, and draw their initial weights.

Every network takes ``input_shape`` (C, H, W) and the number K of classes first, maps inputs (B, C,
H, W) to logits (B, K), and is twice differentiable almost everywhere. ``TextTransformer`` takes
token ids in the place of images.
"""

from flwr_leakage.models.alexnet import AlexNet
from flwr_leakage.models.convnet import ConvNet
from flwr_leakage.models.initialization import initialize
from flwr_leakage.models.lenet import LeNet
from flwr_leakage.models.linear import Linear
from flwr_leakage.models.mlp import MLP
from flwr_leakage.models.resnet import (
    ResNet8,
    ResNet18,
    ResNet34,
    ResNet50,
    ResNet101,
    ResNet152,
)
from flwr_leakage.models.shufflenet import ShuffleNet
from flwr_leakage.models.shufflenet_v2 import ShuffleNetV2
from flwr_leakage.models.text_transformer import TextTransformer
from flwr_leakage.models.vgg import VGG9

__all__ = [
    "MLP",
    "VGG9",
    "AlexNet",
    "ConvNet",
    "LeNet",
    "Linear",
    "ResNet8",
    "ResNet18",
    "ResNet34",
    "ResNet50",
    "ResNet101",
    "ResNet152",
    "ShuffleNet",
    "ShuffleNetV2",
    "TextTransformer",
    "initialize",
]
