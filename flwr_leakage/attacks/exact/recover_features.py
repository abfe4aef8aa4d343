"""Read features of a ReLU network from its gradients, from the last ReLU towards the input.

Let a be the output of a ReLU that a convolution takes as its input, and δ the derivative of the
loss by the convolution's output, called its *error*. The convolution's weight gradient is linear in
a (:mod:`flwr_leakage.attacks.exact.weight_equations`). The mask of a ReLU says which of its units
are on. With the masks of all later ReLUs known, backpropagation from the error of the logits, which
is the last bias's gradient, gives δ exactly. If the equations determine a, its zeros give the mask
of its ReLU, and the recursion goes one ReLU further towards the input.

Among 200,000 entries of masks a few lie so near zero that noise hides their sign. One wrong entry
suffices to spoil the features of the two layers before it, along the skip connections. But a wrong
entry contradicts the next equations, which outnumber their unknowns. They reveal the entry, and a
repair flips it. So the limit below which an entry counts as zero is measured layer by layer, and
need not be right for every entry. If the equations do not determine all features of a layer, the
recursion ends, and returns the determined directions as equations.

The recursion needs only one fact of the architecture: the ReLU that feeds each convolution.
Automatic differentiation handles BatchNorm with given statistics and skip connections. BatchNorm in
train mode must have statistics that the update tells; then δ depends on a
(:mod:`flwr_leakage.attacks.exact.own_statistics`).

The repair of a mask works as follows. Let a convolution's output reach the ReLU without mixing
channels or positions, as through BatchNorm. Then the error of its output channel at position p is
``δ[p] = c[p] + m[p] d[p]``, with the ReLU's mask m, the error c with the unit off, and the error
``c + d`` with the unit on. One wrong entry p changes the residual ``r = ∂L/∂W − Σ_p δ[p] A_p`` of
that channel's gradient by ``±d[p] A_p``, where A_p is the patch that the convolution took in at p.
The equations of all other channels determine the patches. The repair flips one entry after another,
each time the one that lowers ‖r‖² the most,

    ‖r‖² − ‖r ∓ d[p] A_p‖² = ±2 d[p] ⟨r, A_p⟩ − d[p]² ‖A_p‖²,

until r is within its noise. A channel has far more equations than wrong entries, so that no false
set of a few entries meets them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from flwr_leakage.attacks.exact.feature_equations import TRIMS, Solved, solve_features
from flwr_leakage.attacks.exact.known import MARGIN, Mask, above_noise
from flwr_leakage.attacks.exact.last_mask import (
    LAST_GEOMETRY,
    averaged_mask,
    maxima_mask,
    normalised_mask,
)
from flwr_leakage.attacks.exact.own_statistics import Norm, NormalisedUse, solve_normalised
from flwr_leakage.attacks.exact.relu_walk import ReluWalk, Use
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.network.calls import Pair
from flwr_leakage.attacks.network.linear import find_first_layer
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import NOISE_DEVIATIONS

REDUNDANCY = 1.1
"""Least number of equations for each unknown, at which the features before BatchNorm in train mode
are sought."""

LARGEST_RESIDUAL = 0.05
"""Largest relative residual at which these features count as found. Wrong entries of masks left up
to 0.008 before they were repaired, and searches that failed ended above 0.2 (ResNet-18 of width 32,
seed 13000)."""

_BY_SAMPLE = (nn.GroupNorm, nn.LayerNorm, _InstanceNorm)
"""Layers that normalise by the sample's own statistics. Their derivatives depend on features that
are not known yet, so that no mask of a ReLU before them can be found."""


@dataclass(frozen=True)
class Features:
    """The known outputs of a network's ReLUs, numbered in the order of a forward pass.

    Attributes:
        outputs: the output (1, C, H, W) of each known ReLU by its number. If max pooling follows
            the ReLU, it is the pooled output.
        windows: (height, width) of the windows of max pooling right after a ReLU, by the ReLU's
            number.
        noise: standard deviation of each output's error, divided by the output's root mean square,
            by the ReLU's number; NaN if there are no more equations than unknowns, so that noise
            does not show.
        equations: linear equations that do not determine the whole output of a ReLU, by its number.
            This ReLU is nearer to the input than those with known outputs.
        repaired: number of entries of ReLUs' masks (which units are on) that were flipped, because
            the equations of a channel contradicted those of all other channels.
        contradicted: number of output channels of convolutions whose equations contradict all
            others even after such repairs.
        table: (K, P), the K positions in each of the P pooling windows behind the known ReLU
            nearest to the input, with −1 beyond the map; ``None`` if the windows do not overlap.
        error: the derivative of the loss by the outputs of these windows; ``None`` if they do not
            overlap.
    """

    outputs: Mapping[int, Tensor]
    windows: Mapping[int, Pair]
    noise: Mapping[int, float] = field(default_factory=dict)
    equations: Mapping[int, Whitened] = field(default_factory=dict)
    repaired: int = 0
    contradicted: int = 0
    table: Tensor | None = None
    error: Tensor | None = None

    def __str__(self) -> str:
        """Return a text on how many ReLUs have known outputs, and how many have only equations.

        The text also tells how many wrong entries of masks, which say where a unit is on, were
        repaired, and how many channels are left out as contradicting all others, if there are any.
        """
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
        """The number of the ReLU with known outputs that is nearest to the network's input."""
        return min(self.outputs)

    @property
    def is_pooled(self) -> bool:
        """Whether max pooling follows the ReLU with known outputs that is nearest to the input.

        Then each output of the pooling is a known output of the ReLU, but its place in the pooling
        window is unknown.
        """
        return self.shallowest in self.windows

    def first(self, count: int) -> "Features":
        """Return these features with only the ``count`` known outputs nearest to the input.

        Equations about further outputs are left out.
        """
        return replace(self, outputs=dict(sorted(self.outputs.items())[:count]), equations={})

    def beginnings(self, count: int) -> list["Features"]:
        """Return parts of these features to which an input is first fitted, the best first.

        The *shallowest* output is the known one nearest to the input. If there are equations about
        a layer before it, the parts are these equations together with no output; the shallowest
        output alone; and the ``count`` ≥ 1 shallowest outputs. If there are none, the shallowest
        output may be noisy, as its equations may barely determine it. So the parts are the
        shallowest output alone; the ``count`` shallowest outputs; and the ``count`` shallowest
        outputs without the shallowest. If ``count`` or the number of known outputs is 1, there is
        one part.
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
        """The least relative noise of a ReLU's known outputs; 0 if no noise is known."""
        return min((n for k, n in self.noise.items() if k in self.outputs and n > 0), default=0.0)

    def weight(self, number: int) -> float:
        """Return the weight in (0, 1] of the squared relative distance from a ReLU's output.

        The ReLU is given by its number. The weight is the squared ratio of the least noise of all
        known outputs to the noise of this ReLU's output. An output of unknown noise counts as the
        noisiest.
        """
        known = [n for k, n in self.noise.items() if k in self.outputs and n > 0]
        own = self.noise.get(number, math.nan)
        own = max(known, default=1.0) if math.isnan(own) else max(own, self.least_noise)
        return (self.least_noise / own) ** 2 if known else 1.0


