"""Features of a ReLU network read from its gradients, from the last ReLU towards the input.

Let a be the output of a ReLU that a convolution takes in, and δ the error of the convolution's
output. The convolution's weight gradient is linear in a
(:mod:`flwr_leakage.attacks.exact.weight_equations`). With the masks of all later ReLUs known, δ is
exact: it is propagated back from the error of the logits, which is the last bias's gradient. Where
the equations determine a, its zeros are the mask of its ReLU, and the recursion goes one ReLU
further.

Of 200,000 entries of masks a few lie so near zero that noise hides their sign. One wrong entry is
enough to spoil what lies two layers in front, along the skip connections. But it contradicts the
next equations, which outnumber their unknowns: they tell it, and set it right
(:mod:`flwr_leakage.attacks.exact.mask_repair`). So what counts as zero is measured, layer by layer,
and need not be right everywhere. Where equations leave directions of a layer open, the recursion
ends, and hands on those that are determined.

Of the architecture, the recursion only needs to know which ReLU feeds which convolution. BatchNorm
with given statistics and skip connections are left to automatic differentiation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.feature_equations import Solved, solve_features
from flwr_leakage.attacks.exact.last_mask import LAST_GEOMETRY, averaged_mask, maxima_mask
from flwr_leakage.attacks.exact.mask_repair import Channel
from flwr_leakage.attacks.exact.relu_walk import ReluWalk, Use
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.labels.last_layer import find_last_layer
from flwr_leakage.attacks.network.geometry import Pair
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class Features:
    """Outputs of ReLUs, which are numbered in the order of a forward pass.

    Attributes:
        outputs: the output (1, C, H, W) of a ReLU by its number. Where max pooling follows right
            after the ReLU, it is the pooled output.
        windows: (height, width) of the windows of such pooling, by the ReLU's number.
        noise: of each output, the standard deviation of its error over its own root mean square;
            NaN where no equation checks the others.
        equations: equations about the output of a ReLU further in front, by its number, which
            leave some directions of it open.
        repaired: how many entries of masks were set right.
        contradicted: how many output channels contradict the others even so.
    """

    outputs: Mapping[int, Tensor]
    windows: Mapping[int, Pair]
    noise: Mapping[int, float] = field(default_factory=dict)
    equations: Mapping[int, Whitened] = field(default_factory=dict)
    repaired: int = 0
    contradicted: int = 0

    def __str__(self) -> str:
        """What was read, in words."""
        words = f"outputs of {len(self.outputs)} ReLUs"
        if self.equations:
            words += f" and equations of {len(self.equations)}"
        if self.repaired:
            words += f", {self.repaired} entries of masks repaired"
        if self.contradicted:
            words += f", {self.contradicted} channels left out as contradicting the others"
        return words

    @property
    def shallowest(self) -> int:
        """The number of the ReLU that is nearest to the input."""
        return min(self.outputs)

    @property
    def is_pooled(self) -> bool:
        """Whether the shallowest outputs are known only after pooling."""
        return self.shallowest in self.windows

    def first(self, count: int) -> "Features":
        """The ``count`` shallowest of these outputs, without equations."""
        return replace(self, outputs=dict(sorted(self.outputs.items())[:count]), equations={})

    def beginnings(self, count: int) -> list["Features"]:
        """Parts of these to fit an input to from afar, the most promising first.

        These are the shallowest layer alone, or its equations, and the ``count`` shallowest. Where
        there are no equations, the shallowest layer may be one whose equations barely determine its
        features, so that they are noisy: the ``count`` shallowest without it come last.
        """
        nearest = self.first(count)
        if self.equations:
            return [replace(self, outputs={}), self.first(1), nearest]
        if len(nearest.outputs) == 1:
            return [nearest]
        others = {k: v for k, v in nearest.outputs.items() if k != self.shallowest}
        return [self.first(1), nearest, replace(nearest, outputs=others)]

    @property
    def least_noise(self) -> float:
        """The noise of the output that is known best; 0 where none is known."""
        return min((n for k, n in self.noise.items() if k in self.outputs and n > 0), default=0.0)

    def weight(self, number: int) -> float:
        """What the squared relative distance from an output counts: one over its noise squared.

        In units of the least noise. An output of unknown noise counts as the noisiest one.
        """
        known = [n for k, n in self.noise.items() if k in self.outputs and n > 0]
        own = self.noise.get(number, math.nan)
        own = max(known, default=1.0) if math.isnan(own) else max(own, self.least_noise)
        return (self.least_noise / own) ** 2 if known else 1.0

    def single(self) -> "Features":
        """The same features in single precision."""
        equations = {
            k: Whitened(e.rows.float(), e.values.float(), e.singular.float())
            for k, e in self.equations.items()
        }
        outputs = {k: v.float() for k, v in self.outputs.items()}
        return replace(self, outputs=outputs, equations=equations)


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

    def gradients(self, uses: Sequence[Use]) -> list[Tensor]:
        """The observed gradients of convolutions' weights; none if the client froze one of them."""
        if any(use.name not in self.problem.gradient_map.trained for use in uses):
            return []
        return [self.problem.gradient[use.name] for use in uses]

    def follower(self, index: int, number: int) -> int | None:
        """The first ReLU behind ReLU ``number`` that depends on a convolution's outputs."""
        passed = ReluWalk(self.names)
        passed.run(self.problem, self.inputs)
        outputs = passed.uses[index].outputs
        for later in range(number + 1, len(passed.preactivations)):
            total = passed.preactivations[later].sum()
            (found,) = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
            if found is not None:
                return later
        return None


