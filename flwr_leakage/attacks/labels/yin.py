"""Labels of a batch without repeated classes, from the smallest entries of the last gradient."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.labels.last_layer import find_last_layer
from flwr_leakage.attacks.problem import Problem


def smallest_columns(weight_gradient: Float[Tensor, "K F"], num_samples: int) -> Int[Tensor, " B"]:
    """Return the B classes whose rows of ``∂L/∂W`` have the least minima (Yin et al. 2021, eq. 8).

    With non-negative features only a class that occurs has clearly negative entries. A class
    that occurs twice is found once.

    Example:
        >>> smallest_columns(torch.tensor([[0.1, 0.2], [-0.3, 0.1], [0.0, -0.1]]), 2)
        tensor([1, 2])
    """
    return weight_gradient.amin(dim=1).argsort()[:num_samples].sort().values


@dataclass(frozen=True)
class SmallestMinimum:
    """The label attack of GradInversion (Yin et al. 2021), for batches without repeated classes."""

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the labels (B,) in ascending order, all different.

        Raises:
            ValueError: there are more samples than classes.
        """
        if problem.num_samples > problem.spec.num_classes:
            raise ValueError(
                f"labels without repetitions must be at most {problem.spec.num_classes}, "
                f"got {problem.num_samples} samples."
            )
        weight = find_last_layer(problem).weight
        return smallest_columns(problem.gradient[weight], problem.num_samples)
