"""Wrap losses so that they work in any precision of the logits, and check a loss's value."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class FollowingLoss:
    """A loss whose own tensors, such as class weights, are cast to the logits' dtype.

    Torch's losses raise an error if their weights have another dtype than the logits.

    Attributes:
        loss: a module with parameters or buffers of floating point, or a ``functools.partial`` with
            arguments of floating point.
    """

    loss: nn.Module | partial[Tensor]

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss as a scalar, with its own tensors in the logits' dtype."""
        if isinstance(self.loss, partial):
            args = [_like(value, logits) for value in self.loss.args]
            options = {name: _like(value, logits) for name, value in self.loss.keywords.items()}
            return self.loss.func(*args, logits, targets, **options)
        own = {**dict(self.loss.named_parameters()), **dict(self.loss.named_buffers())}
        state = {name: _like(value, logits) for name, value in own.items()}
        value: Tensor = torch.func.functional_call(self.loss, state, (logits, targets))
        return value


@dataclass(frozen=True)
class NextToken:
    """A loss of texts: the mean cross-entropy of each token, given the tokens before it.

    Attributes:
        padding: the id of padding tokens, which are left out of the mean; ``None`` without padding.
    """

    padding: int | None = None

    def __call__(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the loss of a batch of texts as a scalar, from logits (B, T, V) of the next token,
        with V the size of the vocabulary, and token ids (B, T). The token at t is compared with the
        logits at t − 1.
        """
        ignored = -100 if self.padding is None else self.padding
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=ignored
        )


def following(loss: Loss) -> Loss:
    """Return a loss that works in any precision of the logits. A module or ``functools.partial``
    that holds floating-point tensors is wrapped as :class:`FollowingLoss`. Any other loss is
    returned as it is.

    Raises:
        ValueError: the loss cannot be called.
    """
    if not callable(loss):
        raise ValueError(
            f"the loss must be a function (logits, targets) ↦ scalar, got {loss!r}; the default is "
            "torch.nn.functional.cross_entropy."
        )
    tensors: list[object] = []
    if isinstance(loss, nn.Module) and not isinstance(loss, torch.jit.ScriptModule):
        tensors = [*loss.parameters(), *loss.buffers()]
    elif isinstance(loss, partial):
        tensors = [*loss.args, *loss.keywords.values()]
    if any(isinstance(value, Tensor) and value.is_floating_point() for value in tensors):
        return FollowingLoss(loss)  # type: ignore[arg-type]
    return loss


def scalar(value: object) -> Tensor:
    """Return a loss's value as a tensor of shape (), after a check that it is a scalar tensor.

    Raises:
        ValueError: the value is no tensor, or holds one number per sample.
    """
    if not isinstance(value, Tensor) or value.ndim > 0:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"the loss must return a scalar tensor, got {shape}; average or sum it, as "
            f"training does (reduction='mean' or 'sum')."
        )
    return value


def _like(value: Any, logits: Tensor) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(logits)
    return value
