"""Find the linear layers that a forward pass calls, and replace the outputs of one of them.

The last linear layer gives the logits. The first one may take the image's pixels in another order
(``x.permute(0, 2, 3, 1).flatten(1)``), or scaled; its inputs still determine the image.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flwr_leakage.attacks.network.calls import Affine, Op
from flwr_leakage.attacks.network.trace import LinearUse, Run, Trace
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR, FLOAT32_ROUNDING


@dataclass(frozen=True)
class LayerFactor:
    """The factors ``[∂L/∂W, ∂L/∂c] = U [R, β]`` of a linear layer's gradient, of rank b.

    The layer is ``Z = W Hᵀ + c``. U has orthonormal columns. Let S (m × b) be the errors ∂L/∂Z of b
    samples, one in each column, and H (b × n) the layer's inputs, one sample in each row. Then
    ``∂L/∂W = S H``, ``S = U Q`` and ``H = T R``, with square matrices Q and ``T = Q⁻¹``. A row t of
    T is a sample's *dual*. It is orthogonal to the columns q of Q that belong to other samples. For
    its own column, ``t·q = 1``. Also ``t·β = 1``, as the bias is the weight of a further input that
    is always 1.

    Attributes:
        left: U (m, b).
        right: R (b, n).
        bias: β (b,).
        singular: singular values of ``[∂L/∂W, ∂L/∂c]`` in falling order; the first b exceed noise.
        noise: standard deviation of the noise of an entry of the gradient, estimated from its part
            beyond rank b.
    """

    left: Tensor
    right: Tensor
    bias: Tensor
    singular: Tensor
    noise: float

    @property
    def rank(self) -> int:
        """The rank of the gradient: the number of samples, if their ∂L/∂Z are independent."""
        return self.left.shape[1]

    def remainder(self, duals: Tensor, columns: Tensor) -> "tuple[LayerFactor, Tensor]":
        """Return the factors that remain once f known samples are removed from the gradient.

        The gradient is U [R, β] as in :class:`LayerFactor`. Without the f samples it is
        ``U (I − Q (T Q)⁻¹ T) [R, β]``, of rank b − f. T (f, b) holds the samples' duals, one in
        each row, and Q (b, f) their columns. A sample's input is its dual times R, and its ∂L/∂Z is
        U times its column.

        Returns:
            The factors of the remaining gradient, and C (b − f, b), which maps a dual t of these
            factors to the dual ``t C`` of the original factors.
        """
        projection = torch.eye(self.rank).to(self.left) - columns @ torch.linalg.solve(
            duals @ columns, duals
        )
        kept = self.rank - len(duals)
        # U has orthonormal columns, so that the left singular vectors of ``projection`` give
        # orthonormal columns for the remaining gradient.
        inner, singular, outer = torch.linalg.svd(projection)
        lift = singular[:kept, None] * outer[:kept]
        left = self.left @ inner[:, :kept]
        return LayerFactor(left, lift @ self.right, lift @ self.bias, singular, self.noise), lift


def factorize(
    weight: Tensor, bias: Tensor, most: int, generator: torch.Generator, above: float = 2.5
) -> LayerFactor:
    """Return the factors of a linear layer's gradient, whose rank is the number of samples.

    The rank is the number of singular values of ``[∂L/∂W, ∂L/∂c]`` above the noise. A random sketch
    finds their directions (Halko, Martinsson and Tropp 2011). Its size is doubled until it holds as
    many directions of noise as of signal. Rows of zeros belong to units that no sample activates,
    and are left out: with them, the singular values would drop more at the number of nonzero rows
    than at the rank.

    Args:
        weight: ∂L/∂W (m, n).
        bias: ∂L/∂c (m,).
        most: the number of samples that the client reports, which sets the first size of the
            sketch. If the singular values show more, the rank exceeds it.
        generator: the generator of the sketch.
        above: a singular value is signal if it exceeds this multiple of ``noise · (√m + √n)``, the
            largest singular value that noise is expected to have.

    Raises:
        ValueError: the singular values show no gap between signal and noise, as with too many
            samples for the layer's size, or fewer than two rows are not zero.
    """
    whole = torch.cat([weight, bias[:, None]], dim=1)
    live = whole.abs().amax(1) > 0
    rows, columns = int(live.sum()), int((whole.abs().amax(0) > 0).sum())
    part = whole[live]
    limit = min(rows, columns)
    size = min(2 * most + 16, limit)
    while True:
        if size < limit:
            sketch = torch.randn(part.shape[1], size, generator=generator, dtype=torch.float64)
            basis = torch.linalg.qr(part @ sketch.to(part)).Q
            basis = torch.linalg.qr(part @ (part.T @ basis)).Q
        else:
            basis = torch.eye(rows).to(part)
        inside = basis.T @ part
        inner, singular, outer = torch.linalg.svd(inside, full_matrices=False)
        singular, outer, inner = singular[:limit], outer[:limit], inner[:, :limit]
        # The residual itself is squared: a difference of two squared norms would be rounded to a
        # false noise of 1e-8.
        outside = float((part - basis @ inside).square().sum())
        rank, noise = _split(part, columns, singular, outside, above)
        if 2 * rank <= size or size == limit:
            break
        size = min(2 * size, limit)
    if float(singular[rank - 1]) < 3.0 * float(singular[rank]):
        raise ValueError(
            f"its gradient, {rows} rows and {columns} columns that are not zero, has no gap in its "
            "singular values: there are too many samples for its size, or noise hides their number."
        )
    left = whole.new_zeros(len(whole), rank)
    left[live] = (basis @ inner)[:, :rank]
    right = singular[:rank, None] * outer[:rank]
    return LayerFactor(left, right[:, :-1], right[:, -1], singular, noise)


def _split(
    part: Tensor, columns: int, singular: Tensor, outside: float, above: float
) -> tuple[int, float]:
    """Return the rank of a gradient, and the standard deviation of the noise in its entries.

    The noise follows from the singular values beyond the rank. The rank counts the singular values
    that exceed a threshold, ``above`` times the largest singular value that this noise is expected
    to have. In float32 gradients, larger entries have larger noise. So singular values up to 30
    times the threshold may still be noise (chosen on development draws; no results are kept), and
    the largest ratio of two neighbours among them decides. A layer of few rows has few singular
    values beyond the rank, and the smallest of them are far below the largest. So the noise of a
    float32 gradient is at least its rounding.

    ``part`` holds the nonzero rows of the gradient, of which ``columns`` columns are not zero.
    ``singular`` are its largest singular values in falling order, and ``outside`` is ``‖part‖²``
    minus the sum of their squares.

    Raises:
        ValueError: fewer than two rows are not zero.
    """
    rows = len(part)
    if len(singular) < 2:
        raise ValueError(
            "the layer's weight gradient must have at least two rows that are not zero, got "
            f"{len(singular)}."
        )
    edge = rows**0.5 + columns**0.5
    floor = 1e-15 * float(singular[0]) / edge

    def noise(rank: int) -> float:
        rest = float(singular[rank:].square().sum()) + outside
        return max((rest / ((rows - rank) * (columns - rank))) ** 0.5, floor)

    is_single = torch.equal(part, part.float().to(part))
    size = float(part.norm())
    rounding = FLOAT32_ROUNDING * size / (rows * columns) ** 0.5 if is_single else 0.0
    last = len(singular) - 1
    while last > 1 and float(singular[last - 1]) <= above * max(noise(last), rounding) * edge:
        last -= 1
    first = last
    while first > 1 and float(singular[first - 1]) <= 30.0 * above * noise(last) * edge:
        first -= 1
    gaps = singular[first - 1 : last] / singular[first : last + 1].clamp_min(1e-300)
    rank = first + int(gaps.argmax())
    return rank, noise(rank)


def traced(problem: Problem, inputs: Tensor | None = None) -> Trace:
    """Return a record of the calls in one forward pass of a problem's network, without autograd.

    ``inputs`` are the images (B, C, H, W) of the pass; one image of zeros by default.
    """
    run = partial(problem.logits, problem.zeros(1) if inputs is None else inputs)
    with torch.no_grad():
        return Trace.of(run, problem.params)


def told_of_computed_weights(problem: Problem) -> str:
    """Return a text that explains why the update lacks the gradient of a linear layer's weight.

    The text is meant for the end of an error message. It is empty if the weights of all linear
    layers are parameters themselves, and are not computed from other parameters.
    """
    ops = [step.op for step in traced(problem).steps]
    if all(op.name for op in ops if isinstance(op, Affine) and not op.is_convolution):
        return ""
    return (
        "; weights of linear layers are computed from other parameters (a parametrization, such as "
        "weight_norm), so that their own gradients are not in the update"
    )


def logits_behind(
    problem: Problem, weight: str, outputs: Tensor, inputs: Tensor | None = None
) -> Tensor:
    """Return the logits (B, K) of a forward pass in which one linear layer has given outputs.

    ``weight`` is the parameter name of the layer's weight. The logits are differentiable in
    ``outputs`` (B, m). ``inputs`` (B, C, H, W) of the network matter only for paths around the
    layer, and are zeros by default.
    """
    if inputs is None:
        inputs = problem.zeros(1).expand(len(outputs), *problem.spec.shape)

    def answer(op: Op, run: Run) -> Tensor:
        found: Tensor = outputs.clone() if isinstance(op, Affine) and op.is_layer(weight) else run()
        return found

    run = partial(problem.logits, inputs)
    logits: Tensor = Trace.of(run, problem.params, answer, records=False).outputs
    return logits


@dataclass(frozen=True)
class InputOrder:
    """The map ``h = a ∘ x[positions] + c`` from a flattened image x (n,) to a layer's input h (n,).

    Attributes:
        positions: (n,) the index in x of each entry of h, a permutation.
        scale: a (n,), never zero.
        offset: c (n,).
    """

    positions: Tensor
    scale: Tensor
    offset: Tensor

    def pixels(self, inputs: Tensor) -> Tensor:
        """Return the flattened images (…, n) that give the layer the inputs (…, n)."""
        return self.moved((inputs - self.offset) / self.scale)

    def moved(self, values: Tensor) -> Tensor:
        """Return values (…, n), one for each entry of the layer's input, in the pixels' order."""
        found = torch.empty_like(values)
        found[..., self.positions] = values
        return found


def input_orders(problem: Problem) -> list[tuple[LinearUse, InputOrder]]:
    """Return the linear layers that take the whole image, each with its order of the pixels.

    A layer takes the image if each of its inputs is one pixel, scaled and shifted. Four images are
    passed through the network. Images of zeros, ones and rising numbers determine offset, scale and
    positions, and an image of random numbers checks these three.
    """
    like, size = problem.like, torch.Size(problem.spec.shape).numel()
    rising = torch.linspace(0, 1, size)
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(0))
    probes = torch.stack([torch.zeros(size), torch.ones(size), rising, drawn]).to(like)
    uses = traced(problem, probes.reshape(-1, *problem.spec.shape)).linear
    found = []
    for use in uses:
        if use.inputs.shape != probes.shape:
            continue
        offset, full, ranked, passed = use.inputs
        scale = full - offset
        if not bool(scale.all()):
            continue
        positions = ((ranked - offset) / scale * (size - 1)).round().long()
        if not torch.equal(positions.sort().values, torch.arange(size).to(positions)):
            continue
        expected = scale * probes[3][positions] + offset
        rounding = FLOAT32_RELATIVE_ERROR * float(passed.abs().max())
        if float((expected - passed).abs().max()) <= rounding:
            found.append((use, InputOrder(positions, scale, offset)))
    return found


def find_last_layer(problem: Problem) -> LinearUse:
    """Return the last linear layer of the network that has one output for each class.

    A forward pass shows the layer, so that the network may be written in any way.

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
    return heads[-1]


