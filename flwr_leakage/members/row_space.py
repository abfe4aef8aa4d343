"""Compute the row space of a layer's update, and the part of a vector outside of it.

One step on samples i changes a linear layer ``z = W h + c`` by ``ΔW = −η Σᵢ eᵢ hᵢᵀ``, with the
derivative eᵢ of the loss by zᵢ. So the rows of ΔW are combinations of the layer's inputs hᵢ. If
there are fewer samples than outputs and inputs, the input of a sample that was in the step lies in
the row space, and the input of another sample does not. ProjRes (arXiv 2604.21197, 2026) tests
members by this residual.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

RELATIVE_FLOOR = 1e-6
"""The share of the largest singular value below which a singular value counts as rounding in single
precision, whose relative error is 6e-8 for each of the summed numbers. For another precision the
share is scaled with this error."""


@dataclass(frozen=True)
class RowSpace:
    """The row space of a matrix G (m, n), given by its singular vectors, and the noise on the
    matrix.

    Attributes:
        directions: (r, n) right singular vectors vₖ in orthonormal rows, by falling singular value.
        singular_values: (r,) singular values sₖ.
        noise: λ₀, the expected increase of ‖G v‖² by noise on G, for a unit vector v; at least
            ``floor``² times the largest sₖ².
        rounding: λ₀ without the bound by ``floor``, which is some 20 times smaller in a trained
            network with weights in single precision.
        left: (m, r) left singular vectors uₖ.
        floor: the share of the largest singular value below which a singular value counts as
            rounding, in the precision of the matrix.
    """

    directions: Float[Tensor, "r n"]
    singular_values: Float[Tensor, " r"]
    noise: float
    rounding: float
    left: Float[Tensor, "m r"]
    floor: float = RELATIVE_FLOOR

    @classmethod
    def of(cls, matrix: Float[Tensor, "m n"], noise_std: float = 0.0) -> "RowSpace":
        """Return the row space of a matrix G, in double precision.

        Args:
            matrix: the matrix G, such as a layer's pseudo-gradient.
            noise_std: σ ≥ 0 of independent noise on the entries of G. Then λ₀ = m σ², but at least
                ``floor``² times the largest sₖ².

        Example:
            >>> space = RowSpace.of(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]))
            >>> space.rank, [round(float(v), 3) for v in space.singular_values]
            (2, [2.0, 1.0])
        """
        # A QR decomposition first reduces a long matrix to a square one, which saves three quarters
        # of the time.
        basis, core = torch.linalg.qr(matrix.double().T)
        left, values, directions = torch.linalg.svd(core.T, full_matrices=False)
        relative = torch.finfo(matrix.dtype).eps / torch.finfo(torch.float32).eps
        space = cls(directions @ basis.T, values, 0.0, 0.0, left, RELATIVE_FLOOR * relative)
        return space.with_noise(noise_std)

    def with_noise(self, noise_std: float) -> "RowSpace":
        """Return the same row space for another standard deviation of the noise on the matrix."""
        largest = float(self.singular_values[0]) if len(self.singular_values) else 0.0
        told = len(self.left) * noise_std**2
        return replace(self, noise=max(told, (self.floor * largest) ** 2), rounding=told)

    @property
    def rank(self) -> int:
        """Return the number of singular values above σ(√m + √n), the largest singular value of
        noise alone: a matrix (m, n) with independent entries of standard deviation σ (Bai and Yin).
        """
        edge = self.noise * (1 + (self.directions.shape[1] / max(len(self.left), 1)) ** 0.5) ** 2
        return int((self.singular_values.square() > 1.1 * edge).sum())

    def leftover(
        self, rows: Float[Tensor, "N n"], levels: Float[Tensor, " L"]
    ) -> Float[Tensor, "N L"]:
        """Return the part of each vector's squared length that the row space does not explain.

        For a vector h it is ``Σₖ cₖ² λ/(sₖ² + λ) + ‖h − Σₖ cₖ vₖ‖²``, with the singular values sₖ
        and right singular vectors vₖ of the matrix G, cₖ = vₖᵀh, and λ = max(λ₀, level · s₁²),
        where λ₀ is the noise. This is the least value of ‖h − Gᵀa‖² + λ‖a‖² over a (ridge
        regression). For λ → 0 it is the squared distance of h from the row space. Directions vₖ
        with sₖ² below λ₀ / 100 are left out of the sum.

        ``rows`` are the vectors h, and ``levels`` ≥ 0 are relative to s₁². The result is ≥ 0.

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

    def agreement(
        self,
        errors: Float[Tensor, "N m"],
        rows: Float[Tensor, "N n"],
        levels: Float[Tensor, " L"],
    ) -> Float[Tensor, "N L"]:
        """Return how well the outer product e hᵀ of each record fits into the matrix G.

        It is ``ẽᵀ G h̃ / (‖ẽ‖ ‖h̃‖)`` with ``ẽ = (G Gᵀ + λI)^(−1/2) e`` and ``h̃ = (GᵀG +
        λI)^(−1/2) h``. So the record's own gradient of the layer, e hᵀ, is compared with the update
        G after e and h are whitened by G with a damping λ. For G = Σᵢ eᵢ hᵢᵀ with independent eᵢ
        and independent hᵢ, ``eᵢᵀ G⁺ᵀ hᵢ`` is 1 and ``eᵢᵀ G⁺ᵀ hⱼ`` is 0. So other samples hardly
        change the result, even if there are more samples than the row space has dimensions.

        ``errors`` are derivatives e of the loss by the layer's outputs, ``rows`` inputs h of the
        layer, and ``levels`` the dampings λ relative to the largest squared singular value; λ is at
        least ``rounding``. The result is 0 if e or h is 0.

        Example:
            >>> space = RowSpace.of(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
            >>> errors, rows = torch.eye(2), torch.tensor([[3.0, 0.0], [1.0, 0.0]])
            >>> space.agreement(errors, rows, torch.zeros(1)).squeeze(1).round(decimals=3).tolist()
            [2.0, 0.0]
        """
        energies = self.singular_values.square()
        if not len(energies):
            return torch.zeros(len(rows), len(levels), dtype=torch.float64)
        damping = (levels.double() * energies[0]).clamp_min(self.rounding)
        damping = damping.clamp_min(torch.finfo(torch.float64).tiny)
        inverse = 1 / (energies[:, None] + damping)
        sides = []
        for vectors, basis in ((errors.double(), self.left), (rows.double(), self.directions.T)):
            coefficients = vectors @ basis
            outside = vectors.square().sum(1) - coefficients.square().sum(1)
            length = coefficients.square() @ inverse + outside.clamp_min(0)[:, None] / damping
            sides.append((coefficients, length.sqrt()))
        (left, left_length), (right, right_length) = sides
        match = (left * right) @ (self.singular_values[:, None] * inverse)
        return match / (left_length * right_length).clamp_min(torch.finfo(torch.float64).tiny)

    def share_of(
        self, errors: Float[Tensor, "N m"], rows: Float[Tensor, "N n"]
    ) -> Float[Tensor, " N"]:
        """Return ``hᵀ G⁺ e``, which is 1/c for a sample that the matrix G contains as c e hᵀ.

        G⁺ is the pseudoinverse. If e lies in the column space of G and h in its row space, G − c e
        hᵀ has a lower rank than G for one value of c only (Wedderburn 1934). If h is a combination
        of several samples' inputs, it lies in the row space too, but the result is not 1/c.
        Directions whose squared singular value is below a hundredth of the noise are left out.

        ``errors`` are derivatives e of the loss by the layer's outputs, and ``rows`` inputs h of
        the layer.

        Example:
            >>> space = RowSpace.of(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
            >>> space.share_of(torch.eye(2), torch.eye(2)).round(decimals=4).tolist()
            [0.5, 1.0]
        """
        kept = self.singular_values.square() > 0.01 * self.noise
        left = errors.double() @ self.left[:, kept]
        right = rows.double() @ self.directions[kept].T
        return (left * right) @ (1 / self.singular_values[kept])


def noise_of_spectrum(space: RowSpace, rows: int) -> float:
    """Return the standard deviation σ of independent noise on a matrix of low rank.

    Without noise the matrix (m, n) would have a rank of at most ``rows``. All singular values but
    the k largest are those of noise alone, with the mean square (max(m, n) − k) σ² (from the trace
    of a Wishart matrix). At first k is ``rows``. As some of the k largest may be noise as well, k
    is replaced by the number of singular values above the largest of the estimated noise, until k
    no longer falls. No singular value is treated as rounding here: in a trained network, the
    samples' smallest singular values may be below 1e-6 of the largest and still be no noise.

    Raises:
        ValueError: the matrix has no more than ``rows`` singular values, so that none is that of
            noise alone.
    """
    values, longer = space.singular_values, max(len(space.left), space.directions.shape[1])
    if rows >= len(values):
        raise ValueError(f"rows must be below {len(values)}, got {rows}.")
    standing, bare = rows, replace(space, floor=0.0)
    while True:
        std = float((values[standing:].square().mean() / max(longer - standing, 1)).sqrt())
        rank = bare.with_noise(std).rank
        if rank >= standing:
            return std
        standing = rank
