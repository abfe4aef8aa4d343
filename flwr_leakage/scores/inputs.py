"""Convert samples given as arrays, lists or tensors into a batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flwr_leakage.records import Batch


def as_batch(inputs: Any, targets: Any, like: Tensor) -> Batch:
    """Return a batch from tensors, arrays, numbers, or lists of them: inputs (B, C, H, W) in the
    dtype of the model's parameter ``like``, class indices (B,) in int64 or probabilities (B, K).
    Integer inputs are an error and are not converted to floats: a model that expects normalised
    inputs would otherwise be given values from 0 to 255 unnoticed.

    Raises:
        ValueError: inputs or targets are of another kind, their entries differ in shape, or there
            are not as many targets as inputs.
    """
    x, y = _tensor("inputs", inputs), _tensor("targets", targets)
    x = x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)
    y = y.to(like.device, like.dtype if y.is_floating_point() else torch.int64)
    if not y.ndim:
        raise ValueError("targets must have one entry for each sample, got a single number.")
    return Batch(x, y)


def _tensor(name: str, value: Any) -> Tensor:
    expected = f"{name} must be a tensor, a NumPy array, or a list of equally shaped ones"
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, Mapping | str | bytes) or not hasattr(value, "__len__"):
        hint = "; score the embeddings of tokens" if isinstance(value, Mapping) else ""
        raise ValueError(f"{expected}, got {_kind(value)}{hint}.")
    try:
        if not isinstance(value, np.ndarray) and any(isinstance(entry, Tensor) for entry in value):
            return torch.stack([torch.as_tensor(entry).detach() for entry in value])
        return torch.as_tensor(np.asarray(value))
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{expected}, got {_kind(value)}: {error}") from error


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
