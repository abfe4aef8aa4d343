"""Labels of a batch with repeated classes, from the row sums of the last weight's gradient."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.labels.last_layer import find_last_layer
from flwr_leakage.attacks.problem import Problem


def labels_from_impact(
    weight_gradient: Float[Tensor, "K F"], num_samples: int
) -> Int[Tensor, " B"]:
    """Return the labels (B,) of LLG (Wainakh et al. 2022, algorithm 1) in ascending order.

    Row sums ``g_i`` of ``∂L/∂W`` are negative for classes that occur. The estimate of one sample's
    impact is ``m = (1 + 1/K) / B · Σ_{g_i < 0} g_i``. The algorithm takes every class with g_i < 0
    once. Then it takes the class with the smallest g_i until there are B labels. After each label
    it subtracts m from the class's g_i.

    Example:
        >>> labels_from_impact(torch.tensor([[-0.9], [0.5], [0.4]]), 2)
        tensor([0, 0])
    """
    sums = weight_gradient.sum(dim=1).double()
    impact = sums.clamp_max(0).sum() * (1 + 1 / len(sums)) / num_samples
    labels = (sums < 0).nonzero().flatten().tolist()
    labels = sorted(labels, key=lambda label: float(sums[label]))[:num_samples]
    for label in labels:
        sums[label] -= impact
    while len(labels) < num_samples:
        label = int(sums.argmin())
        labels.append(label)
        sums[label] -= impact
    return torch.tensor(sorted(labels), device=weight_gradient.device)


@dataclass(frozen=True)
class LabelImpact:
    """The label attack LLG (Wainakh et al. 2022), without its variants that use dummy data."""

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the labels (B,) in ascending order, with repetitions."""
        weight = find_last_layer(problem).weight
        return labels_from_impact(problem.gradient[weight], problem.num_samples)
