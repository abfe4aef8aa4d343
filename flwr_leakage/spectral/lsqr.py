"""Solve damped least squares by LSQR with full reorthogonalisation, for any number of dampings."""

import copy
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.spectral.bidiagonal import Bidiagonalization, column_rules
from flwr_leakage.spectral.estimate import remaining_growth


@dataclass(frozen=True)
class DampedSolution:
    """The solutions x = (AᵀA + εI)⁻¹Aᵀb for E dampings ε, for each of S matrices A (P, N).

    Attributes:
        solutions: (S, E, N) x after the steps taken.
        norms: (S, E) ‖x‖ extrapolated to infinitely many steps, but at most its upper bound.
        lower_bounds: (S, E) ‖x‖ of ``solutions``, which never exceeds that of the exact solution.
        converged: (S, E) whether ‖x‖ is within the tolerance.
        residual: (S, E) relative error of ‖x‖: the distance of its upper bound from
            ``lower_bounds``, divided by the latter. It is at least the growth that λmax may still
            have, if λmax was not given.
        dampings: (S, E) dampings ε.
        largest: (S,) lower bound of the largest eigenvalue λmax of AᵀA, from the Krylov space.
        products: number of products with A or its transpose, for each matrix.
    """

    solutions: Float[Tensor, "S E N"]
    norms: Float[Tensor, "S E"]
    lower_bounds: Float[Tensor, "S E"]
    converged: Bool[Tensor, "S E"]
    residual: Float[Tensor, "S E"]
    dampings: Float[Tensor, "S E"]
    largest: Float[Tensor, " S"]
    products: int