def find_first_layer(problem: Problem) -> LinearUse:
    """Return the first linear layer with a trained bias that alone passes the image on.

    The logits depend on the image through the layer's outputs only. If one sample has one vector at
    this layer, the layer's gradients ``∂L/∂W = δ hᵀ`` and ``∂L/∂b = δ`` tell the error δ and the
    input h, whatever stands behind it. Two random images with equal outputs of the layer show
    whether their logits are equal, too.

    Raises:
        ValueError: no linear layer has one output for each class, or no such layer has a bias.
    """
    last = find_last_layer(problem)
    stream = torch.Generator().manual_seed(0)
    probes = torch.randn(2, *problem.spec.shape, generator=stream).to(problem.like)
    for use in traced(problem, probes).linear:
        if use.bias is None or not {use.weight, use.bias} <= problem.gradient_map.trained:
            continue
        if use.inputs.ndim == 2 and len(use.inputs) == 2:
            with torch.no_grad():
                logits = logits_behind(problem, use.weight, use.outputs[:1].expand(2, -1), probes)
            if torch.allclose(logits[0], logits[1]):
                return use
    if last.bias is None:
        raise ValueError("the last layer must have a bias.")
    raise ValueError("the last layer must be trained, and take one vector of a sample.")


def find_last_bias(problem: Problem, scaled: bool = False) -> str | None:
    """Return the name of the bias (K,) of the logits of K classes, or ``None`` if none is trained.

    The logits' bias is mostly that of the last linear layer. Some networks have no such layer, as
    they end in a convolution and its mean over positions. Then it is the last parameter of K
    numbers in which each number is added to its own logit. The gradient of such a bias is the mean
    of softmax − onehot over the samples. A parameter that shifts all logits alike does not count,
    as the softmax does not depend on it.

    If ``scaled``, a parameter also counts if only a share of each number is added to its logit, as
    behind a ReLU after the convolution. For one sample, the gradient has the signs of softmax −
    onehot even then.
    """
    try:
        bias = find_last_layer(problem).bias
        return bias if bias in problem.gradient_map.trained else None
    except ValueError:
        pass  # the logits are not the outputs of a linear layer
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
        # If the bias b enters the logits as z + s ∘ b, the log-probabilities have the derivative
        # (I − 1 pᵀ) diag(s) by b, where p is the softmax. The diagonal gives the shares s, and the
        # other entries check them.
        shares = torch.stack([each.diagonal() for each in slopes])[:, None] / (1 - softmax)
        expected = (own - softmax) * shares
        follows = float((slopes - expected).abs().max()) <= 1e-4
        follows = follows and bool((shares > -1e-4).all())
        is_whole = bool(((shares - 1).abs() < 1e-4).all())
        if follows and bool(shares.any()) and (scaled or is_whole):
            return name
    return None