@dataclass(frozen=True)
class Backward:
    """The backward pass of a network whose ReLUs are replaced by given masks of active units.

    Attributes:
        problem: the problem with the network.
        head: the name of the weight of a linear layer, through which alone the image passes.
        error: the derivatives of the loss by this layer's outputs, (m,).
        inputs: any input (1, C, H, W) of the network, with ``requires_grad``. If all masks are
            known, the backward pass does not depend on its values.
    """

    problem: Problem
    head: str
    error: Tensor
    inputs: Tensor

    def __call__(
        self, masks: Mapping[int, Mask], values: Mapping[int, Tensor] | None = None
    ) -> tuple[ReluWalk, list[Tensor]]:
        """Return a forward pass with given masks of ReLUs, and the loss's derivatives in it.

        A mask, by the ReLU's number, says which units are on. The derivatives (1, N, H', W') are
        those by the outputs of each convolution, in the order of the pass. If BatchNorm's
        statistics are held, the derivatives also depend on ``values``, the known outputs of ReLUs
        by number; without them, they leave out the term of the statistics.
        """
        passed, total = self._pass(masks, values)
        outputs = [use.outputs for use in passed.uses]
        return passed, list(torch.autograd.grad(total, outputs, retain_graph=True))

    def pooled(self, masks: Mapping[int, Mask], number: int) -> Tensor:
        """Return the derivative of the loss by the max-pooled outputs of the ReLU ``number``.

        The masks, by number, say which units of each ReLU are on.
        """
        passed, total = self._pass(masks, None)
        return torch.autograd.grad(total, passed.pools[number])[0]

    def _pass(
        self, masks: Mapping[int, Mask], values: Mapping[int, Tensor] | None
    ) -> tuple[ReluWalk, Tensor]:
        passed = ReluWalk(self.problem, self.inputs, masks, head=self.head, values=values)
        assert passed.outputs is not None
        total = (passed.outputs * self.error).sum()
        if values is not None:
            held = self.problem.gradient_map.held_loss(passed.norm_inputs, self.problem.buffers)
            total = total + held
        return passed, total

    @property
    def is_held(self) -> bool:
        """Whether the network has BatchNorm in train mode, whose statistics are held constant."""
        return bool(self.problem.gradient_map.held)

    def gradients(self, uses: Sequence[Use]) -> list[Tensor]:
        """Return the observed weight gradient of each convolution call; empty if one is frozen."""
        if any(use.name not in self.problem.gradient_map.trained for use in uses):
            return []
        return [self.problem.gradient[use.name] for use in uses]

    def follower(self, index: int, number: int) -> int | None:
        """Return the number of the ReLU that a convolution feeds first, or None if it feeds none.

        ``index`` counts convolutions from 0 in the order of a pass. Only ReLUs behind the ReLU
        ``number`` are considered.
        """
        passed = ReluWalk(self.problem, self.inputs, head=self.head)
        outputs = passed.uses[index].outputs
        for later in range(number + 1, len(passed.preactivations)):
            total = passed.preactivations[later].sum()
            (found,) = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
            if found is not None:
                return later
        return None


