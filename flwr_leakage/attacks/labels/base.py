"""The interface of every label attack."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from flwr_leakage.attacks.problem import Problem


@runtime_checkable
class LabelInference(Protocol):
    """A label attack, which infers the labels of a batch from its update."""

    def __call__(self, problem: Problem, generator: torch.Generator) -> Tensor:
        """Return class indices (B,), in ascending order, for the problem's ``num_samples``."""
        ...
