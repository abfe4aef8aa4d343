"""Factor a batch's gradient of one linear layer, and check candidates for its samples.

A linear layer computes ``z = W h + c`` with m outputs. For a batch of b samples, its gradient is
``∂L/∂W = S H``, where row i of H is the input h of sample i, and column i of S is that sample's
*error* ``s = ∂L/∂z``. The gradient shows the span of the b columns of S, of which the columns of U
(m, b) are an orthonormal basis (:class:`~flwr_leakage.attacks.network.linear.LayerFactor`).

The network behind the layer judges a candidate for one sample's input h. A pass from the layer's
outputs z onwards gives the error s, m numbers, for each label. If h was in the batch, then s is a
column of S. So s lies in the span of U, and its size fits h. These are m − b + 1 equations that the
search for h does not use.
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
"""Let z be a layer's outputs. A candidate sample's misfit is the relative part of its ∂L/∂z outside
the span of the columns of ∂L/∂W. The candidate counts as exact if its misfit is at most this
multiple of the misfit that the gradient's noise causes, plus float32's rounding. Under noise alone,
a root mean square over ``SPARE_EQUATIONS`` entries or more exceeds five times its expectation once
in 1e90 times."""

NEARBY = 24
"""Number of random points near a sample's estimated input at which the sample's ∂L/∂z, by the
layer's outputs z, is computed anew, as units near zero may be on or off. The right states of four
such units are among these points with a chance of 79 %. Each point costs a pass."""

ZERO_SHARE = 1e-9
"""An entry of a layer's input counts as zero in all samples if its magnitude is below this fraction
of the largest entry in every mixture of the samples' inputs. Rounding of a mixture is 1e-15 of the
largest entry, times the condition number of the gradient's factors. So this condition number may be
up to 1e6."""

NUM_PROBES = 4
"""Number of random images whose passes show how the layers of the network are connected. At least
three are needed: a pass of two of them shows whether the network mixes samples."""


@dataclass(frozen=True)
class BatchSample:
    """A candidate for one sample's input of a linear layer, with the evidence for it.

    The gradient ``[∂L/∂W, ∂L/∂c] = U [R, β]`` of a layer with m units and n inputs has rank b, and
    U (m, b) has orthonormal columns. The errors of the b samples are U Q with an unknown square
    matrix Q, and their inputs are T R with T = Q⁻¹ (see :class:`LayerFactor`).

    Attributes:
        dual: t (b,), the sample's row of T, scaled such that t·β = 1.
        inputs: h = t R (n,), the sample's input of the layer.
        outputs: z (m,), the layer's outputs for this input.
        label: the class for which the predicted errors fit the gradient best.
        errors: s = ∂L/∂z (m,), which the network behind the layer predicts for this input and
            label.
        column: q (b,), the sample's column of Q: the coordinates of s in the span of U.
        misfit: ‖s − U q‖ / ‖s‖, the part of s outside the span of U, in [0, 1].
        expected: the misfit that noise of the gradient alone would cause for a true sample.
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
        """Return whether noise and rounding alone explain the sample's misfit.

        The misfit is the part of the sample's predicted errors outside the gradient's span. For a
        true sample it is about ``expected``, if each unit is rightly taken as on or off.
        """
        return self.misfit <= explained_misfit(self.expected)

    @property
    def is_exact(self) -> bool:
        """Return whether noise and rounding alone explain the sample's misfit and scale error.

        The misfit is the part of the predicted error ∂L/∂z outside the gradient's span. The scale
        error is the relative difference between the size of ∂L/∂z and the size that the gradient
        shows for the sample.
        """
        return self.is_aligned and self.scale_error <= EXACT_MULTIPLE * self.expected + 1e-3


def explained_misfit(expected: float) -> float:
    """Return the largest misfit that float32 rounding and noise of the gradient explain.

    A misfit is the part of a sample's predicted errors outside the gradient's span, in [0, 1].
    ``expected`` is the misfit that noise of the gradient alone would cause.
    """
    return EXACT_MULTIPLE * expected + FLOAT32_RELATIVE_ERROR


