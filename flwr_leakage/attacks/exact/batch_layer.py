"""Hold one linear layer with a batch's gradient, and check candidates for its samples.

The network behind the layer judges a candidate for one sample's input h. Its pass from the layer's
outputs z onwards gives the errors ``s = ∂L/∂z`` for each label, m numbers. If h was in the batch, s
is a column of the errors S of all b samples: it lies in the span of the columns of U, and is dual
to h (:mod:`~flwr_leakage.attacks.network.linear` defines S and U). These are m − b + 1 equations
that the search for h does not use.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flwr_leakage.attacks.loss_check import is_plain_mean
from flwr_leakage.attacks.network.linear import (
    InputOrder,
    LayerFactor,
    factorize,
    input_orders,
    logits_behind,
    told_of_computed_weights,
    traced,
)
from flwr_leakage.attacks.network.trace import LinearUse
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR
from flwr_leakage.params import Params

EXACT_MULTIPLE = 5.0
"""A sample is exact if its misfit is at most this multiple of the misfit that the gradient's noise
causes, beside float32's rounding. By noise alone, a root mean square over ``SPARE_EQUATIONS`` or
more is never five times what is expected (once in 1e90 times)."""

NEARBY = 24
"""Number of random points near a sample at which its errors are computed anew. The right
signs of four doubtful units are among them with a chance of 79 %. Each point costs a pass."""

ZERO_SHARE = 1e-9
"""An input counts as zero in all samples if its magnitude is below this fraction of the largest
input. Mixtures of samples are rounded to 1e-15 of it, times the condition of their factors, which
may so be 1e6."""

NUM_PROBES = 4
"""Number of random images whose passes show how the layers are connected."""


@dataclass(frozen=True)
class BatchSample:
    """A candidate for one sample's input of a layer, and the evidence for it.

    Attributes:
        dual: t (b,), the sample's row of T = Q⁻¹, with t·β = 1 (see :class:`LayerFactor`).
        inputs: h = t R (n,), the sample's input of the layer.
        outputs: z (m,), the layer's outputs of this input.
        label: the class whose errors fit the gradient best.
        errors: s = ∂L/∂z (m,), which the network behind the layer predicts for that label.
        column: q (b,), the sample's column of Q, with s = U q.
        misfit: the share of s outside the span of U, in [0, 1].
        expected: the misfit that noise of the gradient alone would cause.
        scale_error: |t·q − 1|, which is zero for a true sample.
    """

    dual: Tensor
    inputs: Tensor
    outputs: Tensor
    label: int
    errors: Tensor
    column: Tensor
    misfit: float
    expected: float
    scale_error: float

    @property
    def is_aligned(self) -> bool:
        """Return whether noise and rounding alone explain the misfit.

        The misfit of a true sample with the right mask is ``expected``, up to some per cent.
        """
        return self.misfit <= explained_misfit(self.expected)

    @property
    def is_exact(self) -> bool:
        """Return whether noise and rounding alone explain the misfit and the scale error."""
        return self.is_aligned and self.scale_error <= EXACT_MULTIPLE * self.expected + 1e-3


def explained_misfit(expected: float) -> float:
    """Return the largest misfit that rounding, and noise with a given expected misfit, explain."""
    return EXACT_MULTIPLE * expected + FLOAT32_RELATIVE_ERROR


@dataclass(frozen=True)
class BatchLayer:
    """A linear layer ``z = W h + c`` of m units and n inputs, with its gradient in factors.

    Attributes:
        problem: the network and the observed gradient.
        name: the name of the layer.
        weight: the name of W.
        bias: the name of c.
        factor: the factors of the gradient ``[∂L/∂W, ∂L/∂c]``, of rank b.
        order: the order in which the layer takes the pixels of the network's input; ``None`` if it
            takes features.
        sparse_inputs: whether h is nonnegative with zeros, as the outputs of a ReLU are.
        rectified: whether a ReLU follows the layer, so that errors of inactive units are zero.
        alone: whether all paths of the network lead through the layer, so that the network behind
            it can judge a sample.
    """

    problem: Problem
    name: str
    weight: str
    bias: str
    factor: LayerFactor
    order: InputOrder | None
    sparse_inputs: bool
    rectified: bool
    alone: bool = True

    @property
    def takes_input(self) -> bool:
        """Return whether the layer takes the network's input, in any order of its pixels."""
        return self.order is not None

    def images(self, inputs: Tensor) -> Tensor | None:
        """Return the images (M, C, H, W) of inputs (M, n), or None if the inputs are features."""
        if self.order is None:
            return None
        return self.order.pixels(inputs).reshape(-1, *self.problem.spec.shape)

    @property
    def matrix(self) -> Tensor:
        """The weights W (m, n) of the layer."""
        return self.problem.params[self.weight]

    @property
    def offset(self) -> Tensor:
        """The bias c (m,) of the layer."""
        return self.problem.params[self.bias]

    @cached_property
    def projected(self) -> Tensor:
        """The matrix ``W Rᵀ`` (m, b), by which a dual t gives the outputs ``W Rᵀ t + c``."""
        return self.matrix @ self.factor.right.T

    @cached_property
    def right(self) -> Tensor:
        """The factor R (b, n') of the gradient, in the units of :meth:`in_pixels`."""
        return self.in_pixels(self.factor.right, self.factor.bias)

    @cached_property
    def live(self) -> Tensor:
        """Booleans (m,), true for the units that at least one sample activates."""
        return self.factor.left.abs().amax(1) > 0

    @property
    def surplus(self) -> int:
        """Number of live units beyond the rank, each an equation that only true samples meet."""
        return int(self.live.sum()) - self.factor.rank

    @cached_property
    def scale_noise(self) -> float:
        """Standard deviation of an entry of ∂L/∂c, estimated from its part outside the span of U.

        The noise may exceed that of the weight's entries: if the client's rounding of parameters is
        relative, larger parameters get more noise.
        """
        bias = self.problem.gradient[self.bias]
        left = self.factor.left
        rest = float((bias - left @ (left.T @ bias)).norm()) / max(self.surplus, 1) ** 0.5
        return max(rest, self.factor.noise)

    def in_units(self, inputs: Tensor) -> Tensor:
        """Return factors (M,) that turn relative errors of inputs (M, n) into comparable errors.

        Errors of features are judged relative to the features' size, errors of images relative to
        the range of pixels.
        """
        if self.order is None:
            return inputs.new_ones(len(inputs))
        contrast = max(self.problem.spec.std) / float(self.order.scale.abs().min())
        return inputs.square().mean(1).sqrt() * contrast

    def in_pixels(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Return mixtures (r, n') of inputs, in units in which an input without signal is zero.

        Outputs of a ReLU are zero where the unit is inactive. An image is zero where it is black:
        its normalisation, ``(pixel − mean) / std``, is undone for mixtures too. Inputs that are
        zero in all mixtures are left out, as they do not tell samples apart.

        Args:
            rows: (r, n) mixtures of samples' inputs.
            shares: (r,) the sum of each mixture's weights.
        """
        if self.order is not None:
            rows = self.order.moved((rows - shares[:, None] * self.order.offset) / self.order.scale)
            spec = self.problem.spec
            black = spec.denormalize(rows.new_zeros(spec.shape)).flatten()
            contrast = spec.denormalize(rows.new_ones(spec.shape)).flatten() - black
            rows = rows * contrast + shares[:, None] * black
        sizes = rows.abs().amax(0)
        return rows[:, sizes > ZERO_SHARE * sizes.max()]

    def errors(self, outputs: Tensor, labels: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Return ∂L/∂z (M, m) of M samples in a batch of the problem's size.

        Args:
            outputs: z (M, m), the layer's outputs of these samples.
            labels: (M,) classes of the samples.
            inputs: (M, n) inputs of the layer, needed if these are the network's inputs.
        """
        return next(self._errors(outputs, [labels], inputs))

    def _errors(
        self, outputs: Tensor, labels: Iterable[Tensor], inputs: Tensor | None
    ) -> Iterator[Tensor]:
        """Yield ∂L/∂z (M, m) for each assignment of labels (M,), all from one pass."""
        leaf = outputs.detach().clone().requires_grad_()
        images = None if inputs is None else self.images(inputs)
        logits = logits_behind(self.problem, self.weight, leaf, images)
        for each in labels:
            loss = self.problem.gradient_map.loss(logits, each)
            (errors,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            yield errors * (len(leaf) / self.problem.num_samples)

    def gradient_behind(self, inputs: Tensor, labels: Tensor) -> Params:
        """Return the gradient of M samples with respect to the parameters of all other layers.

        The samples are part of a batch of the problem's size.

        Args:
            inputs: H (M, n), inputs of this layer.
            labels: (M,) classes of the samples.
        """
        problem = self.problem
        outputs = inputs @ self.matrix.T + self.offset
        images = self.images(inputs)

        def loss(params: Params) -> Tensor:
            behind = replace(problem, params=params)
            logits = logits_behind(behind, self.weight, outputs, images)
            return problem.gradient_map.loss(logits, labels)

        share = len(labels) / problem.num_samples
        gradients = torch.func.grad(loss)(dict(problem.params))
        # the loss does not depend on these parameters, as the layer's outputs are given
        own = (self.weight, self.bias)
        return {name: share * value for name, value in gradients.items() if name not in own}

    def check(self, dual: Tensor, label: int | None = None) -> BatchSample | None:
        """Return the candidate of a dual, judged by the network behind; None if t·β is zero.

        Args:
            dual: t (b,), of any length.
            label: the sample's class, if it is known; else the class that fits best is taken.
        """
        factor = self.factor
        scale = float(dual @ factor.bias)
        if abs(scale) <= 1e-12 * float(dual.norm() * factor.bias.norm()):
            return None
        dual = dual / scale
        inputs = dual @ factor.right
        outputs = self.matrix @ inputs + self.offset
        labels = torch.arange(self.problem.spec.num_classes, device=dual.device)
        if label is not None:
            labels = labels[label : label + 1]
        errors = self.errors(
            outputs.expand(len(labels), -1), labels, inputs.expand(len(labels), -1)
        )
        best, columns, misfits = self._fit(dual, errors)
        return BatchSample(
            dual,
            inputs,
            outputs,
            int(labels[best]),
            errors[best],
            columns[best],
            float(misfits[best]),
            self.expected(columns[best], errors[best]),
            float((columns[best] @ dual - 1).abs()),
        )

    def misfits(self, duals: Tensor) -> Tensor:
        """Return the misfit (M,) of each dual's candidate, under the label that fits best.

        It is computed as √(1 − explained share of ‖s‖²), so that misfits below 1e-7 may come out
        as zero.

        Args:
            duals: (M, b), each of any length.
        """
        factor, sizes = self.factor, []
        for part in duals.split(128):
            part = part / (part @ factor.bias)[:, None]
            inputs = part @ factor.right
            outputs = part @ self.projected.T + self.offset
            shares = []
            classes = torch.arange(self.problem.spec.num_classes, device=part.device)
            for errors in self._errors(outputs, classes[:, None].expand(-1, len(part)), inputs):
                explained = (errors @ factor.left).square().sum(1)
                shares.append(explained / errors.square().sum(1).clamp_min(1e-300))
            sizes.append((1 - torch.stack(shares).amax(0)).clamp_min(0).sqrt())
        return torch.cat(sizes).nan_to_num(torch.inf)

    def repaired(self, candidate: BatchSample, generator: torch.Generator) -> BatchSample:
        """Return the candidate, with the errors of a nearby point if these have a lower misfit.

        An input that is known to some digits leaves the signs of a few units open. Points within
        that uncertainty have either sign, and the gradient shows which sign is right.
        """
        best = candidate
        sizes = self.factor.singular[: self.factor.rank]
        typical = (candidate.dual * sizes).norm() / len(sizes) ** 0.5
        for radius in (1e-4, 1e-3):  # distance of a nearby point, relative to the size of the dual
            steps = torch.randn(NEARBY, len(sizes), generator=generator, dtype=torch.float64)
            duals = candidate.dual + radius * typical * steps.to(sizes) / sizes
            inputs = duals @ self.factor.right
            labels = torch.full((NEARBY,), candidate.label, device=sizes.device)
            errors = self.errors(inputs @ self.matrix.T + self.offset, labels, inputs)
            chosen, columns, misfits = self._fit(candidate.dual, errors)
            if float(misfits[chosen]) < best.misfit:
                best = replace(
                    candidate,
                    errors=errors[chosen],
                    column=columns[chosen],
                    misfit=float(misfits[chosen]),
                    expected=self.expected(columns[chosen], errors[chosen]),
                    scale_error=float((columns[chosen] @ candidate.dual - 1).abs()),
                )
            if best.is_exact:
                break
        return best

    def explained(
        self, inputs: Tensor, label: int, spread: float, generator: torch.Generator
    ) -> Tensor:
        """Return the inputs h (n,), or a nearby point whose errors fit the gradient's span better.

        Args:
            inputs: h (n,), an estimate of a sample's input.
            label: the class of the sample.
            spread: the standard deviation of the error of each entry of h.
            generator: draws the points that are tried.
        """
        steps = torch.randn(NEARBY, len(inputs), generator=generator, dtype=torch.float64)
        # The tried points are the estimate, and others at one and three standard deviations.
        steps = torch.cat([0 * steps[:1], steps, 3.0 * steps]).to(inputs)
        points = inputs + spread * steps
        labels = torch.full((len(points),), label, device=inputs.device)
        errors = self.errors(points @ self.matrix.T + self.offset, labels, points)
        columns, misfits = self._columns(errors)
        if float(misfits[0]) <= explained_misfit(self.expected(columns[0], errors[0])):
            return inputs
        return points[int(misfits.argmin())]

    def _columns(self, errors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns q (M, b) of errors s ≈ U q (M, m), and the misfit (M,) of each."""
        columns = errors @ self.factor.left
        rest = (errors - columns @ self.factor.left.T).norm(dim=1)
        return columns, rest / errors.norm(dim=1).clamp_min(1e-300)

    def _fit(self, dual: Tensor, errors: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return the index of the best of M errors (M, m), the columns (M, b) and misfits (M,)."""
        columns, misfits = self._columns(errors)
        scales = (columns @ dual - 1).abs().nan_to_num(10.0).clamp_max(10)
        best, aligned = int((misfits + scales).argmin()), int(misfits.argmin())
        # In an update that the client scaled, no error has the right size, but the true error has
        # the right direction.
        is_scaled = float(misfits[aligned]) < 0.1 * float(misfits[best])
        return aligned if is_scaled else best, columns, misfits

    def expected(self, column: Tensor, errors: Tensor) -> float:
        """Return the misfit that gradient noise causes for errors s (m,) with the column q (b,)."""
        spread = (column / self.factor.singular[: self.factor.rank]).norm()
        outside = self.factor.noise * max(self.surplus, 1) ** 0.5
        return outside * float(spread / errors.norm().clamp_min(1e-300))


def pose_layers(problem: Problem, generator: torch.Generator) -> tuple[list[BatchLayer], list[str]]:
    """Return the linear layers whose gradients can be split, in the order of a pass.

    Returns:
        The layers, and a refusal for each other layer, which says why it cannot be used.

    Raises:
        ValueError: the network has no linear layer.
    """
    probes = torch.randn(NUM_PROBES, *problem.spec.shape, generator=generator, dtype=torch.float64)
    probes = probes.to(problem.like)
    uses = traced(problem, probes).linear
    if not uses:
        told = told_of_computed_weights(problem)
        raise ValueError(
            f"the network has no linear layer (F.linear, addmm, einsum, x @ W + c){told}."
        )
    layers, refusals = [], []
    orders = {use.weight: order for use, order in input_orders(problem)}
    for index, use in enumerate(uses):
        order = orders.get(use.weight)
        reason = _obstacle(problem, use, uses) or _entanglement(problem, use, probes, order)
        if not reason:
            rectified = index < len(uses) - 1 and _is_rectified(problem, use, probes)
            try:
                posed = _posed(problem, use, generator, order, rectified)
            except ValueError as error:
                reason = str(error)
            else:
                layers.append(posed)
        if reason:
            refusals.append(f"{use.name}: {reason}")
    return layers, refusals


def _posed(
    problem: Problem,
    use: LinearUse,
    generator: torch.Generator,
    order: InputOrder | None = None,
    rectified: bool = False,
    alone: bool = True,
) -> BatchLayer:
    """Return a layer with the factors of its gradient."""
    assert use.bias is not None
    weight, bias = problem.gradient[use.weight], problem.gradient[use.bias]
    factor = factorize(weight, bias, problem.num_samples, generator)
    sparse = bool((use.inputs >= 0).all() and (use.inputs == 0).any())
    return BatchLayer(
        problem, use.name, use.weight, use.bias, factor, order, sparse, rectified, alone
    )


def layer_behind(
    layer: BatchLayer, layers: Sequence[BatchLayer], generator: torch.Generator
) -> BatchLayer | None:
    """Return the layer whose inputs are the ReLU of this layer's outputs, or None.

    It is None if there is no such layer or its gradient cannot be split. Other paths may lead
    around the layer returned, as in a residual block: its gradient spans its inputs all the same.
    """
    problem = layer.problem
    probes = torch.randn(NUM_PROBES, *problem.spec.shape, generator=generator, dtype=torch.float64)
    uses = traced(problem, probes.to(layer.matrix)).linear
    weights = [use.weight for use in uses]
    own = weights.index(layer.weight)
    features = uses[own].outputs.clamp_min(0)
    posed = {each.weight: each for each in layers}
    for use in uses[own + 1 :]:
        if features.shape != use.inputs.shape or not torch.equal(features, use.inputs):
            continue
        if use.weight in posed:
            return posed[use.weight]
        if _obstacle(problem, use, uses):
            continue
        try:
            return _posed(problem, use, generator, alone=False)
        except ValueError:
            continue
    return None


def _obstacle(problem: Problem, use: LinearUse, uses: list[LinearUse]) -> str:
    """Return the reason why a layer cannot be used; empty if its gradient may be split."""
    if sum(other.weight == use.weight for other in uses) > 1:
        return "its weights are used several times in a pass."
    if use.bias is None:
        return "it has no bias, without which each sample's scale stays unknown."
    if use.inputs.ndim != 2:
        return f"it takes inputs of shape {tuple(use.inputs.shape[1:])} for each sample."
    if not bool(problem.gradient[use.weight].any()):
        return "its gradient is zero: it is frozen, or no unit is active."
    return ""


def _entanglement(
    problem: Problem, use: LinearUse, probes: Tensor, order: InputOrder | None
) -> str:
    """Return the reason why other samples affect a sample's errors; empty if none do."""
    logits = logits_behind(problem, use.weight, use.outputs, probes)
    if order is None:
        others = logits_behind(problem, use.weight, use.outputs, probes.flip(0))
        if not torch.allclose(logits, others):
            return (
                "other paths lead around it, so that its outputs alone do not determine the logits."
            )
    pair = torch.tensor([0, NUM_PROBES - 1])
    alone = logits_behind(problem, use.weight, use.outputs[pair], probes[pair])
    if not torch.allclose(logits[pair], alone):
        return "later layers mix the samples (BatchNorm by batch statistics)."
    labels = torch.arange(2, device=logits.device) % problem.spec.num_classes
    loss = problem.gradient_map.loss
    doubled = loss(logits[[0, 1, 0, 1]], labels.repeat(2))
    if not torch.allclose(doubled, loss(logits[:2], labels)):
        return "the loss is not a mean over samples."
    if not is_plain_mean(loss, logits):
        return "the loss is not a plain mean over samples: it weighs them by their classes."
    return ""


def _is_rectified(problem: Problem, use: LinearUse, probes: Tensor) -> bool:
    """Return whether the logits do not change with any of the layer's negative outputs."""
    leaf = use.outputs.detach().clone().requires_grad_()
    logits = logits_behind(problem, use.weight, leaf, probes)
    weights = torch.linspace(1, 2, logits.shape[1]).to(logits)
    (slopes,) = torch.autograd.grad((logits * weights).sum(), leaf)
    return not bool(slopes[leaf < 0].any()) and bool(slopes.any())
