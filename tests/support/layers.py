"""Networks that are hard to differentiate twice, or that only look so."""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class OnceDifferentiable(torch.autograd.Function):
    """A sigmoid with a backward that is right and has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return gradient * value * (1 - value)


class Detached(OnceDifferentiable):
    """The same; its backward detaches what it saved."""

    @staticmethod
    def backward(ctx, gradient):
        value = ctx.saved_tensors[0].detach()
        return gradient * value * (1 - value)


class OldStyle(torch.autograd.Function):
    """A sigmoid that is right, in the form that ``torch.func`` refuses."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        value = torch.sigmoid(ctx.saved_tensors[0])
        return gradient * value * (1 - value)


class Call(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def with_activation(function) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3, 2, 1), Call(function), nn.Flatten(), nn.Linear(27, 4)
    return nn.Sequential(*layers)


class Attention(nn.Module):
    """Rows of a (1, 6, 6) image attend to each other."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.project = nn.Linear(6, 18)
        self.heads = nn.MultiheadAttention(6, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(36, 4)

    def forward(self, images: Tensor) -> Tensor:
        rows = images[:, 0]
        if self.kind == "scaled_dot_product":
            split = [part[:, None] for part in self.project(rows).chunk(3, -1)]
            rows = F.scaled_dot_product_attention(*split)[:, 0]
        elif self.kind == "multihead":
            rows = self.heads(rows, rows, rows, need_weights=False)[0]
        else:
            rows = self.encoder(rows)
        return self.last(rows.flatten(1))


class Recurrent(nn.Module):
    """Reads the rows of a (1, 6, 6) image one after the other."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.layer = layer(6, 5, batch_first=True)
        self.last = nn.Linear(5, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.layer(images[:, 0])[0][:, -1])


class Branching(nn.Module):
    """Which way it computes depends on the data."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(36, 6), nn.Linear(6, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(images.flatten(1)))
        return self.last(2 * hidden if hidden.sum() > 0 else hidden)


class Assigning(Branching):
    """Writes into a tensor that it made."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.zeros(len(images), 6, dtype=images.dtype)
        hidden[:, :] = torch.sigmoid(self.first(images.flatten(1)))
        return self.last(hidden)