def recover_features(problem: Problem) -> Features:
    """Return the ReLU outputs that the gradient of one sample in one plain step determines.

    Raises:
        ValueError: the update is not the plain gradient of one sample, the last layer has no bias,
            or not even the mask of the last ReLU can be found.
    """
    if not problem.is_single_gradient or problem.num_samples != 1 or len(problem.rounds) > 1:
        raise ValueError("features are read from one plain gradient of one sample.")
    problem = problem.held
    layer = find_first_layer(problem)
    assert layer.bias is not None
    if problem.gradient_map.uses_batch_statistics:
        raise ValueError(
            "the network has BatchNorm in train mode, whose statistics the update does not tell."
        )
    error = problem.gradient[layer.bias]
    inputs = error.new_zeros(1, *problem.spec.shape).requires_grad_()
    backward = Backward(problem, layer.weight, error, inputs)
    probe = ReluWalk(problem, inputs, head=layer.weight)
    count, windows = len(probe.preactivations), probe.windows
    if not probe.uses:
        raise ValueError(
            "features are read from two-dimensional convolutions, the network has none."
        )
    if not count:
        raise ValueError("features are read from ReLUs, the network has none.")
    masks = {number: _all(z, True) for number, z in enumerate(probe.preactivations)}
    pooled = mean_feature(problem.gradient[layer.weight], error)
    active = above_noise(pooled[None], torch.ones_like(pooled), 0.0, MARGIN)[0]
    try:
        masks[count - 1] = _last_mask(backward, masks, active)
    except ValueError as error:
        normal = [m for m in problem.gradient_map.model.modules() if isinstance(m, _BY_SAMPLE)]
        if not normal:
            raise
        raise ValueError(
            f"the network has {type(normal[0]).__name__}, whose statistics are the sample's own: "
            f"no mask of a ReLU behind it was found ({error})"
        ) from error
    features: dict[int, Tensor] = {}
    equations: dict[int, Whitened] = {}
    noise: dict[int, float] = {}
    repairs = contradicted = 0
    for number in reversed(range(count - 1)):
        solved, turned = _solve(backward, masks, number, features)
        repairs += turned
        if solved is None:
            break
        found = above_zero(solved)
        noise[number] = float(solved.noise.mean() / found.square().mean().sqrt())
        if not (solved.equations.is_determined or backward.is_held) or noise[number] >= 1:
            if solved.is_checked and not backward.is_held:
                equations[number] = solved.equations
            break
        features[number] = found
        contradicted += len(solved.contradicted)
        try:
            masks[number] = (
                _maxima(backward, masks, number, found > 0)
                if number in windows
                else Mask.of(found > 0)
            )
        except ValueError:
            break  # the place of each maximum in its window stays unknown
    if not features:
        raise ValueError("the gradients determine no features.")
    table: Tensor | None = None
    behind: Tensor | None = None
    if (pool := probe.overlapping.get(min(features))) is not None:
        places = torch.arange(pool.inputs[0, 0].numel()).reshape(1, 1, *pool.inputs.shape[2:])
        table = torch.stack(pool.maps(places, -1)).flatten(1)
        behind = backward.pooled(masks, min(features))
    return Features(
        features, windows, noise, equations, repairs, contradicted, table=table, error=behind
    )


