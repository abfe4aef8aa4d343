"""The networks that the pinned cases attack, in the spellings of several authors.

Each function builds one network for images (C, H, W) of ten classes. The caller seeds the global
generator, and nothing else decides the weights.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


class Call(nn.Module):
    """A function as a layer of ``nn.Sequential``."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mlp(*widths: int, pixels=64, act=nn.ReLU, bias=True, last_bias=True, behind=()):
    """Linear layers on the flattened image; ``behind`` follows each activation."""
    layers, inputs = [nn.Flatten()], pixels
    for width in widths:
        layers += [nn.Linear(inputs, width, bias=bias), act(), *(make() for make in behind)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, CLASSES, bias=last_bias))


def convnet(
    *widths: int, shape=(1, 8, 8), act=nn.ReLU, strides=(1,), kernel=3, pool=None, norm=None,
    hidden=(), bias=True, last_bias=True, average=False, spread=0.0,
) -> nn.Sequential:  # fmt: skip
    """Convolutions, each with a norm, an activation and pooling where these are given.

    ``hidden`` are the widths of linear layers behind, ``average`` pools all positions before
    them. ``spread`` redraws all parameters from a uniform law of that half width, as DLG does.
    """
    layers, inputs = [], shape[0]
    for index, width in enumerate(widths):
        stride = strides[min(index, len(strides) - 1)]
        layers.append(nn.Conv2d(inputs, width, kernel, stride, kernel // 2, bias=bias))
        layers += [norm(width)] if norm else []
        layers += [act()] + ([pool()] if pool else [])
        inputs = width
    layers += [nn.AdaptiveAvgPool2d(1)] if average else []
    layers.append(nn.Flatten())
    sizes = [nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[1], *hidden]
    for before, after in zip(sizes, hidden, strict=False):
        layers += [nn.Linear(before, after), act()]
    network = nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES, bias=last_bias))
    if spread:
        for value in network.parameters():
            nn.init.uniform_(value, -spread, spread)
    return settled(network)


def settled(network: nn.Module) -> nn.Module:
    """BatchNorm with statistics and weights as after some training, in eval mode."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)
    return network


def lenet(channels=6, act=nn.Sigmoid, size=8) -> nn.Sequential:
    """LeNet of the code of DLG in small: strided 5×5 convolutions, wide uniform weights."""
    return convnet(
        channels, channels, shape=(1, size, size), act=act, strides=(2, 1), kernel=5, spread=0.5
    )


class FunctionalMlp(nn.Module):
    """A perceptron in functions, which views and rescales its input in its own way."""

    def __init__(self, width=40, view="flatten", relu=F.relu, scaled=False):
        super().__init__()
        self.one, self.two = nn.Linear(64, width), nn.Linear(width, CLASSES)
        self.view, self.relu, self.scaled = view, relu, scaled

    def forward(self, x: Tensor) -> Tensor:
        if self.scaled:
            x = (x.permute(0, 2, 3, 1).flip(1) - 0.3) / 0.7
        if self.view == "view":
            x = x.contiguous().view(x.size(0), -1)
        elif self.view == "reshape":
            x = x.reshape(len(x), -1)
        else:
            x = torch.flatten(x, 1)
        return self.two(self.relu(self.one(x)))


class OwnWeights(nn.Module):
    """Weights (inputs, outputs) of its own, multiplied without ``nn.Linear``."""

    def __init__(self, width=40, logarithms=True):
        super().__init__()
        self.w1, self.c1 = (
            nn.Parameter(torch.randn(64, width) / 8),
            nn.Parameter(torch.zeros(width)),
        )
        self.w2, self.c2 = nn.Parameter(torch.randn(width, 10) / 6), nn.Parameter(torch.zeros(10))
        self.logarithms = logarithms

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.addmm(self.c1, x.reshape(len(x), -1), self.w1).relu()
        if self.logarithms:
            return (hidden @ self.w2 + self.c2).log_softmax(1)
        return torch.einsum("nf,fk->nk", hidden, self.w2) + self.c2


class ResidualMlp(nn.Module):
    """The second layer's inputs go around it, too, and are added or joined."""

    def __init__(self, width=80, joined=False):
        super().__init__()
        self.one, self.two = nn.Linear(64, width), nn.Linear(width, width)
        self.head, self.joined = nn.Linear(width * (1 + joined), CLASSES), joined

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.one(x.flatten(1)))
        block = F.relu(self.two(features))
        return self.head(torch.cat([features, block], 1) if self.joined else features + block)


