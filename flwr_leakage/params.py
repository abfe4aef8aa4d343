"""Handle model parameters as a dictionary of tensors, and as one flat vector."""

import math
from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

Params = dict[str, Tensor]
"""Parameters or buffers of a model, keyed as in its ``state_dict``."""


def on_cpu(tensors: Mapping[str, Tensor]) -> Params:
    """Return the tensors on the CPU, the default device of gradient maps."""
    return {name: value.detach().cpu() for name, value in tensors.items()}


def ravel(params: Mapping[str, Tensor]) -> Float[Tensor, " P"]:
    """Return all entries of the tensors as one vector of length P, in the order of the mapping.

    Example:
        >>> ravel({"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])})
        tensor([1., 2., 3.])
    """
    if not params:
        raise ValueError("params must hold at least one tensor, got an empty mapping.")
    return torch.cat([value.reshape(-1) for value in params.values()])


def unravel(vector: Float[Tensor, " P"], like: Mapping[str, Tensor]) -> Params:
    """Return a vector cut into tensors with the names, order and shapes of ``like``.

    Raises:
        ValueError: the vector's length is not the number of entries of ``like``.
    """
    sizes = [value.numel() for value in like.values()]
    if vector.shape != (sum(sizes),):
        raise ValueError(f"vector must have shape ({sum(sizes)},), got {tuple(vector.shape)}.")
    pieces = vector.split(sizes)
    return {
        name: piece.reshape(value.shape)
        for (name, value), piece in zip(like.items(), pieces, strict=True)
    }


def subtract(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Params:
    """Return ``left − right``, entry by entry; both must have the same names."""
    if left.keys() != right.keys():
        raise ValueError(f"expected the entries {sorted(right)}, got {sorted(left)}.")
    return {name: value - right[name] for name, value in left.items()}


def add(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Params:
    """Return ``left + right``, entry by entry; both must have the same names."""
    if left.keys() != right.keys():
        raise ValueError(f"expected the entries {sorted(right)}, got {sorted(left)}.")
    return {name: value + right[name] for name, value in left.items()}


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all entries of several tensors, computed in double precision.

    Example:
        >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        5.0
    """
    return math.sqrt(sum(float(value.double().square().sum()) for value in tensors))


def scale(params: Mapping[str, Tensor], factor: float) -> Params:
    """Return ``factor · params``, entry by entry."""
    return {name: value * factor for name, value in params.items()}
