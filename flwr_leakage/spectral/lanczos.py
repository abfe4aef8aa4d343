"""Lanczos with full reorthogonalisation, of S operators at once."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.operators.lengths import row_norms
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.spectral.estimate import (
    Estimate,
    keep_finished,
    normalize_rows,
    orthogonalize,
    remaining_growth,
)

RESOLVABLE_CONDITION = 1e7
"""λmax/λmin beyond which Lanczos with a random start does not resolve λmin in practice."""

SETTLING_STEPS = 30
"""Steps before which no smallest Ritz value passes for λmin, unless the space is exhausted."""


class Lanczos:
    """The Lanczos process of AᵀA: AᵀA V = V T + β v eᵀ, with V kept orthonormal.

    Lanczos 1950; full reorthogonalisation as in Parlett, The Symmetric Eigenvalue Problem,
    section 13.7. ``step`` costs one Gram product.

    A block whose Krylov space is exhausted goes on with zero vectors. Its new rows of T are not
    coupled to the others, and repeat T's first entry. That is a Rayleigh quotient, so that the
    largest and the smallest eigenvalue of T stay as they are.

    Args:
        operator: A, of S blocks.
        start: the first vector of each block, (S, N), not zero.
    """

    def __init__(self, operator: LinearOperator, start: Float[Tensor, "S N"]) -> None:
        self.operator = operator
        first, self.start_norm = normalize_rows(start)
        self.basis = first[:, None]
        self.residual_vector = torch.zeros_like(first)
        self._alphas: list[Tensor] = []
        self._betas: list[Tensor] = []
        self._next = first
        self._scale = torch.zeros_like(self.start_norm)

    @property
    def num_steps(self) -> int:
        """Steps taken: the order of T."""
        return len(self._alphas)

    @property
    def last_beta(self) -> Float[Tensor, " S"]:
        """β_k, the coupling of the last vector to what lies outside of the Krylov space."""
        return self._betas[-1]

    def step(self) -> None:
        """Extend T by one row; a product that exceeds a budget raises and leaves all as it was."""
        image = self.operator.gram(self._next)
        if self._alphas:
            self.basis = torch.cat([self.basis, self._next[:, None]], dim=1)
        alpha = (self._next * image).sum(1)
        if self._alphas:
            alpha = torch.where(self._betas[-1] > 0, alpha, self._alphas[0])
        remainder = orthogonalize(image, self.basis)
        self._scale = torch.maximum(self._scale, row_norms(image))
        self._next, beta = normalize_rows(remainder)
        # Below this, the remainder is rounding and its direction has no meaning.
        floor = 10 * torch.finfo(beta.dtype).eps * self._scale
        exhausted = (beta <= floor) | torch.tensor(self.num_steps + 1 >= self.operator.num_inputs)
        self._next = torch.where(exhausted[:, None], 0.0, self._next)
        self._alphas.append(alpha)
        self._betas.append(torch.where(exhausted, 0.0, beta))

    @property
    def rayleigh_quotients(self) -> Float[Tensor, "S k"]:
        """‖Av‖² of each vector of the basis: the diagonal of T."""
        return torch.stack(self._alphas, 1)

    def tridiagonal(self) -> Float[Tensor, "S k k"]:
        """T, of k rows and columns after k steps."""
        alphas = torch.stack(self._alphas, 1)
        result = torch.diag_embed(alphas)
        if self.num_steps > 1:
            betas = torch.stack(self._betas[:-1], 1)
            result = result + torch.diag_embed(betas, 1) + torch.diag_embed(betas, -1)
        return result

    def ritz(self) -> tuple[Float[Tensor, "S k"], Float[Tensor, "S k k"]]:
        """Eigenvalues of T, ascending, and its eigenvectors as columns."""
        values, vectors = torch.linalg.eigh(self.tridiagonal().double())
        return values, vectors


@dataclass(frozen=True)
class EigenPairs:
    """The largest or the smallest eigenvalue of each block, with its eigenvector (S, N)."""

    estimate: Estimate
    vectors: Float[Tensor, "S N"]


@dataclass(frozen=True)
class TopPairs(EigenPairs):
    """The largest eigenvalue of each block, and the Krylov space that it was found in.

    Attributes:
        angle: (S,) about how far the eigenvector is off, in radians.
        basis: (S, k, N) the orthonormal vectors of the block's own steps, and zeros.
        trace: (S,) Σ‖Av‖² over them.
    """

    angle: Float[Tensor, " S"]
    basis: Float[Tensor, "S k N"]
    trace: Float[Tensor, " S"]


def random_start(operator: LinearOperator, generator: Draws) -> Float[Tensor, "S N"]:
    """A Gaussian vector for each block; operators of equal shape get the same draws."""
    draw = normal_rows((operator.num_blocks, operator.num_inputs), generator)
    return draw.to(dtype=operator.dtype, device=operator.device)


class LargestEigenvalue:
    """λmax of AᵀA, from below, by a Lanczos process that goes on where more is asked of it.

    A block's answer is read at the first step that passes two tests. With θ the largest Ritz value,
    r its residual and gap its distance to the second one:

    - min(r, r²/gap)/θ ≤ tolerance (Parlett, theorem 11.7.1). This bounds the error of θ as *an*
      eigenvalue, which need not be the largest.
    - θ has not grown by more than the tolerance over the last quarter of the steps (three at
      least). Else a neighbour of λmax could pass for it, while the start's small component along
      the true eigenvector still grows.

    An answer depends on the operator, the start, the tolerance and the limit of steps only: not
    on what was asked before, nor on the other blocks. So one process serves several callers.

    Args:
        operator: A, of S blocks.
        start: not orthogonal to the eigenvector sought; ``random_start`` is generic.
    """

    def __init__(self, operator: LinearOperator, start: Float[Tensor, "S N"]) -> None:
        self.operator = operator
        self._process = Lanczos(operator, start)
        self._tops: list[Tensor] = []
        self._residuals: list[Tensor] = []
        self._growths: list[Tensor] = []
        self._angles: list[Tensor] = []
        self._coefficients: list[Tensor] = []

    def __call__(self, tolerance: float, max_steps: int) -> TopPairs:
        """λmax and its eigenvector to a relative tolerance, in ``max_steps`` Gram products at most.

        Raises:
            ValueError: ``max_steps`` is below 1.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}.")
        first = self.operator.products
        count = self.operator.num_blocks
        done = torch.zeros(count, dtype=torch.bool, device=self.operator.device)
        last = torch.zeros(count, dtype=torch.long, device=self.operator.device)
        for step in range(min(max_steps, self.operator.num_inputs)):
            if step == len(self._tops):
                self._extend()
            last = torch.where(done, last, step)
            within = self._residuals[step] <= tolerance
            done |= within & (self._growths[step] <= tolerance)
            if bool(done.all()):
                break
        blocks = torch.arange(count, device=last.device)
        histories = (self._tops, self._residuals, self._growths, self._angles)
        top, residual, growth, angle = (torch.stack(each)[last, blocks] for each in histories)
        # Two steps say nothing about growth; the residual bound then stands alone.
        error = torch.maximum(residual, torch.where(growth.isfinite(), growth, 0.0))
        error = error + 2 * self.operator.rounding.to(error)
        widest = int(last.max()) + 1
        coefficients = top.new_zeros(count, widest)
        for block, step in enumerate(last.tolist()):
            coefficients[block, : step + 1] = self._coefficients[step][block]
        own = torch.arange(widest, device=last.device) <= last[:, None]
        basis = torch.where(own[:, :, None], self._process.basis[:, :widest], 0.0)
        vectors = torch.einsum("sk,skn->sn", coefficients.to(self.operator.dtype), basis)
        quotients = self._process.rayleigh_quotients[:, :widest].double()
        spent = self.operator.products - first
        return TopPairs(
            Estimate(top, done, error, spent, "Lanczos"),
            vectors,
            angle,
            basis,
            torch.where(own, quotients, 0.0).sum(1),
        )

    def _extend(self) -> None:
        process = self._process
        process.step()
        theta, vectors = process.ritz()
        top = theta[:, -1].clamp_min(0)
        residual = process.last_beta * vectors[:, -1, -1].abs()
        error, angle = residual, torch.ones_like(residual)
        if process.num_steps > 1:
            gap = (top - theta[:, -2]).clamp_min(torch.finfo(top.dtype).tiny)
            error = torch.minimum(residual, residual**2 / gap)
            angle = (residual / gap).clamp_max(1.0)
        self._angles.append(torch.where(process.last_beta == 0, 0.0, angle))
        self._tops.append(top)
        self._residuals.append(error / top.clamp_min(torch.finfo(top.dtype).tiny))
        growth = remaining_growth(self._tops)
        self._growths.append(torch.where(process.last_beta == 0, 0.0, growth))
        self._coefficients.append(vectors[:, :, -1])


