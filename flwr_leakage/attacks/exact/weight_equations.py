"""State the linear equations that a layer's weight gradient gives for the layer's input.

For one sample, let a be a layer's input and δ the loss's derivatives ∂L/∂(W ∗ a) at its outputs.
For a linear layer or a convolution of stride 1,

    ∂L/∂W[o, c, k] = Σ_p δ[o, p] a[c, p + k],

where o is an output channel, c an input channel, k an entry of the kernel, and the sum is over the
positions p of the outputs (Zhu and Blaschko 2021, R-GAP, eq. 8). So if δ is known, a solves
``M(δ) a = ∂L/∂W``, with one matrix M for all input channels c.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.network.calls import Geometry


def weight_equations(
    errors: Tensor, weight_gradient: Tensor, input_shape: torch.Size, geometry: Geometry | None
) -> tuple[Tensor, Tensor]:
    """Return the system ``M(δ) a = ∂L/∂W`` of R-GAP for one layer's input a and one sample.

    Args:
        errors: δ = ∂L/∂(W ∗ a), (1, O, H', W') of a convolution, (1, O) of a linear layer.
        weight_gradient: ∂L/∂W, (O, C, *kernel) or (O, C).
        input_shape: the shape of a, (C, H, W) or (C,).
        geometry: kernel, padding and stride of the convolution; ``None`` for a linear layer, whose
            input has one position.

    Returns:
        M (O, K, P), for K kernel entries and P input positions, and the right-hand sides (O, K, C).
        Their first two dimensions together count the equations. The unknown a has the shape (P, C).

    Example:
        >>> errors, inputs = torch.tensor([[2.0, -1.0]]), torch.tensor([[3.0, 5.0, 7.0]])
        >>> matrix, right = weight_equations(errors, errors.T @ inputs, torch.Size([3]), None)
        >>> torch.equal(matrix @ inputs, right)
        True
    """
    if geometry is None:
        return errors.reshape(-1, 1, 1), weight_gradient[:, None]
    _, height, width = input_shape
    positions = torch.eye(height * width, dtype=errors.dtype, device=errors.device)
    seen = geometry.patches(positions.reshape(-1, 1, height, width))
    matrix = torch.einsum("ikp,op->oki", seen, errors.flatten(2)[0])
    return matrix, weight_gradient.flatten(2).mT


@dataclass(frozen=True)
class Whitened:
    """A weight gradient's equations ``M a = T`` for a layer's input a, as ``V a = values``.

    The singular value decomposition ``M = U S V`` gives them; V holds the right singular vectors in
    its rows. The input a has the shape (P, C), for P positions of C channels. There are r equations
    for each channel.

    Attributes:
        rows: V (r, P), orthonormal rows: the directions of a that the gradient determines.
        values: S⁻¹ Uᵀ T (r, C), the coordinates of a in these directions.
        singular: S (r,), the singular values. Noise of T is divided by S in the values.
    """

    rows: Tensor
    values: Tensor
    singular: Tensor

    @classmethod
    def by_svd(cls, matrix: Tensor, right: Tensor, rank_tolerance: float) -> "Whitened":
        """Return the equations ``M a = T`` of a weight gradient in the form ``V a = values``.

        :func:`weight_equations` gives M (O, K, P) and T (O, K, C), for O output channels with K
        kernel entries, and for the unknown input a with C channels of P positions. The rows of V
        are right singular vectors of M. Directions with singular values of M below
        ``rank_tolerance`` times the largest are left out as noise.
        """
        matrix, right = matrix.flatten(0, 1), right.flatten(0, 1)
        left, singular, rows = torch.linalg.svd(matrix, full_matrices=False)
        rank = int((singular > rank_tolerance * singular[0]).sum())
        values = (left[:, :rank].T @ right) / singular[:rank, None]
        return cls(rows[:rank], values, singular[:rank])

    @property
    def num_equations(self) -> int:
        """The number r of directions that the equations determine in each channel of the input."""
        return self.rows.shape[0]

    @property
    def num_positions(self) -> int:
        """The number P of unknown entries in each channel of the layer's input."""
        return self.rows.shape[1]

    @property
    def is_determined(self) -> bool:
        """Whether each channel has as many equations as unknowns, and so a single solution."""
        return self.num_equations == self.num_positions

    def of_channels(self, count: int) -> "Whitened":
        """Return these equations for the layer's input a, rearranged as ``count`` channels.

        For a linear layer, each entry of a counts as a channel of one position. If a is the
        flattened output of a convolution, the result has the convolution's channels and positions
        instead. The result is ``self`` if the equations have ``count`` channels already.
        """
        if self.values.shape[1] == count:
            return self
        entries = (self.rows.T @ self.values).T.reshape(count, -1)
        rows = torch.eye(entries.shape[1], dtype=entries.dtype)
        return Whitened(rows, entries.T, rows.diagonal())

    def faded(self, noise: float) -> "Whitened":
        """Return the equations, each weighted by s / √(s² + ν²) with its singular value s.

        Here ν is ``noise`` times the largest singular value. Equations with small singular values
        are noisy. So they get little weight in a least-squares fit.
        """
        weights = self.singular / (self.singular.square() + (noise * self.singular[0]) ** 2).sqrt()
        return Whitened(weights[:, None] * self.rows, weights[:, None] * self.values, self.singular)

    def in_units(self) -> "Whitened":
        """Return the equations, all divided by the root mean square of all right-hand sides."""
        unit = root_mean_square(self.values)
        return Whitened(self.rows / unit, self.values / unit, self.singular)

    def null_space(self) -> Tensor:
        """Return orthonormal columns (P, P − r) that span all directions but the r rows of V."""
        return torch.linalg.svd(self.rows, full_matrices=True)[2][self.num_equations :].T

    def products(self, inputs: Tensor) -> Tensor:
        """Return the left sides ``V a`` (B, C, r) of the r equations for inputs a (B, *shape).

        V (r, P) holds the equations' rows, for the P positions of each of C channels.
        """
        return inputs.reshape(len(inputs), -1, self.num_positions) @ self.rows.T

    def residual(self, inputs: Tensor) -> Tensor:
        """Return the r equations' residuals ``V a − values`` (B, C, r) for inputs a (B, *shape).

        V (r, P) holds the equations' rows, and ``values`` (r, C) their right-hand sides. The inputs
        of each of B samples have C channels of P positions.
        """
        return self.products(inputs) - self.values.T


def root_mean_square(values: Tensor) -> Tensor:
    """Return the root mean square of all entries: at least 1e-30, so that one can divide by it.

    It is 1 if there are no entries.
    """
    return values.square().mean().sqrt().clamp_min(1e-30) if values.numel() else values.new_ones(())