@dataclass(frozen=True)
class BatchLayer:
    """A linear layer ``z = W h + c`` of m units and n inputs, with its gradient in factors.

    Attributes:
        problem: the network and the observed gradient.
        name: the name of the layer.
        weight: the parameter name of W.
        bias: the parameter name of c.
        factor: the factors ``U [R, β]`` of the gradient ``[∂L/∂W, ∂L/∂c]``, of rank b.
        order: the order in which the layer takes the pixels of the input; ``None`` if it takes
            features.
        sparse_inputs: whether h is nonnegative with zeros, as the outputs of a ReLU are.
        rectified: whether a ReLU follows the layer, so that a sample's errors are zero at units
            that it does not activate.
        alone: whether all paths of the network lead through the layer, so that it determines the
            logits.
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
        """Return a layer's inputs (M, n) as images (M, C, H, W), or None if it takes features."""
        if self.order is None:
            return None
        return self.order.pixels(inputs).reshape(-1, *self.problem.spec.shape)

    @property
    def matrix(self) -> Tensor:
        """The weights W (m, n) of a linear layer ``z = W h + c`` with m outputs."""
        return self.problem.params[self.weight]

    @property
    def offset(self) -> Tensor:
        """The bias c (m,) of a linear layer ``z = W h + c`` with m outputs."""
        return self.problem.params[self.bias]

    @cached_property
    def projected(self) -> Tensor:
        """The matrix ``W Rᵀ`` (m, b), where R (b, n) is the right factor of the layer's gradient.

        It maps a sample's dual t (b,) to the layer's outputs ``z = W Rᵀ t + c`` for the sample's
        input t R. The dual has t·β = 1 with the bias's factor β.
        """
        return self.matrix @ self.factor.right.T

    @cached_property
    def right(self) -> Tensor:
        """The right factor R of the layer's gradient, shifted so that an entry without signal is 0.

        Each of the b rows is a mixture of samples' inputs. The shape is (b, n'), as columns that
        are zero are left out. An image is without signal where it is black; see
        :meth:`BatchLayer.in_pixels`.
        """
        return self.in_pixels(self.factor.right, self.factor.bias)

    @cached_property
    def live(self) -> Tensor:
        """Booleans (m,), true for the units that at least one sample of the batch activates."""
        return self.factor.left.abs().amax(1) > 0

    @property
    def surplus(self) -> int:
        """Number of units that some sample of the batch activates, minus the gradient's rank b.

        Each unit more than b is an equation that the errors ∂L/∂z of true samples meet, and the
        errors of wrong candidates do not.
        """
        return int(self.live.sum()) - self.factor.rank

    @cached_property
    def scale_noise(self) -> float:
        """Standard deviation of the noise in an entry of the bias's gradient ∂L/∂c.

        It is estimated from the part of ∂L/∂c outside the span of the samples' errors. The noise
        may exceed that of the weight's entries: if a client rounds parameters relative to their
        size, larger parameters get more noise.
        """
        bias = self.problem.gradient[self.bias]
        left = self.factor.left
        rest = float((bias - left @ (left.T @ bias)).norm()) / max(self.surplus, 1) ** 0.5
        return max(rest, self.factor.noise)

    def in_units(self, inputs: Tensor) -> Tensor:
        """Return factors (M,) that make the relative errors of a layer's M inputs comparable.

        A verdict on an input judges the input's relative error times its factor. For features the
        factor is 1. For images it turns an error relative to the image's root mean square into an
        error relative to the range of pixels.
        """
        if self.order is None:
            return inputs.new_ones(len(inputs))
        contrast = max(self.problem.spec.std) / float(self.order.scale.abs().min())
        return inputs.square().mean(1).sqrt() * contrast

    def in_pixels(self, rows: Tensor, shares: Tensor) -> Tensor:
        """Return mixtures (r, n') of a layer's inputs, so that entries without signal are 0.

        ``rows`` (r, n) holds weighted sums of samples' inputs, and ``shares`` (r,) the sums of
        their weights. Outputs of a ReLU are zero where the unit is inactive. An image is without
        signal where it is black, so the normalisation ``(pixel − mean) / std`` is undone. Entries
        that are zero in all mixtures are left out (n' ≤ n), as they do not tell samples apart.
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
        """Return the errors ∂L/∂z (M, m) that M samples have as a part of the problem's batch.

        The loss L is the mean over the whole batch, and z (M, m), ``outputs``, are the outputs of a
        linear layer. ``labels`` (M,) holds classes. The layer's ``inputs`` (M, n) are needed only
        if it takes the network's input.
        """
        return next(self._errors(outputs, [labels], inputs))

    def _errors(
        self, outputs: Tensor, labels: Iterable[Tensor], inputs: Tensor | None
    ) -> Iterator[Tensor]:
        """Yield the errors ∂L/∂z (M, m) of M samples for each assignment of labels (M,).

        All errors come from one forward pass of the layers behind a linear layer's ``outputs`` z
        (M, m). The loss is the mean over a batch of the problem's size. The layer's ``inputs`` (M,
        n) are needed only if it takes the network's input.
        """
        leaf = outputs.detach().clone().requires_grad_()
        images = None if inputs is None else self.images(inputs)
        logits = logits_behind(self.problem, self.weight, leaf, images)
        for each in labels:
            loss = self.problem.gradient_map.loss(logits, each)
            (errors,) = torch.autograd.grad(loss, leaf, retain_graph=True)
            yield errors * (len(leaf) / self.problem.num_samples)

    def gradient_behind(self, inputs: Tensor, labels: Tensor) -> Params:
        """Return the gradient that M samples give to all parameters but those of this linear layer.

        ``inputs`` (M, n) are the samples' inputs of this layer, and the pass starts from its
        outputs. ``labels`` (M,) holds their classes. The loss is the mean over a batch of the
        problem's size, so the gradient is the sum over the M samples, divided by that size.
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
        # The pass starts from the layer's given outputs, so that the loss does not depend on the
        # layer's own parameters. Their gradients are zero here, and are left out.
        own = (self.weight, self.bias)
        return {name: share * value for name, value in gradients.items() if name not in own}

    def check(self, dual: Tensor, label: int | None = None) -> BatchSample | None:
        """Return the candidate sample that a dual t gives, judged by the network behind the layer.

        The gradient ``[∂L/∂W, ∂L/∂c]`` of the layer is factored as ``U [R, β]``. The sample's input
        is t R, with t scaled to t·β = 1. The result is None if t·β is zero, as the input then has
        no scale. ``dual`` is t (b,), of any length. ``label`` is the sample's class, if it is
        known; else the class that fits the gradient best is taken.
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
        """Return the misfit (M,) of each dual's candidate sample, for the label that fits best.

        Each row of ``duals`` (M, b) is a dual t of any length. The candidate's input is t R with
        the right factor R of the gradient, and with t scaled to t·β = 1 by the bias's factor β. The
        misfit is the part of its predicted error s = ∂L/∂z outside the gradient's span, relative to
        ‖s‖. It is computed as √(1 − explained share of ‖s‖²), so that misfits below 1e-7 may come
        out as zero.
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
        """Return a candidate sample, with the ∂L/∂z of a nearby input if that fits better.

        An input that is known to a few digits does not tell whether units near zero are on. Nearby
        inputs have either state of these units, and the gradient shows which state is right.
        ``generator`` draws the nearby inputs. Only the candidate's ∂L/∂z and the measures of its
        fit are replaced; its input stays.
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
        """Return a sample's input h (n,), or a nearby one whose ∂L/∂z fits the gradient better.

        The estimate ``inputs`` of h (n,) is returned if noise and rounding explain its misfit, the
        part of ∂L/∂z outside the gradient's span. Otherwise random points near h, which
        ``generator`` draws, are tried, and the one with the least misfit is returned. ``label`` is
        the sample's class, and ``spread`` the standard deviation of the error of each entry of h.
        """
        steps = torch.randn(NEARBY, len(inputs), generator=generator, dtype=torch.float64)
        # The tried points are the estimate, and random points at one and three standard deviations
        # from it.
        steps = torch.cat([0 * steps[:1], steps, 3.0 * steps]).to(inputs)
        points = inputs + spread * steps
        labels = torch.full((len(points),), label, device=inputs.device)
        errors = self.errors(points @ self.matrix.T + self.offset, labels, points)
        columns, misfits = self._columns(errors)
        if float(misfits[0]) <= explained_misfit(self.expected(columns[0], errors[0])):
            return inputs
        return points[int(misfits.argmin())]

    def _columns(self, errors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coordinates q = Uᵀ s (M, b) of M errors s = ∂L/∂z (m,), and their misfits.

        U (m, b) is the orthonormal left factor of the layer's gradient. The misfits (M,) are ‖s − U
        q‖ / ‖s‖, the parts of s outside the gradient's span.
        """
        columns = errors @ self.factor.left
        rest = (errors - columns @ self.factor.left.T).norm(dim=1)
        return columns, rest / errors.norm(dim=1).clamp_min(1e-300)

    def _fit(self, dual: Tensor, errors: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return which of M errors s = ∂L/∂z (m,) of one sample fits the gradient best.

        An error fits if it lies in the gradient's span and its coordinates q there meet t·q = 1,
        with the sample's dual t (b,), which gives its input. If the client scaled its update, only
        the first condition is used.

        Returns:
            The index of the best error; the coordinates q (M, b) of all; and their misfits (M,),
            the shares outside the span.
        """
        columns, misfits = self._columns(errors)
        scales = (columns @ dual - 1).abs().nan_to_num(10.0).clamp_max(10)
        best, aligned = int((misfits + scales).argmin()), int(misfits.argmin())
        # If the client scaled its update, no error has the right size, but the true error has the
        # right direction. So the error of least misfit is taken, whatever its size is, if it has
        # less than a tenth of the best error's misfit.
        is_scaled = float(misfits[aligned]) < 0.1 * float(misfits[best])
        return aligned if is_scaled else best, columns, misfits

    def expected(self, column: Tensor, errors: Tensor) -> float:
        """Return the misfit that noise of the gradient alone causes for a true sample.

        The misfit is the part of the sample's errors s = ∂L/∂z (m,) outside the gradient's span,
        relative to ‖s‖. ``column`` q (b,) holds the coordinates of s in that span.
        """
        spread = (column / self.factor.singular[: self.factor.rank]).norm()
        outside = self.factor.noise * max(self.surplus, 1) ** 0.5
        return outside * float(spread / errors.norm().clamp_min(1e-300))


def pose_layers(problem: Problem, generator: torch.Generator) -> tuple[list[BatchLayer], list[str]]:
    """Return the linear layers whose gradients can be factored, in the order of a pass.

    Returns:
        The layers; and for each other linear layer a sentence that says why it cannot be used.
        ``generator`` draws images for the passes that show this, and sketches of the gradients.

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
    """Return a linear layer with the factors of its gradient.

    ``use`` is the call of the layer. ``order`` is the order in which the layer takes the pixels,
    ``None`` if it takes features. ``generator`` draws the sketch of the gradient. ``rectified``
    tells whether a ReLU follows the layer, ``alone`` whether the layer is on all paths of the
    network.

    Raises:
        ValueError: the layer's gradient does not show the number of samples.
    """
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
    """Return the layer whose inputs are the ReLU of a given layer's outputs, or None.

    The result is None if there is no such layer or its gradient cannot be factored. It is an object
    of ``layers``, which are factored already, if the layer is among them. Other paths of the
    network may lead around the layer, as in a residual block: its weight gradient still spans its
    inputs. ``generator`` draws images whose pass shows which layer takes the ReLU.
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
    """Return the reason why a layer's gradient cannot be factored; empty if it can.

    ``use`` is the call of the layer, and ``uses`` are all calls of linear layers in the pass.
    """
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
    """Return the reason why other samples affect a sample's error ∂L/∂z; empty if none do.

    The error of a sample must depend on the sample's own outputs z of a linear layer alone, through
    a loss that is the plain mean over the samples. ``use`` is the call of this layer in a pass of
    ``probes`` (N, C, H, W), random images. ``order`` is the order in which the layer takes the
    pixels, or ``None`` if it takes features.
    """
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
    """Return whether no negative output of a layer affects the logits, as behind a ReLU.

    ``use`` is the call of the layer in a pass of ``probes`` (N, C, H, W), random images.
    """
    leaf = use.outputs.detach().clone().requires_grad_()
    logits = logits_behind(problem, use.weight, leaf, probes)
    weights = torch.linspace(1, 2, logits.shape[1]).to(logits)
    (slopes,) = torch.autograd.grad((logits * weights).sum(), leaf)
    return not bool(slopes[leaf < 0].any()) and bool(slopes.any())
