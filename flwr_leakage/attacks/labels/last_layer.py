"""The last linear layer of a classifier: where label attacks look."""

from dataclasses import dataclass

import torch

from flwr_leakage.attacks.linear_walk import find_linear_layers
from flwr_leakage.attacks.problem import Problem

SAME = 1e-4
"""Relative difference up to which two passes tell the same probabilities."""


@dataclass(frozen=True)
class LastLayer:
    """Names of the last linear layer's parameters.

    Attributes:
        weight: of shape (K, F).
        bias: of shape (K,), or ``None``.
    """

    weight: str
    bias: str | None


def find_last_layer(problem: Problem) -> LastLayer:
    """Find the last linear layer that a pass meets, however the network is written.

    Raises:
        ValueError: there is none with one output for each class.
    """
    classes = problem.spec.num_classes
    dummy = next(iter(problem.params.values())).new_zeros(2, *problem.spec.shape)
    with torch.no_grad():
        uses = find_linear_layers(problem, dummy)
    heads = [use for use in uses if use.outputs.shape == (2, classes)]
    if not heads:
        raise ValueError(
            f"the network must end in a linear layer (F.linear, addmm, einsum, x @ W + c) of "
            f"{classes} outputs, one for each class, got {[use.name for use in uses] or 'none'}."
        )
    return LastLayer(heads[-1].weight, heads[-1].bias)


def find_last_bias(problem: Problem) -> str | None:
    """The name of the bias (K,) of the logits, or ``None`` if they have none that is trained.

    That of the last linear layer; else, as in networks that end in a convolution and its mean over
    positions, the last parameter of K numbers by whose change the logits move alike, but for one
    number for all of them, which the softmax does not see. Its gradient is the mean of
    softmax − onehot.
    """
    try:
        bias = find_last_layer(problem).bias
        return bias if bias in problem.gradient_map.trained else None
    except ValueError:
        pass  # the logits are no linear layer's
    classes = problem.spec.num_classes
    dummy = next(iter(problem.params.values())).new_zeros(2, *problem.spec.shape)

    def logits(changed: dict[str, torch.Tensor]) -> torch.Tensor:
        params = {**problem.params, **changed}
        return problem.gradient_map.logits(params, dummy, problem.buffers)

    with torch.no_grad():
        own = logits({})
        change = torch.linspace(0, 1, classes).to(own)
        expected = (own + change).log_softmax(1)
        for name in reversed(problem.params):
            value = problem.params[name]
            if value.numel() != classes or name not in problem.gradient_map.trained:
                continue
            moved = logits({name: value + change.reshape(value.shape)}).log_softmax(1)
            if float((moved - expected).abs().max()) <= SAME * float(expected.abs().max()):
                return name
    return None