def largest_eigenvalue(
    operator: LinearOperator,
    start: Float[Tensor, "S N"],
    tolerance: float = 1e-3,
    max_steps: int = 100,
) -> TopPairs:
    """λmax of AᵀA, from below, and its eigenvector; see ``LargestEigenvalue``.

    Args:
        operator: A, of S blocks.
        start: not orthogonal to the eigenvector sought; ``random_start`` is generic.
        tolerance: relative error of λmax.
        max_steps: most Gram products.
    """
    return LargestEigenvalue(operator, start)(tolerance, max_steps)


def smallest_eigenvalue(
    operator: LinearOperator,
    generator: Draws,
    tolerance: float = 1e-2,
    max_steps: int = 300,
) -> EigenPairs:
    """λmin of AᵀA where Lanczos can resolve it, else an upper bound that says so.

    The smallest Ritz value never lies below λmin. A small residual shows only that it is near *an*
    eigenvalue. So it counts as resolved in two cases:

    - The residual is small, λmax/λmin is below ``RESOLVABLE_CONDITION``, and the value has not
      moved by more than the tolerance over the last third of at least ``SETTLING_STEPS`` steps.
    - The Krylov space of the random start is exhausted, and λmin stands out from rounding.

    Args:
        operator: A, of S blocks.
        generator: for the random start.
        tolerance: relative error of λmin.
        max_steps: most Gram products.
    """
    process = Lanczos(operator, random_start(operator, generator))
    first = operator.products
    rounding = 10 * torch.finfo(operator.dtype).eps
    history: list[Tensor] = []
    finished = torch.zeros(operator.num_blocks, dtype=torch.bool, device=operator.device)
    value = error = weights = None
    while True:
        process.step()
        theta, vectors = process.ritz()
        lowest = theta[:, 0]
        history.append(lowest)
        scale = lowest.clamp_min(torch.finfo(lowest.dtype).tiny)
        residual = process.last_beta * vectors[:, -1, 0].abs() / scale
        moved = (history[2 * len(history) // 3] - lowest) / scale
        done = (residual <= tolerance) & (moved <= tolerance)
        done &= theta[:, -1] <= RESOLVABLE_CONDITION * lowest
        done &= torch.tensor(process.num_steps > SETTLING_STEPS)
        done |= (process.last_beta == 0) & (rounding * theta[:, -1] <= tolerance * lowest)
        value = keep_finished(finished, value, lowest.clamp_min(0))
        # T = AᵀA knows an eigenvalue to its precision times the largest one.
        conditions = theta[:, -1] / scale
        slips = rounding * conditions + 2 * operator.rounding.to(scale) * conditions.sqrt()
        error = keep_finished(finished, error, residual + moved + slips)
        weights = keep_finished(finished, weights, vectors[:, :, 0])
        finished = finished | done
        if bool(finished.all()) or process.num_steps >= min(max_steps, operator.num_inputs):
            break
    estimate = Estimate(value, finished, error, operator.products - first, "Lanczos")
    eigenvectors = torch.einsum("sk,skn->sn", weights.to(operator.dtype), process.basis)
    return EigenPairs(estimate, eigenvectors)
