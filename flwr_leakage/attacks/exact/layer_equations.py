"""What a layer's outputs and its weight's gradient tell about its input: a convex problem."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks.exact.chain import Link
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS


@dataclass(frozen=True)
class Whitened:
    """The linear equations ``M a = T`` of a weight gradient, in M's right singular vectors.

    Attributes:
        rows: V (r, P), orthonormal: the directions of a that the gradient determines.
        values: S⁻¹ Uᵀ T (r, C): ``V a = values`` for a of shape (P, C).
        singular: S (r,): noise of T is in the values as much larger as these are smaller.
    """

    rows: Tensor
    values: Tensor
    singular: Tensor

    @property
    def is_determined(self) -> bool:
        """Whether they have one solution, r = P."""
        return self.rows.shape[0] == self.rows.shape[1]

    def open_share(self) -> Tensor:
        """Which share of each entry (P,) they leave open: the diagonal of I − VᵀV."""
        return 1 - self.rows.square().sum(dim=0)

    def of_channels(self, count: int) -> "Whitened":
        """The same for a of ``count`` channels; a linear layer's own are of single entries."""
        if self.values.shape[1] == count:
            return self
        entries = (self.rows.T @ self.values).T.reshape(count, -1)
        rows = torch.eye(entries.shape[1], dtype=entries.dtype)
        return Whitened(rows, entries.T, rows.diagonal())

    def faded(self, noise: float) -> "Whitened":
        """Rows weighted by s / √(s² + ν²), with ν a share ``noise`` of the largest s."""
        weights = self.singular / (self.singular.square() + (noise * self.singular[0]) ** 2).sqrt()
        return Whitened(weights[:, None] * self.rows, weights[:, None] * self.values, self.singular)

    def in_units(self) -> "Whitened":
        """Both sides divided by the root mean square of the values."""
        unit = root_mean_square(self.values)
        return Whitened(self.rows / unit, self.values / unit, self.singular)

    def null_space(self) -> Tensor:
        """N (P, P − r), orthonormal: the directions that they leave open."""
        return torch.linalg.svd(self.rows, full_matrices=True)[2][len(self.rows) :].T


def root_mean_square(values: Tensor) -> Tensor:
    """Of all entries, above zero; of none it is one."""
    return values.square().mean().sqrt().clamp_min(1e-30) if values.numel() else values.new_ones(())


def gradient_equations(
    link: Link,
    errors: Tensor,
    weight_gradient: Tensor,
    rank_tolerance: float,
    certain: Tensor | None = None,
) -> Whitened:
    """Whiten the equations that a layer's weight gradient states about its input.

    Args:
        link: the layer.
        errors: ∂L/∂(W ∗ a + b), (1, *output_shape).
        weight_gradient: ∂L/∂W.
        rank_tolerance: singular values of M below this fraction of the largest are noise.
        certain: output channels (C,) whose errors are exact; the others are left out. These
            equations are fewer than the unknowns, and solved time and again.
    """
    if certain is not None:
        errors, weight_gradient = errors[:, certain], weight_gradient[certain]
    if isinstance(link.module, nn.Linear):
        matrix, target = errors.reshape(-1, 1), weight_gradient
    else:
        m = link.module
        _, height, width = link.input_shape
        positions = torch.eye(height * width, dtype=errors.dtype)
        patches = F.unfold(
            positions.reshape(-1, 1, height, width),
            m.kernel_size,
            m.dilation,
            m.padding,  # type: ignore[arg-type]
            m.stride,
        )
        channels = errors.shape[1]
        # (output channels · kernel positions, input positions), the same for all input channels
        matrix = torch.einsum("pkq,oq->okp", patches, errors.reshape(channels, -1))
        matrix = matrix.reshape(-1, height * width)
        target = weight_gradient.flatten(2).transpose(1, 2).reshape(len(matrix), -1)
    if certain is not None:
        return _whiten_by_gram(matrix, target, rank_tolerance)
    left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    rank = int((singular > rank_tolerance * singular[0]).sum())
    values = (left[:, :rank].T @ target) / singular[:rank, None]
    return Whitened(right[:rank], values, singular[:rank])


