"""Texts of random tokens, and what a server sees of a client that trains a transformer on them."""

import torch
from torch.nn import functional as F

from flwr_leakage.losses import NextToken
from flwr_leakage.models import TextTransformer
from flwr_leakage.records import Batch, InputSpec

VOCABULARY, CLASSES, PADDING = 300, 3, 0


def draw(count, length, seed, shortest=0):
    """Texts by Zipf's law, so that tokens occur several times, with labels."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 / torch.arange(1, VOCABULARY)
    ids = 1 + torch.multinomial(weights, count * length, replacement=True, generator=generator)
    ids = ids.reshape(count, length)
    if shortest:
        lengths = torch.randint(shortest, length + 1, (count, 1), generator=generator)
        ids[torch.arange(length) >= lengths] = PADDING
    return ids, torch.randint(CLASSES, (count,), generator=generator)


def case(count, length, seed, *, causal=False, shortest=0, **settings):
    """A model in eval mode, its spec and loss, and a private batch."""
    torch.manual_seed(seed)
    classes = VOCABULARY if causal else CLASSES
    model = TextTransformer(
        (length,), classes, VOCABULARY, PADDING, causal=causal, **{"width": 64, **settings}
    ).eval()
    spec = InputSpec.text(VOCABULARY, length, None if causal else CLASSES, PADDING)
    ids, labels = draw(count, length, seed, shortest)
    loss = NextToken(PADDING) if causal else F.cross_entropy
    return model, spec, loss, Batch(ids, ids if causal else labels)


def gradient(model, loss, batch):
    trained = [value for value in model.parameters() if value.requires_grad]
    return torch.autograd.grad(loss(model(batch.inputs), batch.targets), trained)


def rows(batch):
    """The texts with their labels, in an order of their own."""
    return sorted(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True))