class FunctionalCnn(nn.Module):
    """Convolutions in functions: any ReLU, max or average pooling, and a hidden linear layer."""

    def __init__(self, width=6, relu=F.relu, pool=None, hidden=30, size=8):
        super().__init__()
        side = size // 2 if pool else size
        self.one, self.two = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 8, 3, padding=1)
        self.hidden = nn.Linear(8 * side * side, hidden) if hidden else None
        self.head = nn.Linear(hidden or 8 * side * side, CLASSES)
        self.relu, self.pool = relu, pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.two(self.relu(self.one(x))))
        if self.pool is not None:
            x = self.pool(x, 2)
        x = x.reshape(x.shape[0], -1)
        return self.head(x if self.hidden is None else self.relu(self.hidden(x)))


class Block(nn.Module):
    """A basic block of a ResNet, with a projection where the sizes differ."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.short = (
            nn.Identity()
            if stride == 1 and inputs == width
            else nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.one(x)))
        return F.relu(self.norm2(self.two(out)) + self.short(x))


def resnet(*widths: int, channels=1, stem=None, pool=None) -> nn.Module:
    """A small ResNet of basic blocks, each after the first of stride 2, in eval mode.

    Args:
        widths: of the blocks.
        channels: of the image.
        stem: width of the first convolution; the first block's by default.
        pool: arguments of max pooling behind the stem; none by default.
    """
    first = stem or widths[0]
    layers = [nn.Conv2d(channels, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU()]
    layers += [nn.MaxPool2d(*pool)] if pool else []
    inputs = first
    for index, width in enumerate(widths):
        layers.append(Block(inputs, width, 1 if index == 0 else 2))
        inputs = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    return settled(nn.Sequential(*layers))


class Embedded(nn.Module):
    """Pixels are rounded to entries of a table, so that no gradient passes to them."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        levels = ((x + 0.5) * 2).long().clamp(0, 7)
        return self.head(self.table(levels).flatten(1))


class Recurrent(nn.Module):
    """Reads the rows of an image (1, 8, 8) one after the other."""

    def __init__(self, width=12):
        super().__init__()
        self.layer, self.last = nn.GRU(8, width, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x[:, 0])[0][:, -1])


class Shared(nn.Module):
    """One linear layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(F.relu(self.one(x.flatten(1))))))


def weight_normed() -> nn.Module:
    """Weights of linear layers that are computed from other parameters."""
    normed = nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        nn.Flatten(), normed(nn.Linear(64, 20)), nn.ReLU(), normed(nn.Linear(20, CLASSES))
    )


def frozen_first() -> nn.Module:
    """A perceptron whose first bias is not trained."""
    network = mlp(30)
    network[1].bias.requires_grad_(False)
    return network


def head_of_convolutions() -> nn.Module:
    """Logits are means of a convolution's channels: no layer is linear."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, CLASSES, 3, padding=1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


def no_last_bias() -> nn.Module:
    """Logits without any bias, of a convolution that covers the image."""
    return nn.Sequential(nn.Conv2d(1, CLASSES, 8, bias=False), nn.Flatten())


def max_pooled(width=96, stride=1, pools=(2, 3)) -> nn.Module:
    """Maxima of windows before the last layer, of images of 14×14, and before the second layer."""
    first = nn.MaxPool2d(pools[0]) if pools[0] > 1 else nn.Identity()
    network = nn.Sequential(
        *(nn.Conv2d(1, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU(), first),
        *(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.MaxPool2d(pools[1]), nn.Flatten(), nn.LazyLinear(CLASSES)),
    )
    network(torch.zeros(2, 1, 14, 14))
    settled(network)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
    return network


def overlapping() -> nn.Module:
    """Maxima of windows that overlap."""
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3, 1, 1), nn.ReLU(), nn.Conv2d(24, 48, 3, 1, 1), nn.ReLU()),
        *(nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(432, CLASSES)),
    )


def grouped() -> nn.Module:
    """A convolution of several groups."""
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3, 1, 1), nn.ReLU(), nn.Conv2d(24, 24, 3, 1, 1, groups=4), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, CLASSES)),
    )


def padded() -> nn.Module:
    """Zeros around maps by a layer of their own, and by a word."""
    return nn.Sequential(
        *(nn.ZeroPad2d(1), nn.Conv2d(1, 10, 3, 2), nn.Tanh()),
        *(nn.Conv2d(10, 8, 3, padding="same"), nn.Tanh()),
        *(nn.Conv2d(8, 8, 1, padding="valid"), nn.Tanh(), nn.Flatten(), nn.Linear(128, CLASSES)),
    )


def step_of_pairs(z: Tensor) -> Tensor:
    """A ReLU as a choice between the input and zero."""
    return torch.where(z > 0, z, torch.zeros_like(z))