def _whiten_by_gram(matrix: Tensor, target: Tensor, rank_tolerance: float) -> Whitened:
    """Whiten by the eigenvectors of M Mᵀ, a third of the singular value decomposition's time.

    The equations stay exact, as both sides are combined alike; rows of singular values below 1e-6
    of the largest are not orthonormal to more than three digits or so.
    """
    squares, left = torch.linalg.eigh(matrix @ matrix.T)
    singular, left = squares.flip(0).clamp_min(0).sqrt(), left.flip(1)
    rank = int((singular > rank_tolerance * singular[0]).sum())
    combined = left[:, :rank].T / singular[:rank, None]
    return Whitened(combined @ matrix, combined @ target, singular[:rank])


@dataclass(frozen=True)
class Knowledge:
    """What is known of the input a of one layer, to be used in a fit.

    Attributes:
        link: the layer that takes a.
        outputs: the layer's known activations, (1, *output_shape).
        errors: ∂L/∂(W ∗ a + b), (1, *output_shape).
        equations: those of its weight gradient.
        trust: in the outputs, a factor of their residuals that has or broadcasts to their shape.
    """

    link: Link
    outputs: Tensor
    errors: Tensor
    equations: Whitened
    trust: Tensor | float = 1.0

    def forward_residual(self, inputs: Tensor) -> Tensor:
        """How far ``z(a)`` is from what the outputs tell, per entry, in units of typical a."""
        link = self.link
        z = link.preactivation(inputs)
        assert link.activation is not None
        known = link.activation.invertible(self.outputs)
        residual = torch.where(known, z - link.activation.inverse(self.outputs), z.clamp_min(0))
        slope = link.activation.slope(self.outputs)
        weight = torch.where(known, slope / slope.max().clamp_min(1e-30), 1.0)
        gain = link.scale.abs() * link.weight.flatten(1).norm(dim=1)
        return self.trust * weight * residual / gain.mean().clamp_min(1e-30)

    def forward_size(self) -> Tensor:
        """The squared size of the known outputs in the units of ``forward_residual``."""
        gain = self.link.scale.abs() * self.link.weight.flatten(1).norm(dim=1)
        return self.outputs.square().sum() / gain.mean().square().clamp_min(1e-30)

    def gradient_residual(self, inputs: Tensor) -> Tensor:
        """How far a is from the weight gradient's equations, whitened."""
        rows = self.equations.rows
        return rows @ inputs.reshape(-1, rows.shape[1]).T - self.equations.values


def solve_layer(
    knowledge: Knowledge, low: Tensor | float, high: Tensor | float, iterations: int
) -> tuple[Tensor, float]:
    """Find the input a of a layer: the convex problem of the module's docstring.

    The gradient's equations hold exactly, in null space coordinates; the forward equations and
    the range [low, high] of a are met in least squares.

    Returns:
        a (1, *input_shape) and the mean squared residual, relative to a's mean square.
    """
    equations = knowledge.equations
    null = equations.null_space()
    channels, freedom = equations.values.shape[1], null.shape[1]
    start = torch.zeros(1, freedom * channels, dtype=equations.rows.dtype)

    def to_inputs(flat: Tensor) -> Tensor:
        solution = equations.rows.T @ equations.values + null @ flat.reshape(freedom, channels)
        return solution.T.reshape(1, *knowledge.link.input_shape)

    def residuals(flat: Tensor) -> Tensor:
        inputs = to_inputs(flat)
        outside = (low - inputs).clamp_min(0) + (inputs - high).clamp_min(0)
        forward = knowledge.forward_residual(inputs)
        return torch.cat([forward.flatten(), outside.flatten()])

    if freedom:
        unit = float(residuals(start[0]).square().mean().clamp_min(1e-30))

        def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            gradient, value = torch.func.grad_and_value(
                lambda flat: residuals(flat).square().mean() / unit
            )(points[0])
            return value[None], gradient[None]

        start = LBFGS(iterations=iterations, tolerance=1e-20, relative_tolerance=1e-3)(
            evaluate, start
        ).points
    solution = to_inputs(start)
    error = residuals(start[0]).square().mean() / solution.square().mean().clamp_min(1e-30)
    return solution, float(error)
