"""Lanczos with full reorthogonalisation, of S operators at once."""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.operators.lengths import row_norms
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.spectral.estimate import (
    Estimate,
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

    def narrow(self, rows: Int[Tensor, " R"]) -> "Lanczos":
        """The process of some blocks, which goes on from here without the others.

        Args:
            rows: their indices, ascending.
        """
        other = copy.copy(self)
        other.operator = self.operator.narrow(rows)
        other.start_norm, other._scale = self.start_norm[rows], self._scale[rows]
        other.basis, other._next = self.basis[rows], self._next[rows]
        other._alphas = [alpha[rows] for alpha in self._alphas]
        other._betas = [beta[rows] for beta in self._betas]
        return other

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
    on what was asked before, nor on the other blocks. So one process serves several callers. A
    block that has its answer takes no part in the steps of the others: a batch takes as many
    products as its blocks alone.

    Args:
        operator: A, of S blocks.
        start: not orthogonal to the eigenvector sought; ``random_start`` is generic.
    """

    def __init__(self, operator: LinearOperator, start: Float[Tensor, "S N"]) -> None:
        self.operator = operator
        blocks = torch.arange(operator.num_blocks, device=operator.device)
        self._groups = [_Group(blocks, Lanczos(operator, start))]

    def __call__(self, tolerance: float, max_steps: int) -> EigenPairs:
        """λmax and its eigenvector to a relative tolerance, in ``max_steps`` Gram products at most.

        Raises:
            ValueError: ``max_steps`` is below 1.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}.")
        first = self.operator.products
        for group in list(self._groups):
            self._settle(group, tolerance, max_steps)
        joined = torch.cat([group.blocks for group in self._groups]).argsort()
        found = [group.answer(tolerance, max_steps) for group in self._groups]
        top, done, residual, vectors = (
            torch.cat(parts)[joined] for parts in zip(*found, strict=True)
        )
        spent = self.operator.products - first
        return EigenPairs(Estimate(top, done, residual, spent, "Lanczos"), vectors)

    def _settle(self, group: "_Group", tolerance: float, max_steps: int) -> None:
        """Take steps until each block of a group has its answer; those that have it leave."""
        limit = min(max_steps, self.operator.num_inputs)
        while group.num_steps < limit:
            done = group.first_within(tolerance, group.num_steps) >= 0
            if bool(done.all()):
                return
            if bool(done.any()):
                place = self._groups.index(group)
                parts = [group.narrow(rows.nonzero()[:, 0]) for rows in (done, ~done)]
                self._groups[place : place + 1] = parts
                group = parts[1]
            group.extend()


class _Group:
    """Blocks that have taken the same steps, with the largest Ritz value at each of them.

    Args:
        blocks: their indices.
        process: of these blocks.
    """

    def __init__(self, blocks: Int[Tensor, " G"], process: Lanczos) -> None:
        self.blocks = blocks
        self.process = process
        self._tops: list[Tensor] = []
        self._residuals: list[Tensor] = []
        self._growths: list[Tensor] = []
        self._coefficients: list[Tensor] = []

    @property
    def num_steps(self) -> int:
        return len(self._tops)

    def narrow(self, rows: Int[Tensor, " R"]) -> "_Group":
        """Some of the blocks, with what they have come to."""
        other = _Group(self.blocks[rows], self.process.narrow(rows))
        for name in ("_tops", "_residuals", "_growths", "_coefficients"):
            setattr(other, name, [entry[rows] for entry in getattr(self, name)])
        return other

    def first_within(self, tolerance: float, num_steps: int) -> Int[Tensor, " G"]:
        """The first of so many steps at which a block passes both tests, or −1."""
        first = torch.full_like(self.blocks, -1)
        for step in reversed(range(num_steps)):
            within = (self._residuals[step] <= tolerance) & (self._growths[step] <= tolerance)
            first = torch.where(within, step, first)
        return first

    def answer(self, tolerance: float, max_steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """λmax, whether it is within the tolerance, its residual and its eigenvector."""
        taken = min(max_steps, self.num_steps)
        first = self.first_within(tolerance, taken)
        last = torch.where(first >= 0, first, taken - 1)
        rows = torch.arange(len(last), device=last.device)
        top, residual = (
            torch.stack(history)[last, rows] for history in (self._tops, self._residuals)
        )
        widest = int(last.max()) + 1
        coefficients = top.new_zeros(len(last), widest)
        for row, step in enumerate(last.tolist()):
            coefficients[row, : step + 1] = self._coefficients[step][row]
        basis = self.process.basis[:, :widest]
        vectors = torch.einsum("sk,skn->sn", coefficients.to(basis.dtype), basis)
        return top, first >= 0, residual, vectors

    def extend(self) -> None:
        """Take one step more; a product that exceeds a budget raises and leaves all as it was."""
        process = self.process
        process.step()
        theta, vectors = process.ritz()
        top = theta[:, -1].clamp_min(0)
        residual = process.last_beta * vectors[:, -1, -1].abs()
        error = residual
        if process.num_steps > 1:
            gap = (top - theta[:, -2]).clamp_min(torch.finfo(top.dtype).tiny)
            error = torch.minimum(residual, residual**2 / gap)
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
) -> EigenPairs:
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
    blocks = torch.arange(operator.num_blocks, device=operator.device)
    found: list[tuple[Tensor, ...]] = []
    while len(blocks):
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
        last = process.num_steps >= min(max_steps, operator.num_inputs)
        leaving = done | torch.tensor(last)
        if bool(leaving.any()):
            # A block that is done takes no part in the steps of the others.
            weights = vectors[leaving, :, 0].to(operator.dtype)
            pairs = torch.einsum("sk,skn->sn", weights, process.basis[leaving])
            value = lowest[leaving].clamp_min(0)
            found.append((blocks[leaving], value, done[leaving], residual[leaving], pairs))
            rest = (~leaving).nonzero()[:, 0]
            blocks, history = blocks[rest], [entry[rest] for entry in history]
            process = process.narrow(rest) if len(rest) else process
    order, *parts = (torch.cat(column) for column in zip(*found, strict=True))
    value, finished, error, eigenvectors = (part[order.argsort()] for part in parts)
    estimate = Estimate(value, finished, error, operator.products - first, "Lanczos")
    return EigenPairs(estimate, eigenvectors)
