"""The last linear layer of a classifier: where label attacks look."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.network.linear import find_linear_layers
from flwr_leakage.attacks.problem import Problem

SAME = 1e-4
"""Difference up to which slopes of probabilities are the same."""


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


def find_last_bias(problem: Problem, scaled: bool = False) -> str | None:
    """The name of the bias (K,) of the logits, or ``None`` if they have none that is trained.

    That of the last linear layer; else, as in networks that end in a convolution and its mean over
    positions, the last parameter of K numbers of which each moves its own logit, and by its own
    change. Its gradient is the mean of softmax − onehot. One number for all logits does not count,
    as the softmax does not see it.

    Args:
        problem: of a classifier.
        scaled: take logits, too, that are moved by a share of the change, as where a ReLU follows
            the convolution: of one sample the gradient's signs stay the same.
    """
    try:
        bias = find_last_layer(problem).bias
        return bias if bias in problem.gradient_map.trained else None
    except ValueError:
        pass  # the logits are no linear layer's
    classes, like = problem.spec.num_classes, next(iter(problem.params.values()))
    stream = torch.Generator().manual_seed(0)
    probes = torch.randn(2, *problem.spec.shape, generator=stream).to(like)
    own = torch.eye(classes).to(like)
    for name in reversed(problem.params):
        value = problem.params[name]
        if value.numel() != classes or name not in problem.gradient_map.trained:
            continue

        def log_softmax(bias: Tensor, name: str = name) -> Tensor:
            params = {**problem.params, name: bias}
            return problem.gradient_map.logits(params, probes, problem.buffers).log_softmax(1)

        slopes = torch.autograd.functional.jacobian(log_softmax, value)
        slopes = slopes.reshape(2, classes, classes)
        softmax = log_softmax(value).exp()[:, None]
        # Of logits z + s ∘ b the slopes are (I − 1 pᵀ) diag(s), with p the softmax.
        shares = torch.stack([each.diagonal() for each in slopes])[:, None] / (1 - softmax)
        expected = (own - softmax) * shares
        follows = float((slopes - expected).abs().max()) <= SAME and bool((shares > -SAME).all())
        if follows and bool(shares.any()) and (scaled or bool(((shares - 1).abs() < SAME).all())):
            return name
    return None