def above_zero(solved: Solved) -> Tensor:
    """Return the solution (1, C, H, W) for a ReLU's outputs, with zeros where noise may explain it.

    If there are no more equations than unknowns, the noise is unknown, and is taken as equal
    everywhere. A value that noise explains lies below ``NOISE_DEVIATIONS`` of its deviations. The
    most negative value alone would be too low a limit: rounding may have one sign at a position.
    """
    noise = solved.noise if solved.is_checked else torch.ones_like(solved.noise)
    least = NOISE_DEVIATIONS if solved.is_checked else 0.0
    on = above_noise(solved.values, noise.clamp_min(1e-300), least, MARGIN)
    return torch.where(on, solved.values, 0.0)


def _solve(
    backward: Backward, masks: dict[int, Mask], number: int, features: Mapping[int, Tensor]
) -> tuple[Solved | None, int]:
    """Return the outputs of the ReLU with a given number, and repair wrong masks of later ReLUs.

    A mask says which units of a ReLU are on. Masks, by number of the ReLU, that contradict the
    gradients are repaired and replaced in place. ``features`` are the known outputs of later ReLUs.

    Returns:
        The solution, or ``None`` if no convolution's gradient determines these outputs; and the
        number of mask entries that were flipped.
    """
    turned = 0
    values: dict[int, Tensor] | None = None
    for _ in range(TRIMS):
        if backward.is_held:
            values = {**features, number: torch.zeros_like(masks[number].on, dtype=torch.float64)}
        passed, errors = backward(masks, values)
        own = [i for i, use in enumerate(passed.uses) if use.source == number]
        uses = [passed.uses[i] for i in own]
        gradients = backward.gradients(uses)
        if not gradients:
            return None, turned
        try:
            if values is None:
                solved = solve_features(uses, [errors[i] for i in own], gradients)
            else:
                solved = _solve_held(backward, uses, [errors[i] for i in own], values[number])
                values[number] = solved.values
        except ValueError:
            return None, turned
        if not (solved.equations.is_determined or backward.is_held) or not solved.contradicted:
            break
        more = _repair(backward, masks, number, own, above_zero(solved), solved, values)
        turned += more
        if not more:
            break
    return solved, turned


