"""The last linear layer of a classifier, whose gradient label attacks read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class LastLayer:
    """Names of the last linear layer's parameters.

    Attributes:
        weight: the name of the weight (K, F).
        bias: the name of the bias (K,), or ``None``.
    """

    weight: str
    bias: str | None


def find_last_layer(problem: Problem) -> LastLayer:
    """Return the last linear layer of a pass, however the network is written.

    Raises:
        ValueError: no linear layer has one output for each class.
    """
    classes = problem.spec.num_classes
    uses = traced(problem, problem.zeros(2)).linear
    heads = [use for use in uses if use.outputs.shape == (2, *problem.spec.output_shape)]
    if not heads:
        raise ValueError(
            f"the network must end in a linear layer (F.linear, addmm, einsum, x @ W + c) of "
            f"{classes} outputs, one for each class, got {[use.name for use in uses] or 'none'}."
        )
    return LastLayer(heads[-1].weight, heads[-1].bias)


def find_last_bias(problem: Problem, scaled: bool = False, tolerance: float = 1e-4) -> str | None:
    """Return the name of the bias (K,) of the logits, or None if they have no trained bias.

    It is the bias of the last linear layer. Some networks have no such layer, as they end in a
    convolution and its mean over positions. Then it is the last parameter of K numbers each of
    which changes its own logit by its own change. Its gradient is the mean of softmax − onehot. A
    parameter that shifts all logits alike does not count, as the softmax does not depend on it.

    Args:
        problem: the problem of a classifier.
        scaled: whether a number may also change its logit by a share of its change, as if a ReLU
            follows the convolution. For one sample the gradient's signs stay the same.
        tolerance: difference up to which slopes of log-probabilities count as equal (chosen on
            development draws; no table).
    """
    try:
        bias = find_last_layer(problem).bias
        return bias if bias in problem.gradient_map.trained else None
    except ValueError:
        pass  # no linear layer gives the logits
    classes, like = problem.spec.num_classes, problem.like
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
        # Logits z + s ∘ b with the softmax p have the slopes (I − 1 pᵀ) diag(s).
        shares = torch.stack([each.diagonal() for each in slopes])[:, None] / (1 - softmax)
        expected = (own - softmax) * shares
        follows = float((slopes - expected).abs().max()) <= tolerance
        follows = follows and bool((shares > -tolerance).all())
        is_whole = bool(((shares - 1).abs() < tolerance).all())
        if follows and bool(shares.any()) and (scaled or is_whole):
            return name
    return None
