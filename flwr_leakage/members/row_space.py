"""The row space of a layer's update, and how much of a vector lies outside of it.

One step on samples i changes a linear layer ``z = W h + c`` by ``ΔW = −η Σᵢ eᵢ hᵢᵀ``, with eᵢ the
derivative of the loss by zᵢ: the rows of ΔW are combinations of the layer's inputs hᵢ. The input of
a sample that was in the step therefore lies in the row space, as long as there are fewer samples
than outputs and inputs; that of another one does not. ProjRes (arXiv 2604.21197, 2026) tests
members by this residual.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

RELATIVE_FLOOR = 1e-6
"""Singular values below this share of the largest one are taken for rounding of single precision,
whose relative error is 6e-8 for each of the numbers that are summed."""


@dataclass(frozen=True)
class RowSpace:
    """The right singular vectors of a matrix G (m, n), and the noise in each direction.

    Attributes:
        directions: vₖ (r, n), orthonormal rows, by falling singular value.
        singular_values: sₖ (r,).
        noise: λ₀, the energy that noise adds to ‖G v‖² for a unit vector v.
        outputs: m.
    """

    directions: Float[Tensor, "r n"]
    singular_values: Float[Tensor, " r"]
    noise: float
    outputs: int

    @classmethod
    def of(cls, matrix: Float[Tensor, "m n"], noise_std: float = 0.0) -> "RowSpace":
        """Return the row space of a matrix, in double precision.

        Args:
            matrix: G, such as a layer's pseudo-gradient.
            noise_std: σ ≥ 0 of independent noise on its entries; then λ₀ = m σ², and at least
                ``RELATIVE_FLOOR`` squared times the largest sₖ².

        Example:
            >>> space = RowSpace.of(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
            >>> space.rank, [round(float(v), 3) for v in space.singular_values]
            (2, [2.0, 1.0])
        """
        # A long matrix is first made triangular, which takes a quarter of the time.
        basis, core = torch.linalg.qr(matrix.double().T)
        _, values, directions = torch.linalg.svd(core.T, full_matrices=False)
        return cls(directions @ basis.T, values, 0.0, len(matrix)).with_noise(noise_std)

    def with_noise(self, noise_std: float) -> "RowSpace":
        """Return the same row space, with another σ of the noise on the entries."""
        largest = float(self.singular_values[0]) if len(self.singular_values) else 0.0
        noise = max(self.outputs * noise_std**2, (RELATIVE_FLOOR * largest) ** 2)
        return replace(self, noise=noise)

    @property
    def rank(self) -> int:
        """How many singular values are above those of noise alone, σ(√m + √n) (Bai and Yin)."""
        edge = self.noise * (1 + (self.directions.shape[1] / max(self.outputs, 1)) ** 0.5) ** 2
        return int((self.singular_values.square() > 1.1 * edge).sum())

    def leftover(
        self, rows: Float[Tensor, "N n"], levels: Float[Tensor, " L"]
    ) -> Float[Tensor, "N L"]:
        """Return the part of each row's squared length that the row space does not explain.

        It is ``Σₖ cₖ² λ/(sₖ² + λ) + ‖h − Σₖ cₖ vₖ‖²`` with cₖ = vₖᵀh and λ = max(λ₀, level · s₁²),
        the least value of ‖h − Gᵀa‖² + λ‖a‖² (ridge regression). For λ → 0 it is the squared
        distance of h from the row space. With λ, a direction explains the less of h, the less
        its sₖ² stands out of λ. One whose sₖ² is below λ₀ / 100 is left over as a whole.

        Args:
            rows: (N, n) vectors h.
            levels: (L,) dampings ≥ 0, relative to the largest singular value squared.

        Returns:
            (N, L) the energy ≥ 0 of each row at each level.

        Example:
            A direction that the matrix does not have is left over as a whole.

            >>> space = RowSpace.of(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
            >>> rows = torch.tensor([[3.0, 4.0, 0.0], [3.0, 4.0, 5.0]])
            >>> space.leftover(rows, torch.zeros(1)).squeeze(1).round(decimals=4).tolist()
            [0.0, 25.0]
        """
        rows = rows.double()
        energies = self.singular_values.square()
        energies = energies[energies > 0.01 * self.noise]
        explained = (rows @ self.directions[: len(energies)].T).square()
        outside = (rows.square().sum(1) - explained.sum(1)).clamp_min(0)
        if not len(energies):
            return outside[:, None].expand(-1, len(levels))
        damping = (levels.double() * energies[0]).clamp_min(self.noise)
        kept = damping / (energies[:, None] + damping).clamp_min(torch.finfo(torch.float64).tiny)
        return outside[:, None] + explained @ kept


def noise_of_spectrum(space: RowSpace, rows: int) -> float:
    """Return σ of independent noise on a matrix (m, n) whose own rank is at most ``rows``.

    The singular values behind the first ``rows`` are the noise's alone: on average
    sₖ² = (max(m, n) − rows) σ² (the trace of a Wishart matrix).

    Raises:
        ValueError: there is no singular value behind them.
    """
    beyond = space.singular_values[rows:]
    if not len(beyond):
        raise ValueError(f"rows must be below {len(space.singular_values)}, got {rows}.")
    longer = space.directions.shape[1]
    return float((beyond.square().mean() / max(longer - rows, 1)).sqrt())