def recover_features(
    problem: Problem,
    rank_tolerance: float,
    margin: float = 3.0,
    trims: int = 3,
    contradiction: float = 5.0,
) -> Features:
    """The outputs of ReLUs as far as the gradients determine them.

    Args:
        problem: a problem of one sample and one plain gradient.
        rank_tolerance: see :func:`solve_features`.
        margin: see :func:`above_zero`.
        trims: see :func:`solve_features`; and how often masks that it contradicts are repaired.
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
    active = pooled > margin * (-pooled).max().clamp_min(0)
    masks[count - 1] = last_mask(backward, masks, windows.get(count - 1), active)
    features: dict[int, Tensor] = {}
    equations: dict[int, Whitened] = {}
    noise: dict[int, float] = {}
    repaired = contradicted = 0
    for number in reversed(range(count - 1)):
        solved, turned = _solve(
            backward, masks, number, rank_tolerance, margin, trims, contradiction
        )
        repaired += turned
        if solved is None:
            break
        found = above_zero(solved, margin)
        noise[number] = float(solved.noise.mean() / found.square().mean().sqrt())
        if not solved.equations.is_determined or noise[number] >= 1:
            if solved.is_checked:
                equations[number] = solved.equations
            break
        features[number] = found
        contradicted += len(solved.contradicted)
        if number in windows:
            break
        masks[number] = (found > 0).to(found.dtype)
    if not features:
        raise ValueError("the gradients determine no features.")
    return Features(features, windows, noise, equations, repaired, contradicted)


def above_zero(solved: Solved, margin: float) -> Tensor:
    """The features (1, C, H, W) that were solved, with zeros where noise may be all that they are.

    Outputs of a ReLU are not negative, so that negative values are noise alone. The most negative
    one, in units of each position's standard deviation, tells how far noise goes among that many
    values. A value is taken for positive above ``margin`` times as far.
    """
    noise = solved.noise if solved.is_checked else torch.ones_like(solved.noise)
    noise = noise.clamp_min(1e-300)
    reach = (-solved.values / noise).max().clamp_min(0)
    return torch.where(solved.values > margin * reach * noise, solved.values, 0.0)


def _solve(
    backward: Backward,
    masks: dict[int, Tensor],
    number: int,
    rank_tolerance: float,
    margin: float,
    trims: int,
    contradiction: float,
) -> tuple[Solved | None, int]:
    """Solve the outputs of one ReLU, and repair the masks behind it that these contradict.

    Returns:
        what was solved, ``None`` if no convolution tells of these outputs; and how many entries of
        ``masks`` were turned.
    """
    turned = 0
    for _ in range(trims):
        passed, errors = backward(masks)
        own = [i for i, use in enumerate(passed.uses) if use.source == number]
        uses = [passed.uses[i] for i in own]
        gradients = backward.gradients(uses)
        if not gradients:
            return None, turned
        try:
            solved = solve_features(
                uses, [errors[i] for i in own], gradients, rank_tolerance, trims, contradiction
            )
        except ValueError:
            return None, turned
        if not solved.equations.is_determined or not solved.contradicted:
            break
        more = _repair(backward, masks, number, own, above_zero(solved, margin), solved)
        turned += more
        if not more:
            break
    return solved, turned


def _repair(
    backward: Backward,
    masks: dict[int, Tensor],
    number: int,
    own: Sequence[int],
    features: Tensor,
    solved: Solved,
) -> int:
    """Set masks right where they contradict the gradients; the number of entries turned.

    Args:
        backward: computes the network's errors.
        masks: of all ReLUs by number; entries are replaced.
        number: of the ReLU whose outputs are solved.
        own: which convolutions, in the order of a forward pass, take these outputs in.
        features: these outputs (1, C, H, W).
        solved: names the channels that contradict them.
    """
    turned = 0
    for position, index in enumerate(own):
        limits = {
            channel: limit
            for (use, channel), limit in zip(solved.contradicted, solved.limits, strict=True)
            if use == position
        }
        follower = backward.follower(index, number) if limits else None
        if follower is None:
            continue
        mask = masks[follower]
        _, closed = backward({**masks, follower: torch.zeros_like(mask)})
        passed, opened = backward({**masks, follower: torch.ones_like(mask)})
        if opened[index].shape != mask.shape:
            continue
        use = passed.uses[index]
        (gradient,) = backward.gradients([use])
        patches = use.geometry.patches(features)[0]
        for channel, limit in limits.items():
            found = Channel(
                gradient[channel],
                patches,
                closed[index][0, channel].flatten(),
                opened[index][0, channel].flatten(),
                limit,
            ).repair(mask[0, channel].flatten())
            if found is not None:
                right = found.reshape(mask.shape[2:])
                turned += int((right != mask[0, channel]).sum())
                mask = mask.clone()
                mask[0, channel] = right
        masks[follower] = mask
    return turned


def last_mask(
    backward: Backward,
    masks: Mapping[int, Tensor],
    window: Pair | None,
    active: Tensor,
) -> Tensor:
    """The mask of the last ReLU, from the gradient of the last 3×3 convolution.

    Args:
        backward: computes the network's errors.
        masks: a mask of ones for each ReLU, by number.
        window: window of the max pooling behind the last ReLU; ``None`` where features are
            averaged.
        active: where the input of the last layer is positive (F,).

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
    return maxima_mask(errors[last[-1]], observed, active, window)
