"""The linear equations that a layer's weight gradient states about the layer's input.

With δ the errors ∂L/∂(W ∗ a) of a layer's outputs and a its input, of one sample,

    ∂L/∂W[o, c, k] = Σ_p δ[o, p] a[c, p + k],

over the outputs' positions p and the kernel's entries k (Zhu and Blaschko 2021, R-GAP, eq. 8). So
where δ is known, a solves ``M(δ) a = ∂L/∂W``, with one matrix for all input channels c.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.geometry import Geometry


def weight_equations(
    errors: Tensor, weight_gradient: Tensor, input_shape: torch.Size, geometry: Geometry | None
) -> tuple[Tensor, Tensor]:
    """R-GAP's system ``M(δ) a = ∂L/∂W`` of one layer and one sample.

    Args:
        errors: δ, (1, O, H', W') of a convolution, (1, O) of a linear layer.
        weight_gradient: ∂L/∂W, (O, C, *kernel) or (O, C).
        input_shape: of a, (C, H, W) or (C,).
        geometry: of the convolution; ``None`` for a linear layer, whose input has one position.

    Returns:
        M (O, K, P), of K kernel entries and P input positions; and its right-hand sides
        (O, K, C). With the first two dimensions made one they are the system's rows, and the
        unknown a is (P, C).

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
    """The equations ``M a = T`` of a weight gradient, in M's right singular vectors.

    Attributes:
        rows: V (r, P), orthonormal: the directions of a that the gradient determines.
        values: S⁻¹ Uᵀ T (r, C): ``V a = values`` for a of shape (P, C).
        singular: S (r,): noise of T is in the values as much larger as these are smaller.
    """

    rows: Tensor
    values: Tensor
    singular: Tensor

    @classmethod
    def by_svd(cls, matrix: Tensor, right: Tensor, rank_tolerance: float) -> "Whitened":
        """Whiten the equations of :func:`weight_equations`.

        Args:
            matrix: M (O, K, P).
            right: T (O, K, C).
            rank_tolerance: singular values of M below this fraction of the largest are noise.
        """
        matrix, right = matrix.flatten(0, 1), right.flatten(0, 1)
        left, singular, rows = torch.linalg.svd(matrix, full_matrices=False)
        rank = int((singular > rank_tolerance * singular[0]).sum())
        values = (left[:, :rank].T @ right) / singular[:rank, None]
        return cls(rows[:rank], values, singular[:rank])

    @classmethod
    def by_gram(cls, matrix: Tensor, right: Tensor, rank_tolerance: float) -> "Whitened":
        """The same by the eigenvectors of M Mᵀ, in a third of the time if the rows are few.

        The equations stay exact, as both sides are combined alike; but rows of singular values
        below 1e-6 of the largest are not orthonormal to more than three digits or so.
        """
        matrix, right = matrix.flatten(0, 1), right.flatten(0, 1)
        squares, left = torch.linalg.eigh(matrix @ matrix.T)
        singular, left = squares.flip(0).clamp_min(0).sqrt(), left.flip(1)
        rank = int((singular > rank_tolerance * singular[0]).sum())
        combined = left[:, :rank].T / singular[:rank, None]
        return cls(combined @ matrix, combined @ right, singular[:rank])

    @property
    def num_equations(self) -> int:
        """r: directions of a channel that are determined."""
        return self.rows.shape[0]

    @property
    def num_positions(self) -> int:
        """P: unknowns of a channel."""
        return self.rows.shape[1]

    @property
    def is_determined(self) -> bool:
        """Whether they have one solution, r = P."""
        return self.num_equations == self.num_positions

    def open_share(self) -> Tensor:
        """Which share of each entry (P,) they leave open: the diagonal of I − VᵀV."""
        return 1 - self.rows.square().sum(dim=0)

    def of_channels(self, count: int) -> "Whitened":
        """The same for a of ``count`` channels.

        A linear layer takes the C·P entries of a in for channels of one entry; where they come
        from a convolution, its channels are meant.
        """
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
        return torch.linalg.svd(self.rows, full_matrices=True)[2][self.num_equations :].T

    def residual(self, inputs: Tensor) -> Tensor:
        """How far inputs (1, *shape) are from meeting them, (r, C)."""
        return self.rows @ inputs.reshape(-1, self.num_positions).T - self.values

    def single(self) -> "Whitened":
        """The same in single precision."""
        return Whitened(self.rows.float(), self.values.float(), self.singular.float())


def root_mean_square(values: Tensor) -> Tensor:
    """√ of the mean square of all entries, to divide by.

    So it is at least 1e-30 where all entries are zero, and one where there are none.
    """
    return values.square().mean().sqrt().clamp_min(1e-30) if values.numel() else values.new_ones(())
