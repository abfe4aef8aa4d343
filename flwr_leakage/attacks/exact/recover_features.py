"""Features of a ReLU network read from its gradients, from the last ReLU towards the input.

Let a be the output of a ReLU that a convolution takes in, and δ the error of the convolution's
output. The convolution's weight gradient is linear in a
(:mod:`flwr_leakage.attacks.exact.weight_equations`). With the masks of all later ReLUs known, δ is
exact: it is propagated back from the error of the logits, which is the last bias's gradient. Where
the equations determine a, its zeros are the mask of its ReLU, and the recursion goes one ReLU
further.

Of the architecture, the recursion only needs to know which ReLU feeds which convolution. BatchNorm
with given statistics and skip connections are left to automatic differentiation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.feature_equations import solve_features
from flwr_leakage.attacks.exact.geometry import Pair
from flwr_leakage.attacks.exact.last_mask import LAST_GEOMETRY, averaged_mask, maxima_mask
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.labels.last_layer import find_last_layer
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class Features:
    """Outputs of ReLUs, which are numbered in the order of a forward pass.

    Attributes:
        outputs: the output (1, C, H, W) of a ReLU by its number. Where max pooling follows right
            after the ReLU, it is the pooled output.
        windows: (height, width) of the windows of such pooling, by the ReLU's number.
    """

    outputs: Mapping[int, Tensor]
    windows: Mapping[int, Pair]

    @property
    def shallowest(self) -> int:
        """The number of the ReLU that is nearest to the input."""
        return min(self.outputs)

    @property
    def is_pooled(self) -> bool:
        """Whether the shallowest outputs are known only after pooling."""
        return self.shallowest in self.windows

    def first(self, count: int) -> "Features":
        """The ``count`` shallowest of these features."""
        return Features(dict(sorted(self.outputs.items())[:count]), self.windows)

    def single(self) -> "Features":
        """The same features in single precision."""
        return Features({k: v.float() for k, v in self.outputs.items()}, self.windows)


@dataclass(frozen=True)
class Backward:
    """Errors of the network's layers, computed with given masks in place of its ReLUs.

    Attributes:
        problem: holds the network.
        names: the names of its parameters, by the tensors' ``id``.
        logit_error: ∂L/∂logits (K,).
        inputs: any input that requires its gradient, (1, C, H, W). With all ReLUs masked, errors
            do not depend on it.
    """

    problem: Problem
    names: Mapping[int, str]
    logit_error: Tensor
    inputs: Tensor

    def __call__(self, masks: Mapping[int, Tensor]) -> tuple[ReluWalk, list[Tensor]]:
        """A forward pass with those masks, and the errors of all convolutions' outputs."""
        passed = ReluWalk(self.names, masks)
        logits = passed.run(self.problem, self.inputs)
        assert logits is not None
        outputs = [use.outputs for use in passed.uses]
        return passed, list(torch.autograd.grad((logits * self.logit_error).sum(), outputs))


def recover_features(
    problem: Problem,
    rank_tolerance: float,
    zero: float,
    trims: int = 3,
    contradiction: float = 5.0,
) -> Features:
    """The outputs of ReLUs as far as the gradients determine them.

    Args:
        problem: a problem of one sample and one plain gradient.
        rank_tolerance: see :func:`solve_features`.
        zero: features below this fraction of their layer's largest count as zero.
        trims: see :func:`solve_features`.
        contradiction: see :func:`solve_features`.

    Raises:
        ValueError: the update is not the plain gradient of one sample, the last layer has no
            bias, or not even the last mask can be found.
    """
    if not problem.is_single_gradient or problem.num_samples != 1 or len(problem.rounds) > 1:
        raise ValueError("features are read from one plain gradient of one sample.")
    layer = find_last_layer(problem)
    if layer.bias is None:
        raise ValueError("the last layer must have a bias.")
    logit_error = problem.gradient[layer.bias]
    inputs = logit_error.new_zeros(1, *problem.spec.shape).requires_grad_()
    names = {id(value): name for name, value in problem.params.items()}
    backward = Backward(problem, names, logit_error, inputs)
    probe = ReluWalk(names)
    probe.run(problem, inputs)
    count, windows = len(probe.preactivations), probe.windows
    if not count:
        raise ValueError("features are read from ReLUs, the network has none.")
    if not probe.uses:
        raise ValueError("features are read from convolutions, the network has none.")
    masks = {number: torch.ones_like(z) for number, z in enumerate(probe.preactivations)}
    pooled = mean_feature(problem.gradient[layer.weight], logit_error)
    masks[count - 1] = last_mask(backward, masks, windows.get(count - 1), pooled, zero)
    features: dict[int, Tensor] = {}
    for number in reversed(range(count - 1)):
        passed, errors = backward(masks)
        own = [i for i, use in enumerate(passed.uses) if use.source == number]
        if any(passed.uses[i].name not in problem.gradient_map.trained for i in own):
            break  # a frozen layer's gradient is not in the update
        try:
            values = solve_features(
                [passed.uses[i] for i in own],
                [errors[i] for i in own],
                [problem.gradient[passed.uses[i].name] for i in own],
                rank_tolerance,
                trims,
                contradiction,
            )
        except (ValueError, IndexError):
            break
        features[number] = torch.where(values > zero * values.max(), values, 0.0)
        # Near zero, later features computed from those found are more exact than the solved ones.
        forward = ReluWalk(names, outputs=features, pooled=windows)
        forward.run(problem, inputs)
        for later in range(number + 1, count):
            if not forward.preactivations[later].requires_grad:
                masks[later] = forward.mask(later)
                if later in features:
                    features[later] = forward.compared(later).clamp_min(0)
        if number in windows:
            break
        masks[number] = (features[number] > 0).to(values.dtype)
    if not features:
        raise ValueError("the gradients determine no features.")
    return Features(features, windows)


def last_mask(
    backward: Backward,
    masks: Mapping[int, Tensor],
    window: Pair | None,
    pooled: Tensor,
    zero: float,
) -> Tensor:
    """The mask of the last ReLU, from the gradient of the last 3×3 convolution.

    Args:
        backward: computes the network's errors.
        masks: a mask of ones for each ReLU, by number.
        window: window of the max pooling behind the last ReLU; ``None`` where features are
            averaged.
        pooled: the input of the last layer (F,).
        zero: entries of it below this fraction of the largest count as zero.

    Raises:
        ValueError: the network has no such end, or the mask is not found.
    """
    passed, errors = backward(masks)
    if any(use.source == len(masks) - 1 for use in passed.uses):
        raise ValueError("the last ReLU must not feed a convolution.")
    last = [i for i, use in enumerate(passed.uses) if use.geometry == LAST_GEOMETRY]
    if not last:
        raise ValueError("the last convolution must be 3×3 with padding 1 and stride 1.")
    observed = backward.problem.gradient[passed.uses[last[-1]].name]
    if window is None:
        return averaged_mask(errors[last[-1]], observed)
    active = pooled > zero * pooled.max()
    return maxima_mask(errors[last[-1]], observed, active, window)
