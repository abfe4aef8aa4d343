"""Separate the samples of a small batch by the last layer's gradient alone.

The last layer has the logits ``z = W h + c``. The cross-entropy's error of a sample with the label
y is ``e = softmax(z) − τ_y``, with the one-hot or smoothed target ``τ_y``. The gradient
``[∂L/∂W, ∂L/∂c]`` is a product U [R, β] of rank b, where U (K, b) spans the errors of b samples and
R (b, F) their features (:mod:`~flwr_leakage.attacks.network.linear`). A sample's features are
``h = t R`` for a vector t (b,), its dual, with ``t·β = 1``. So t alone gives the logits, the
softmax and the error. This error must lie in the span of U:

    (I − U Uᵀ) e(t; y) = 0.

For K classes these are K − b equations for b − 1 unknowns. One equation is void, as errors sum to
zero. Solutions are isolated if 2 b ≤ K. The equations hold for every sample, whatever the network
before the last layer, its activation and its training. Neither sparse features nor a ReLU are
needed. Every sample found is removed from the gradient, which leaves more equations and fewer
unknowns for the others.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.loss_check import is_plain_mean
from flwr_leakage.attacks.network.linear import LayerFactor, factorize, find_last_layer
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR, FLOAT32_ROUNDING, NOISE_DEVIATIONS
from flwr_leakage.losses import Loss

STARTS, ROUNDS = 16, 8
"""Number of random starts for each label in a round of the search for samples, and number of rounds
without a new sample after which the search ends. More of either take longer, and find no more
samples."""

STEPS = 40
"""Number of Levenberg–Marquardt steps from each start of the search for a sample. More take longer,
and find no more samples."""

SPREAD = 3.0
"""Standard deviation that random starts of the search for a sample have in the logits, along each
direction in which features can move the logits (chosen on development draws; no results are
kept)."""

LARGEST_MISFIT = 1e-3
"""Largest share of a sample's error outside the span of the columns of the last layer's gradient at
which the sample counts as found, whatever the noise (chosen on development draws; no results are
kept)."""

SOFTMAX_ROUNDINGS = 4.0
"""Largest error of a client's softmax, in units of 2⁻²⁴. Up to 1.7 were seen on development draws;
no results are kept."""

LARGEST_SCALE_ERROR = 0.1
"""Largest ``|t·q − 1|`` at which a sample counts as found, whatever the noise. For the last layer's
gradient ``U [R, β]``, the sample has features t R and an error U q, and t·q = 1 if it is a true
one. If noise merges two samples of one class into a false one, ``|t·q − 1|`` is about 0.3 (chosen
on development draws; no results are kept)."""


def tells_apart(num_samples: int, num_classes: int) -> bool:
    """Return whether the last layer's gradient alone can determine each sample of a batch.

    It can for B ≥ 2 samples if 2 B is at most the number of classes.

    Example:
        >>> tells_apart(5, 10), tells_apart(6, 10)
        (True, False)
    """
    return num_samples >= 2 and 2 * num_samples <= num_classes


@dataclass(frozen=True)
class HeadSamples:
    """The samples of a batch that the last layer's gradient separates from one another.

    Attributes:
        weight: the name of the last layer's weight.
        factor: the factors ``U [R, β]`` of the layer's gradient, of rank b.
        labels: (k,) classes of the k ≤ b samples found.
        duals: (k, b) the vectors t of these samples; a sample's features, its inputs of the layer,
            are ``t R``.
        errors: (k, K) derivatives of the batch's mean loss by these samples' logits.
    """

    weight: str
    factor: LayerFactor
    labels: Tensor
    duals: Tensor
    errors: Tensor

    @property
    def is_whole(self) -> bool:
        """Whether all samples of the batch are found, as many as the rank of the gradient."""
        return len(self.labels) == self.factor.rank

    @property
    def columns(self) -> Tensor:
        """The coordinates (k, b) of k samples' errors in the span of the gradient's columns.

        For each row q, the error of a sample is ``U q``, with the orthonormal basis U of this span.
        """
        return self.errors @ self.factor.left

    def joined(self, dual: Tensor, label: int, error: Tensor) -> "HeadSamples":
        """Return these samples and one more.

        Its features are ``t R`` with its dual t (b,) and the right factor R (b, F) of the last
        layer's gradient. ``error`` (K,) is the derivative of the batch's mean loss by its logits.
        """
        return replace(
            self,
            labels=torch.cat([self.labels, self.labels.new_tensor([label])]),
            duals=torch.vstack([self.duals, dual]),
            errors=torch.vstack([self.errors, error]),
        )


def split_head(problem: Problem, generator: torch.Generator) -> HeadSamples:
    """Return the samples that the last layer's gradient separates, as many as are found.

    The gradient is ``U [R, β]``, of rank b. The columns of U span the errors of all samples, the
    derivatives of the loss by the logits, and the rows of R their features, the layer's inputs. A
    returned sample has features t R and an error U q, with its dual t (b,) and coordinates q (b,).
    Up to rounding and noise, its features and label predict its error, and t·q = 1.

    Raises:
        ValueError: the update is not one plain step, the batch has too many samples for its
            classes, the loss is no mean of cross-entropies, the network does not end in a linear
            layer with a bias, or its gradient does not show all samples.
    """
    classes, count = problem.spec.num_classes, problem.num_samples
    if not problem.is_single_gradient:
        raise ValueError("the last layer's gradient tells samples apart in one plain step.")
    if not tells_apart(count, classes):
        raise ValueError(
            f"the last layer's gradient tells 2 to {classes // 2} samples of {classes} classes "
            f"apart, got {count}."
        )
    layer = find_last_layer(problem)
    if layer.bias is None:
        raise ValueError("the last layer must have a bias, without which no sample has a scale.")
    matrix, offset = problem.params[layer.weight], problem.params[layer.bias]
    targets = error_targets(problem.gradient_map.loss, classes)
    if targets is None:
        raise ValueError("the loss is no cross-entropy, whose errors are softmax minus a target.")
    targets = targets.to(offset)
    gradients = (problem.gradient[layer.weight], problem.gradient[layer.bias])
    factor = factorize(*gradients, count, generator)
    if factor.rank != count:
        raise ValueError(f"the last layer's gradient shows {factor.rank} of {count} samples.")
    none = offset.new_zeros(0, classes)
    found = HeadSamples(
        layer.weight, factor, torch.zeros(0, dtype=torch.int64), none[:, :count], none
    )
    rest, lift = factor, torch.eye(count).to(offset)
    misses = 0
    while not found.is_whole and misses < ROUNDS:
        before = found
        equations = _Equations.of(matrix, offset, rest, targets)
        for dual, label in equations.solutions(generator):
            whole = dual @ lift
            softmax = (matrix @ (whole @ factor.right) + offset).softmax(0)
            error = (softmax - targets[label]) / count
            is_new = not bool(((found.columns @ whole).abs() > 0.5).any())
            if is_new and not found.is_whole and _is_told(factor, whole, error, count):
                found = found.joined(whole, label, error)
        if found is before:
            misses += 1
        elif not found.is_whole:
            rest, lift = factor.remainder(found.duals, found.columns.T)
    # A gradient from which samples were removed contains the errors of their estimates. So the
    # duals are solved once more, by the equations of the whole gradient.
    equations, own = _Equations.of(matrix, offset, factor, targets), targets[found.labels]
    points = (found.duals - equations.origin) @ equations.directions.T
    points, _ = equations.descend(points, own)
    duals = equations.origin + points @ equations.directions
    softmax = (duals @ factor.right @ matrix.T + offset).softmax(1)
    return replace(found, duals=duals, errors=(softmax - own) / factor.rank)


def told_labels(problem: Problem) -> Int[Tensor, " k"]:
    """Return the labels (k,) of the samples that the last layer's gradient separates, in any order.

    The result is empty if it separates none; see :func:`split_head`. The search draws its starts
    from a generator of its own, so that the labels do not depend on the draws of an attack.
    """
    if problem.is_single_gradient and tells_apart(problem.num_samples, problem.spec.num_classes):
        with suppress(ValueError):
            generator = torch.Generator().manual_seed(0)
            return split_head(problem.to(torch.float64), generator).labels
    return torch.zeros(0, dtype=torch.int64)


def _is_told(factor: LayerFactor, dual: Tensor, error: Tensor, num_samples: int) -> bool:
    """Return whether a sample's error s (K,) meets its equations up to rounding and noise.

    With the factors ``U [R, β]`` of the gradient and the sample's dual t (b,), the equations are
    that s lies in the span of U, and that ``t·q = 1`` for ``s = U q``. The client's float32 softmax
    has errors of about 2⁻²⁴, however small the sample's own error is; the loss is a mean over
    ``num_samples``. Noise of standard deviation σ in the gradient G moves s out of the span by
    ``σ ‖G⁺ s‖`` in each direction. It moves ``t·q = h̃ᵀ G⁺ s`` by ``σ ‖t‖ ‖G⁺ s‖``, with the
    features ``h̃ = [h, 1]``.
    """
    column, size = error @ factor.left, float(error.norm())
    misfit = float((error - factor.left @ column).norm()) / max(size, 1e-300)
    noise = factor.noise * float((column / factor.singular[: factor.rank]).norm())
    outside = max(len(error) - factor.rank, 1) ** 0.5
    softmax = SOFTMAX_ROUNDINGS * FLOAT32_ROUNDING / num_samples
    allowed = NOISE_DEVIATIONS * noise * outside + softmax + FLOAT32_RELATIVE_ERROR * size
    scale = NOISE_DEVIATIONS * noise * float(dual.norm()) + 1e-3
    missed = float((column @ dual - 1).abs())
    return misfit <= min(allowed / max(size, 1e-300), LARGEST_MISFIT) and (
        missed <= min(scale, LARGEST_SCALE_ERROR)
    )


def error_targets(loss: Loss, num_classes: int) -> Float[Tensor, "K K"] | None:
    """Return τ (K, K) if a loss has the derivative ``softmax(z) − τ_y`` by logits z at label y.

    For the cross-entropy, row τ_y is the one-hot vector of class y. If the loss smooths labels, the
    row is mixed with equal shares of all classes. The result is ``None`` for a loss of another
    derivative, or for one that is no mean over samples. A loss maps (logits, targets) to a scalar.
    """
    ids = torch.arange(num_classes)
    told = []
    for seed in range(2):
        stream = torch.Generator().manual_seed(seed)
        rows = torch.randn(num_classes, num_classes, generator=stream, dtype=torch.float64)
        if not is_plain_mean(loss, rows):
            return None
        with torch.enable_grad():
            leaf = rows.requires_grad_()
            value = torch.stack([loss(leaf[i : i + 1], ids[i : i + 1]) for i in ids.tolist()]).sum()
            (slopes,) = torch.autograd.grad(value, leaf)
        told.append(rows.detach().softmax(1) - slopes)
    return told[0] if torch.allclose(told[0], told[1], atol=1e-6) else None


@dataclass(frozen=True)
class _Equations:
    """The equations for the features of a sample behind a last layer's gradient, given its label.

    The gradient ``[∂L/∂W, ∂L/∂c]`` by the layer's weight and bias, of rank b, is ``U [R, β]``, with
    U (K, b), R (b, F) and β (b,). The features are t R, with the sample's dual t (b,). The dual is
    ``t₀ + p D``, with unknown coordinates p (b − 1,). The equations say that the sample's error,
    the derivative of the loss by its logits, lies in the span of U.

    Attributes:
        base: logits (K,) of the shortest dual t₀ with ``t₀·β = 1``.
        slopes: (K, b − 1) derivative of the logits by p.
        origin: t₀ (b,).
        directions: D (b − 1, b), whose rows are orthonormal and orthogonal to β.
        outside: (K, K − b) orthonormal basis of the vectors orthogonal to U.
        targets: τ (K, K); the error of a sample of class y is softmax − τ_y.
    """

    base: Tensor
    slopes: Tensor
    origin: Tensor
    directions: Tensor
    outside: Tensor
    targets: Tensor

    @classmethod
    def of(
        cls, matrix: Tensor, offset: Tensor, factor: LayerFactor, targets: Tensor
    ) -> "_Equations":
        """Return the equations for the samples behind a last layer's gradient.

        Their unknowns are a sample's dual t, with which its features are ``t R``. ``factor`` holds
        the factors ``U [R, β]`` of the gradient. The equations say that the sample's error, the
        derivative of the loss by its logits, lies in the span of U. ``matrix`` is the layer's
        weight W (K, F) and ``offset`` its bias (K,). ``targets`` is τ of :func:`error_targets`.
        """
        origin = factor.bias / factor.bias.square().sum()
        directions = torch.linalg.svd(factor.bias[None]).Vh[1:]
        outside = torch.linalg.svd(factor.left).U[:, factor.rank :]
        projected = matrix @ factor.right.T
        base = projected @ origin + offset
        slopes = projected @ directions.T
        return cls(base, slopes, origin, directions, outside, targets)

    def solutions(self, generator: torch.Generator) -> list[tuple[Tensor, int]]:
        """Return candidates for samples of the batch, the most exact first.

        Each is a dual t (b,) and the label whose equations it solves. The dual gives a sample's
        features as the combination ``t R`` of the b rows of R, from the factors ``U [R, β]`` of the
        last layer's gradient of rank b. For each label, the equations are solved from several
        random starts.
        """
        labels = torch.arange(len(self.targets)).repeat_interleave(STARTS)
        _, sizes, axes = torch.linalg.svd(self.slopes, full_matrices=False)
        if not len(sizes):  # one sample is left, and the condition t·β = 1 gives its dual
            labels = torch.arange(len(self.targets))
        draws = torch.randn(len(labels), len(sizes), generator=generator, dtype=torch.float64)
        # A start moves the logits by SPREAD along each axis, however small the features are.
        points = (SPREAD * draws.to(sizes) / sizes.clamp_min(1e-300)) @ axes
        points, values = self.descend(points, self.targets[labels])
        order = (values <= LARGEST_MISFIT**2).nonzero()[:, 0]
        order = order[values[order].argsort()]
        return [(self.origin + points[i] @ self.directions, int(labels[i])) for i in order.tolist()]

    def descend(self, points: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coordinates p (M, b − 1) at which M descents end, and their residuals (M,).

        They are coordinates of samples' duals ``t₀ + p D``; see the class. A residual is the sum of
        squares of the equations. The descents, by Levenberg–Marquardt, start at ``points``
        (M, b − 1). They share a loop, and each has a damping of its own. ``targets`` (M, K) are the
        targets τ_y of the labels that they assume.
        """
        damping = points.new_full((len(points), 1, 1), 1e-2)
        residual, slope = self._linearized(points, targets)
        values = residual.square().sum(1)
        for _ in range(STEPS):
            normal = slope.mT @ slope
            shift = damping * torch.diag_embed(normal.diagonal(dim1=1, dim2=2) + 1e-300)
            pull = slope.mT @ residual[..., None]
            step, failed = torch.linalg.solve_ex(normal + shift, pull)
            moved = points - torch.where(failed[:, None] == 0, step[..., 0], 0.0)
            new_residual, new_slope = self._linearized(moved, targets)
            new_values = new_residual.square().sum(1)
            better = new_values < values
            points = torch.where(better[:, None], moved, points)
            residual = torch.where(better[:, None], new_residual, residual)
            slope = torch.where(better[:, None, None], new_slope, slope)
            values = torch.where(better, new_values, values)
            damping = torch.where(better[:, None, None], 0.3 * damping, 4 * damping)
            damping = damping.clamp(1e-12, 1e12)
        return points, values

    def _linearized(self, points: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the part (M, K − b) of each error outside the span of U, and its derivative by p.

        The derivative has the shape (M, K − b, b − 1). Each error is divided by its norm, as an
        error of nearly zero lies in every span. ``points`` (M, b − 1) are the coordinates p of M
        duals, and ``targets`` (M, K) the targets τ_y of the labels that these assume.
        """
        softmax = (self.base + points @ self.slopes.T).softmax(1)
        errors = softmax - targets
        norms = errors.norm(dim=1, keepdim=True).clamp_min(1e-150)
        units = errors / norms
        moves = softmax[..., None] * self.slopes
        moves = moves - softmax[..., None] * moves.sum(1, keepdim=True)
        moves = moves - units[..., None] * (units[:, None] @ moves)
        return units @ self.outside, self.outside.T @ moves / norms[..., None]