def solve_damped(
    operator: LinearOperator,
    right_hand_side: Float[Tensor, "S P"],
    relative_dampings: tuple[float, ...],
    tolerance: float = 1e-3,
    max_steps: int = 300,
    largest: Float[Tensor, " S"] | None = None,
) -> DampedSolution:
    """Return x = argmin ‖Ax − b‖² + ε‖x‖² for several dampings ε, by LSQR.

    A damping is ``ε = relative damping · λmax``, with the largest eigenvalue λmax of AᵀA. The
    Golub–Kahan bidiagonalisation A V = U B starts from b (Paige and Saunders 1982, section 3), with
    V kept orthonormal. One SVD of B solves the projected problem min ‖By − ‖b‖e₁‖² + ε‖y‖² for
    every ε, and x = V y. In exact arithmetic this equals conjugate gradients on (AᵀA + εI)x = Aᵀb;
    it also gives λmax ≈ σmax(B)².

    ‖x‖ never decreases from step to step, and Radau's quadrature with a node at 0 bounds its limit
    from above (Golub and Meurant 1994, section 4). A damping has converged once both bounds agree
    to the tolerance, and λmax, if it is not given, has grown by less over the last quarter of the
    steps. A matrix takes no further step once all of its dampings have converged.

    Args:
        operator: S matrices A (P, N).
        right_hand_side: (S, P) vectors b.
        relative_dampings: ε/λmax of each damping, > 0.
        tolerance: relative error of ‖x‖; with 0 all steps are taken.
        max_steps: largest number of steps, of two products each.
        largest: (S,) λmax if it is known.

    Raises:
        ValueError: a relative damping is not positive, or there is none.
    """
    if not relative_dampings or min(relative_dampings) <= 0:
        raise ValueError(f"relative_dampings must be positive, got {relative_dampings}.")
    first = operator.products
    process = Bidiagonalization(operator, right_hand_side)
    relative = torch.tensor(relative_dampings, dtype=torch.float64)
    space = _Space(relative, None if largest is None else largest.double().cpu())
    limit = min(max_steps, operator.num_inputs)
    next_check = 1 if tolerance > 0 else limit
    found: list[tuple[Tensor, ...]] = []
    while len(process.blocks):
        process.step()
        steps = process.num_steps
        leaving = process.exhausted.cpu() | torch.tensor(steps >= limit)
        # Convergence is checked at fixed steps, so that no result depends on the other matrices.
        if steps >= next_check:
            next_check = steps + max(1, steps // 10)
            leaving = leaving | space.solve(process).converged(tolerance).all(1)
        if bool(leaving.any()):
            # A matrix that has its result takes no part in further steps.
            rows, rest = (chosen.nonzero()[:, 0] for chosen in (leaving, ~leaving))
            found.append(space.take(rows).solve(process.narrow(rows)).result(tolerance))
            process, space = process.narrow(rest), space.take(rest)
    blocks, *parts = (torch.cat(column) for column in zip(*found, strict=True))
    solutions, norms, *rest_of = (part[blocks.argsort()] for part in parts)
    lower, converged, error, dampings, top = rest_of
    spent = operator.products - first
    return DampedSolution(solutions, norms, lower, converged, error, dampings, top, spent)


def least_squares_growth(
    operator: LinearOperator, right_hand_side: Float[Tensor, "S P"], num_steps: int
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
    """Return ‖x_k‖ of LSQR's k-th iterate for min ‖Ax − b‖², and its estimate of λmax, (S,) each.

    The iterates begin at x_0 = 0, and ‖x_k‖ grows with k. λmax is the largest eigenvalue of AᵀA.

    Args:
        operator: S matrices A.
        right_hand_side: (S, P) vectors b.
        num_steps: number k ≥ 1 of steps, of two products each.
    """
    process = Bidiagonalization(operator, right_hand_side)
    steps = min(num_steps, operator.num_inputs)
    for step in range(1, steps + 1):
        process.step(last=step == steps)
        if bool(process.exhausted.all()):
            break
    factors = torch.linalg.svd(process.matrix(), full_matrices=False)
    largest = factors[1][:, 0] ** 2
    # A damping of 1e-12 λmax leaves out singular values below 1e-6 of the largest, which are
    # rounding.
    coordinates = _project(factors, process.scale, 1e-12 * largest[:, None])
    return torch.linalg.vector_norm(coordinates, dim=2)[:, 0], largest


class _Space:
    """The problems min ‖Ax − b‖² + ε‖x‖² in a growing Krylov space, for E dampings ε, with the
    estimates so far of the largest eigenvalue λmax of AᵀA.

    Args:
        relative: (E,) the dampings ε/λmax.
        largest: (S,) λmax if it is known.
    """

    def __init__(self, relative: Float[Tensor, " E"], largest: Float[Tensor, " S"] | None) -> None:
        self.relative = relative
        self.largest = largest
        self.tops: list[Tensor] = []

    def take(self, rows: Int[Tensor, " R"]) -> "_Space":
        """Return the problems of the matrices with the given indices among the present ones, with
        the estimates so far.
        """
        other = copy.copy(self)
        other.largest = None if self.largest is None else self.largest[rows]
        other.tops = [entry[rows] for entry in self.tops]
        return other

    def solve(self, process: Bidiagonalization) -> "_Projected":
        """Return the solutions of min ‖Ax − b‖² + ε‖x‖² in the Krylov space of ``process``, for all
        dampings ε, and record the estimate of λmax in it.
        """
        bidiagonal = process.matrix()
        factors = torch.linalg.svd(bidiagonal, full_matrices=False)
        top = factors[1][:, 0] ** 2
        dampings = self.relative * (top if self.largest is None else self.largest)[:, None]
        coordinates = _project(factors, process.scale, dampings)
        norms = torch.linalg.vector_norm(coordinates, dim=2)
        upper = _upper_bounds(bidiagonal, process.alpha, process.scale, dampings)
        self.tops += [top] * (process.num_steps - len(self.tops))
        tiny = torch.finfo(torch.float64).tiny
        error = ((upper - norms) / norms.clamp_min(tiny)).clamp_min(0)
        error = torch.where(process.exhausted[:, None].cpu(), 0.0, error)
        if self.largest is None:
            growth = torch.where(process.exhausted.cpu(), 0.0, remaining_growth(self.tops))
            error = torch.maximum(error, growth[:, None])
        return _Projected(process, bidiagonal, coordinates, norms, error, dampings, top)


@dataclass(frozen=True)
class _Projected:
    """The solutions of min ‖Ax − b‖² + ε‖x‖² in a Krylov space, for S matrices A and E dampings ε
    each.

    Attributes:
        process: the bidiagonalisation A V = U B, which spans the space.
        bidiagonal: the lower bidiagonal matrices B (S, k + 1, k).
        coordinates: (S, E, k) the vectors y of the solutions x = V y.
        norms: (S, E) ‖x‖, a lower bound of the exact solution's norm.
        error: (S, E) estimated relative error of these norms.
        dampings: (S, E) the dampings ε.
        top: (S,) the largest squared singular value of B, which estimates the largest eigenvalue
            λmax of AᵀA.
    """

    process: Bidiagonalization
    bidiagonal: Float[Tensor, "S k1 k"]
    coordinates: Float[Tensor, "S E k"]
    norms: Float[Tensor, "S E"]
    error: Float[Tensor, "S E"]
    dampings: Float[Tensor, "S E"]
    top: Float[Tensor, " S"]

    def converged(self, tolerance: float) -> Bool[Tensor, "S E"]:
        """Return for each solution x whether the relative error of its norm is within the
        tolerance.
        """
        return (self.error <= tolerance) | (self.norms == 0)

    def result(self, tolerance: float) -> tuple[Tensor, ...]:
        """Return eight tensors with the results of the S matrices of this Krylov space.

        The first holds the matrices' indices (S,) in the whole operator. The others are fields of
        :class:`DampedSolution` in their order: solutions, norms, lower bounds, converged (to the
        relative tolerance), residual, dampings and largest.
        """
        process = self.process
        basis = process.basis
        solutions = torch.einsum("sej,sjn->sen", self.coordinates.to(basis.dtype), basis)
        limit = _extrapolated(self.bidiagonal, process.scale, self.dampings, self.norms)
        return (
            process.blocks,
            solutions,
            torch.minimum(limit, self.norms * (1 + self.error)),
            self.norms,
            self.converged(tolerance),
            self.error,
            self.dampings,
            self.top,
        )


def _upper_bounds(
    bidiagonal: Float[Tensor, "S k1 k"],
    next_alpha: Float[Tensor, " S"],
    scale: Float[Tensor, " S"],
    dampings: Float[Tensor, "S E"],
) -> Float[Tensor, "S E"]:
    """Return upper bounds (S, E) of the norms ‖x‖ of damped least-squares solutions. ‖x‖² is the
    integral of (λ + ε)⁻² over a measure that the bidiagonal matrix B describes, and Radau's rule
    with a node at 0 bounds it. ``next_alpha`` is the diagonal entry that B's next column would
    have, and ``scale`` is ‖b‖.
    """
    mass = (scale * bidiagonal[:, 0, 0])[:, None] ** 2
    nodes, weights = column_rules(bidiagonal, next_alpha.cpu(), mass)[1]
    shifted = nodes[:, None] + dampings[:, :, None]
    return (weights[:, None] / shifted.clamp_min(1e-150) ** 2).sum(2).sqrt()


def _extrapolated(
    bidiagonal: Float[Tensor, "S k1 k"],
    scale: Float[Tensor, " S"],
    dampings: Float[Tensor, "S E"],
    norms: Float[Tensor, "S E"],
) -> Float[Tensor, "S E"]:
    """Return the norms ‖x‖ of damped solutions, extrapolated to infinitely many steps by their
    growth over two smaller Krylov spaces; after fewer than three steps, ``norms`` itself.
    ``bidiagonal`` is B after k steps, and ``scale`` is ‖b‖.
    """
    steps = bidiagonal.shape[2]
    lag = max(1, steps // 6)
    earlier = []
    for size in (steps - lag, steps - 2 * lag):
        if size <= 0:
            return norms
        block = torch.linalg.svd(bidiagonal[:, : size + 1, :size], full_matrices=False)
        earlier.append(torch.linalg.vector_norm(_project(block, scale, dampings), dim=2))
    return _limit(norms, *earlier)


def _project(
    factors: tuple[Tensor, Tensor, Tensor],
    scale: Float[Tensor, " S"],
    dampings: Float[Tensor, "S E"],
) -> Float[Tensor, "S E k"]:
    """Return y = argmin ‖By − ‖b‖e₁‖² + ε‖y‖² for each damping ε, with the first unit vector e₁,
    the SVD (U, singular values, Vᵀ) of B in ``factors``, and ‖b‖ as ``scale``.
    """
    u, s, wt = factors
    filtered = s[:, None] / (s[:, None] ** 2 + dampings[:, :, None]).clamp_min(1e-300)
    weights = filtered * (scale[:, None] * u[:, 0])[:, None]
    return torch.einsum("sek,skj->sej", weights, wt)


def _limit(last: Tensor, before: Tensor, first: Tensor) -> Tensor:
    """Return an estimate of the limit of growing sequences from three entries of each.

    The entries ``first``, ``before`` and ``last`` lie equally many steps apart. With r = (last −
    before)/(before − first), a geometric series still grows by (last − before) r/(1−r) (Aitken
    1926). At most last − first is added, as norms of iterates also grow in stairs.
    """
    growth, earlier = (last - before).clamp_min(0), (before - first).clamp_min(0)
    # ``rest`` is the growth that is still to come, negative or infinite if the growth does not slow
    # down.
    rest = growth * growth / (earlier - growth)
    slowing = (earlier > growth) & (rest < earlier + growth)
    return last + torch.where(slowing, rest, earlier + growth)
