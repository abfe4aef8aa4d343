"""State the linear equations that a layer's weight gradient gives for the layer's input.

For one sample, let a be a layer's input and δ the errors ∂L/∂(W ∗ a) of its outputs. Then

    ∂L/∂W[o, c, k] = Σ_p δ[o, p] a[c, p + k],

with the sum over the outputs' positions p, for each entry k of the kernel (Zhu and Blaschko 2021,
R-GAP, eq. 8). So if δ is known, a solves ``M(δ) a = ∂L/∂W``, with one matrix M for all input
channels c.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.network.calls import Geometry


def weight_equations(
    errors: Tensor, weight_gradient: Tensor, input_shape: torch.Size, geometry: Geometry | None
) -> tuple[Tensor, Tensor]:
    """Return the system ``M(δ) a = ∂L/∂W`` of R-GAP for one layer and one sample.

    Args:
        errors: δ, (1, O, H', W') of a convolution, (1, O) of a linear layer.
        weight_gradient: ∂L/∂W, (O, C, *kernel) or (O, C).
        input_shape: the shape of a, (C, H, W) or (C,).
        geometry: kernel, padding and stride of the convolution; ``None`` for a linear layer, whose
            input has one position.

    Returns:
        M (O, K, P), for K kernel entries and P input positions, and the right-hand sides
        (O, K, C). Their first two dimensions together count the equations. The unknown a is
        (P, C).

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
    """The equations ``M a = T`` of a weight gradient, written as ``V a = values``.

    They come from the singular value decomposition ``M = U S V``, in which V holds the right
    singular vectors in its rows. There are r equations for each of the C channels of a.

    Attributes:
        rows: V (r, P), orthonormal rows: the directions of a that the gradient determines.
        values: S⁻¹ Uᵀ T (r, C), the coordinates of a (P, C) in these directions.
        singular: S (r,). Noise of T is divided by S in the values.
    """

    rows: Tensor
    values: Tensor
    singular: Tensor

    @classmethod
    def by_svd(cls, matrix: Tensor, right: Tensor, rank_tolerance: float) -> "Whitened":
        """Return the whitened form of the equations that :func:`weight_equations` gives.

        Args:
            matrix: M (O, K, P).
            right: T (O, K, C).
            rank_tolerance: singular values of M below this fraction of the largest count as noise.
        """
        matrix, right = matrix.flatten(0, 1), right.flatten(0, 1)
        left, singular, rows = torch.linalg.svd(matrix, full_matrices=False)
        rank = int((singular > rank_tolerance * singular[0]).sum())
        values = (left[:, :rank].T @ right) / singular[:rank, None]
        return cls(rows[:rank], values, singular[:rank])

    @property
    def num_equations(self) -> int:
        """The number r of directions of each channel of a that are determined."""
        return self.rows.shape[0]

    @property
    def num_positions(self) -> int:
        """The number P of unknowns in each channel of a."""
        return self.rows.shape[1]

    @property
    def is_determined(self) -> bool:
        """Return whether the equations have exactly one solution, as r = P."""
        return self.num_equations == self.num_positions

    def of_channels(self, count: int) -> "Whitened":
        """Return the same equations for a arranged as ``count`` channels.

        A linear layer sees each entry of a as a channel of one position. If a comes from a
        convolution, this puts the entries back into the convolution's channels.
        """
        if self.values.shape[1] == count:
            return self
        entries = (self.rows.T @ self.values).T.reshape(count, -1)
        rows = torch.eye(entries.shape[1], dtype=entries.dtype)
        return Whitened(rows, entries.T, rows.diagonal())

    def faded(self, noise: float) -> "Whitened":
        """Return the equations times s / √(s² + ν²), for singular values s, ν = ``noise`` · max s.

        So equations with small singular values, which are noisy, have little weight in least
        squares.
        """
        weights = self.singular / (self.singular.square() + (noise * self.singular[0]) ** 2).sqrt()
        return Whitened(weights[:, None] * self.rows, weights[:, None] * self.values, self.singular)

    def in_units(self) -> "Whitened":
        """Return the equations with both sides divided by the root mean square of the values."""
        unit = root_mean_square(self.values)
        return Whitened(self.rows / unit, self.values / unit, self.singular)

    def null_space(self) -> Tensor:
        """Return orthonormal columns (P, P − r) that span the null space of M."""
        return torch.linalg.svd(self.rows, full_matrices=True)[2][self.num_equations :].T

    def products(self, inputs: Tensor) -> Tensor:
        """Return the left sides ``V a`` (B, C, r) for inputs a (B, *shape)."""
        return inputs.reshape(len(inputs), -1, self.num_positions) @ self.rows.T

    def residual(self, inputs: Tensor) -> Tensor:
        """Return the residuals ``V a − values`` (B, C, r) for inputs a (B, *shape)."""
        return self.products(inputs) - self.values.T


def root_mean_square(values: Tensor) -> Tensor:
    """Return the root mean square of all entries, at least 1e-30, and 1 if there are no entries."""
    return values.square().mean().sqrt().clamp_min(1e-30) if values.numel() else values.new_ones(())
