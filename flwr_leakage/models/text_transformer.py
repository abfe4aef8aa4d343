"""Define a small transformer of texts: an encoder for classes, or a decoder of the next token."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.models.layers import check_positive


class TextTransformer(nn.Module):
    """A transformer whose blocks consist of attention and a feed-forward part of two linear layers.

    Its input is the sum of token and position embeddings. A LayerNorm precedes each part of a
    block, as in GPT-2 (Radford et al. 2019). An encoder classifies by the mean of its last states
    over the tokens that are no padding. A decoder attends to earlier positions only, and predicts
    the next token at each position.

    Args:
        input_shape: (T,), where T is the largest number of tokens of a text.
        num_classes: the number K of classes of an encoder; for a decoder, the number of token ids.
        vocabulary: the number V of token ids.
        padding: the id that fills up texts of fewer than T tokens and gets no attention; ``None``
            if there is none.
        causal: whether the model is a decoder.
        tied: whether a decoder's last layer has the token embeddings as its weight. The states are
            then divided by √d first, as embeddings are drawn with standard deviation 1 (Raffel et
            al. 2020).
        width: the width d of the states.
        depth: the number of blocks.
        heads: the number of attention heads, a divisor of the width.
        dropout: the dropout rate of the embeddings and of the outputs of each part of a block.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_classes: int,
        vocabulary: int,
        padding: int | None = None,
        causal: bool = False,
        tied: bool = False,
        width: int = 64,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1 or input_shape[0] < 1:
            raise ValueError(f"input_shape must be (T,) of texts, got {tuple(input_shape)}.")
        check_positive(vocabulary=vocabulary, width=width, depth=depth, heads=heads)
        if width % heads:
            raise ValueError(f"heads must divide the width {width}, got {heads}.")
        if causal and num_classes != vocabulary:
            raise ValueError(
                f"a decoder has one class for each of {vocabulary} token ids, got {num_classes}."
            )
        if tied and not causal:
            raise ValueError("only a decoder ties its last layer to the token embeddings.")
        self.padding, self.causal = padding, causal
        self.scale = width**-0.5 if tied else 1.0
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(input_shape[0], width)
        self.blocks = nn.ModuleList([_Block(width, heads, causal, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
        self.drop = nn.Dropout(dropout)

    def embed(self, params: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        """Return the token embeddings (B, t, d) of token ids (B, t), zero at padding.

        :meth:`forward` accepts these embeddings in place of ids. ``params`` are parameters by name,
        which may differ from the model's own.
        """
        states = params["tokens.weight"][ids]
        return states if self.padding is None else states * (ids != self.padding)[..., None]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits: (B, K) of an encoder, (B, t, V) of a decoder.

        Inputs are token ids (B, t) with t ≤ T; or floating-point token embeddings (B, t, d), see
        ``embed``, in which zeros are padding.
        """
        places = torch.arange(inputs.shape[1], device=inputs.device)
        given = inputs.is_floating_point()
        states = inputs if given else self.tokens(inputs)
        states = self.drop(states + self.positions(places))
        seen = torch.ones_like(inputs[..., 0] if given else inputs, dtype=torch.bool)
        if self.padding is not None:
            seen = (inputs != 0).any(-1) if given else inputs != self.padding
        for block in self.blocks:
            states = block(states, seen)
        states = self.norm(states) * self.scale
        if self.causal:
            return self.head(states)
        weights = seen.to(states)[..., None]
        return self.head((states * weights).sum(1) / weights.sum(1).clamp_min(1))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, states: Tensor, seen: Tensor) -> Tensor:
        normal = self.norm1(states)
        q, k, v = (
            layer(normal).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(2, 3) / k.shape[-1] ** 0.5
        allowed = seen[:, None, None]
        if self.causal:
            allowed = allowed & torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        # −1e9 is used in place of −∞: a text of padding alone has no allowed position, and the
        # softmax of a row of −∞ is undefined.
        mixed = scores.masked_fill(~allowed, -1e9).softmax(-1) @ v
        states = states + self.drop(self.output(mixed.transpose(1, 2).flatten(2)))
        return states + self.drop(self.outer(F.gelu(self.inner(self.norm2(states)))))