def _solve_held(
    backward: Backward, uses: Sequence[Use], errors: Sequence[Tensor], features: Tensor
) -> Solved:
    """Return the features that convolutions before BatchNorm in train mode take.

    ``errors`` are the derivatives of the loss by the convolutions' outputs if they took
    ``features`` (1, C, H, W). Output channels whose equations contradict all others are left out.
    The outputs of a ReLU are not negative, so that the root mean square of the negative values is
    the noise at every position.

    Raises:
        ValueError: there are too few equations, no solution was found, or a convolution has no
            BatchNorm layer directly behind it.
    """
    problem = backward.problem
    parts = [
        NormalisedUse.of(problem, use, error, features)
        for use, error in zip(uses, errors, strict=True)
    ]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        raise ValueError("a convolution has no BatchNorm layer directly behind it.")
    channels, *size = uses[0].input_shape
    rows = sum(part.gradient.numel() // channels for part in found)
    if rows < REDUNDANCY * math.prod(size):
        raise ValueError("there are too few equations for the features.")
    kept = [torch.ones(len(part.weight), dtype=torch.bool) for part in found]
    values: Tensor | None = None
    for _ in range(TRIMS):
        values, residual = solve_normalised(found, kept, values)
        if not residual < LARGEST_RESIDUAL:
            raise ValueError("the equations of the features have no solution that was found.")
        solved = solve_features(
            uses, [part.error(values) for part in found], backward.gradients(uses)
        )
        left = [torch.ones_like(each) for each in kept]
        for position, channel in solved.contradicted:
            left[position][channel] = False
        if all(bool((a == b).all()) for a, b in zip(left, kept, strict=True)):
            break
        kept = left
    assert values is not None
    negative = values[values < 0]
    noise = negative.square().mean().sqrt() if len(negative) else values.new_zeros(())
    return replace(solved, values=values, noise=noise.expand_as(solved.noise))


def _repair(
    backward: Backward,
    masks: dict[int, Mask],
    number: int,
    own: Sequence[int],
    features: Tensor,
    solved: Solved,
    values: Mapping[int, Tensor] | None = None,
) -> int:
    """Repair masks that contradict the gradients, and return the number of entries flipped.

    A mask tells where a ReLU is on. The masks of the ReLUs directly after the convolutions ``own``
    are repaired, and replaced in ``masks``, which holds the mask of each ReLU by its number.
    ``own`` are the indices, from input to output, of the convolutions that take the outputs of ReLU
    ``number``. ``features`` (1, C, H, W) are these outputs, already solved for; ``solved`` is the
    solution, with the channels whose equations contradict it. ``backward`` computes the gradients
    of a pass with given masks.
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
        on = masks[follower].on.clone()
        _, closed = backward({**masks, follower: _all(on, False)}, values)
        passed, opened = backward({**masks, follower: _all(on, True)}, values)
        if opened[index].shape != on.shape:
            continue
        use = passed.uses[index]
        (gradient,) = backward.gradients([use])
        patches = use.geometry.patches(features)[0]
        for channel, limit in limits.items():
            old, shut, open_ = (
                each[0, channel].flatten() for each in (on, closed[index], opened[index])
            )
            found = repaired(old, gradient[channel], patches, shut, open_, limit)
            if found is not None:
                turned += int((found != old).sum())
                on[0, channel] = found.reshape(on.shape[2:])
        masks[follower] = Mask.of(on)
    return turned


def _all(like: Tensor, on: bool) -> Mask:
    """Return a mask with the shape of a tensor, in which all units are on, or all are off."""
    return Mask.of(torch.full_like(like, on, dtype=torch.bool))


def _last_mask(backward: Backward, masks: Mapping[int, Mask], active: Tensor) -> Mask:
    """Return the mask of the last ReLU, from the gradient of the last 3×3 convolution.

    ``backward`` computes the gradients of a pass with given masks. ``masks`` holds a mask for each
    ReLU, by number, in which all units are on. ``active`` (F,) is true where the input of the
    linear layer behind is positive.

    Raises:
        ValueError: no 3×3 convolution with such pooling ends the network, or the mask is not found.
    """
    number = len(masks) - 1
    passed, errors = backward(masks)
    if any(use.source == number for use in passed.uses):
        raise ValueError("the last ReLU must not feed a convolution.")
    if number in passed.windows:
        outputs, features = passed.pools[number], passed.features
        assert features is not None
        if features.numel() < outputs.numel():
            raise ValueError("the maxima of the last pooling must be what the last layer takes in.")
        # A maximum is zero if a feature to which it adds is zero, as maxima and weights are ≥ 0.
        zeros = torch.autograd.grad(features, outputs, (~active).to(features)[None])[0]
        return _maxima(backward, masks, number, zeros == 0)
    index = _feeding(passed, errors, number)
    use, error = passed.uses[index], errors[index]
    observed = backward.problem.gradient[use.name]
    if not backward.is_held:
        return Mask.of(averaged_mask(error, observed) > 0)
    if use.norm is None:
        raise ValueError("BatchNorm in train mode must stand right behind the last convolution.")
    norm = Norm.of(backward.problem, use.norm)
    first = norm.first / (error[0, 0].numel() * norm.deviation)
    second = norm.second / (error[0, 0].numel() * norm.deviation.square())
    weight = backward.problem.params[use.name]
    return Mask.of(normalised_mask(error, observed, weight, first, second) > 0)


def _maxima(backward: Backward, masks: Mapping[int, Mask], number: int, active: Tensor) -> Mask:
    """Return the mask of a ReLU before max pooling, in which only the maxima of windows are on.

    ``backward`` computes the gradients of a pass with given masks. In ``masks``, by the ReLU's
    number, all units of the ReLU ``number`` and of those before it are on. ``active`` (1, C, h, w)
    is true where the maximum of a window is positive.

    Raises:
        ValueError: the windows overlap, BatchNorm is in train mode, no 3×3 convolution feeds the
            ReLU, or the mask is not found.
    """
    passed, errors = backward(masks)
    if backward.is_held:
        raise ValueError("behind BatchNorm in train mode, the last ReLU must be averaged.")
    if number in passed.overlapping:
        raise ValueError("the last max pooling must have windows that do not overlap.")
    index = _feeding(passed, errors, number)
    observed = backward.problem.gradient[passed.uses[index].name]
    found = maxima_mask(errors[index], observed, active.flatten(), passed.windows[number])
    return Mask.of(found > 0)


def _feeding(passed: ReluWalk, errors: Sequence[Tensor], number: int) -> int:
    """Return the index of the 3×3 convolution of a pass that feeds a ReLU, given by its number.

    ``errors`` are the derivatives of the loss by the outputs of the convolutions.

    Raises:
        ValueError: the last convolution before the ReLU with a kernel of 3×3, padding 1 and stride
            1 has another shape than the ReLU, or there is none.
    """
    found = [
        index
        for index, use in enumerate(passed.uses)
        if use.geometry == LAST_GEOMETRY and use.source < number
    ]
    if not found:
        raise ValueError("the last convolution must be 3×3 with padding 1 and stride 1.")
    if errors[found[-1]].shape != passed.preactivations[number].shape:
        raise ValueError(
            "the last ReLU must have the channels and positions of a 3×3 convolution with padding "
            "1 and stride 1."
        )
    return found[-1]


def repaired(
    on: Tensor, gradient: Tensor, patches: Tensor, closed: Tensor, opened: Tensor, limit: float
) -> Tensor | None:
    """Return a channel's mask, with a few entries flipped so that its gradient agrees, or None.

    The mask ``on`` (P,) is true where the ReLU behind a convolution is on. ``gradient``
    (C, *kernel) is the channel's ∂L/∂W, and ``patches`` (C·K, P) are the inputs of the convolution
    at each output position. ``closed`` and ``opened`` (P,) are the derivatives of the loss by the
    convolution's output if the ReLU were off or on. The gradient agrees if its residual has at most
    the norm ``limit``. The result is None if it does not agree, and no further flip lowers the
    norm.
    """
    on, change = on.clone(), opened - closed
    squares = change.square() * patches.square().sum(0)
    residual = gradient.flatten() - patches @ torch.where(on, opened, closed)
    while float(residual.norm()) > limit:
        steps = torch.where(on, -change, change)
        gains = 2 * steps * (residual @ patches) - squares
        best = int(gains.argmax())
        if not float(gains[best]) > 0:
            return None
        residual = residual - steps[best] * patches[:, best]
        on[best] = ~on[best]
    return on
