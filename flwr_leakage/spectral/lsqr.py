"""LSQR with full reorthogonalisation, for any number of dampings at once."""

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
    """The solutions x = (AᵀA + εI)⁻¹Aᵀb for E dampings ε of each of S blocks of an operator.

    Attributes:
        solutions: (S, E, N) x after the steps taken.
        norms: (S, E) ‖x‖ extrapolated to infinitely many steps.
        lower_bounds: (S, E) ‖x‖ of ``solutions``, which grows with the steps.
        converged: (S, E) whether the norm is within the tolerance.
        residual: (S, E) distance of the upper bound from the lower one, relative to the latter.
        dampings: (S, E) dampings ε.
        largest: (S,) lower bound of λmax of AᵀA from the Krylov space.
        products: number of ``matvec`` and ``rmatvec`` for each operator.
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
    """Return x = argmin ‖Ax − b‖² + ε‖x‖² with ε = relative damping · λmax, by LSQR.

    The Golub–Kahan bidiagonalisation A V = U B starts from b (Paige and Saunders 1982, section 3),
    with V kept orthonormal. One SVD of B solves the projected problem min ‖By − ‖b‖e₁‖² + ε‖y‖² for
    every ε. In exact arithmetic this equals conjugate gradients on (AᵀA + εI)x = Aᵀb, but it does
    not square the condition number, and also gives λmax ≈ σmax(B)².

    ‖x‖ never decreases, and Radau's quadrature with a node at 0 bounds it from above (Golub and
    Meurant 1994, section 4). A damping stops once both bounds agree to the tolerance, and λmax, if
    it is not given, has grown by less than the tolerance over the last quarter of the steps. A
    block leaves at the step at which all of its dampings have stopped, so that neither its result
    nor its products depend on the other blocks.

    Args:
        operator: the operators A, of S blocks.
        right_hand_side: (S, P) vectors b.
        relative_dampings: ε/λmax of each damping, > 0.
        tolerance: relative error of ‖x‖; with 0 all steps are taken.
        max_steps: largest number of steps, of two products each.
        largest: (S,) λmax if it is known.
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
        # The steps of the checks must not depend on the blocks that are left.
        if steps >= next_check:
            next_check = steps + max(1, steps // 10)
            leaving = leaving | space.solve(process).converged(tolerance).all(1)
        if bool(leaving.any()):
            # A finished block takes no part in the steps of the others.
            rows, rest = (chosen.nonzero()[:, 0] for chosen in (leaving, ~leaving))
            found.append(space.take(rows).solve(process.take(rows)).result(tolerance))
            process, space = process.take(rest), space.take(rest)
    blocks, *parts = (torch.cat(column) for column in zip(*found, strict=True))
    solutions, norms, *rest_of = (part[blocks.argsort()] for part in parts)
    lower, converged, error, dampings, top = rest_of
    spent = operator.products - first
    return DampedSolution(solutions, norms, lower, converged, error, dampings, top, spent)


def least_squares_growth(
    operator: LinearOperator, right_hand_side: Float[Tensor, "S P"], num_steps: int
) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
    """Return ‖x_k‖ of LSQR's k-th iterate from zero, which grows with k, and its λmax.

    It takes one product less than k steps of ``solve_damped``, as it needs no bound from a further
    step.

    Args:
        operator: the operators A, of S blocks.
        right_hand_side: (S, P) vectors b.
        num_steps: number k ≥ 1 of steps, of two products each, with the first and the last one.
    """
    process = Bidiagonalization(operator, right_hand_side)
    steps = min(num_steps, operator.num_inputs)
    for step in range(1, steps + 1):
        process.step(last=step == steps)
        if bool(process.exhausted.all()):
            break
    factors = torch.linalg.svd(process.matrix(), full_matrices=False)
    largest = factors[1][:, 0] ** 2
    # Singular values below 1e-6 of the largest are zero but for rounding.
    coordinates = _project(factors, process.scale, 1e-12 * largest[:, None])
    return torch.linalg.vector_norm(coordinates, dim=2)[:, 0], largest


class _Space:
    """The damped problem in the growing Krylov space, with λmax at the steps so far.

    Args:
        relative: (E,) ε/λmax.
        largest: (S,) λmax if it is known.
    """

    def __init__(self, relative: Float[Tensor, " E"], largest: Float[Tensor, " S"] | None) -> None:
        self.relative = relative
        self.largest = largest
        self.tops: list[Tensor] = []

    def take(self, rows: Int[Tensor, " R"]) -> "_Space":
        """Return the state of some of the blocks."""
        other = copy.copy(self)
        other.largest = None if self.largest is None else self.largest[rows]
        other.tops = [entry[rows] for entry in self.tops]
        return other

    def solve(self, process: Bidiagonalization) -> "_Projected":
        """Return the damped problem in the present Krylov space, and record its λmax."""
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
    """The damped problem in one Krylov space; see ``DampedSolution``."""

    process: Bidiagonalization
    bidiagonal: Float[Tensor, "S k1 k"]
    coordinates: Float[Tensor, "S E k"]
    norms: Float[Tensor, "S E"]
    error: Float[Tensor, "S E"]
    dampings: Float[Tensor, "S E"]
    top: Float[Tensor, " S"]

    def converged(self, tolerance: float) -> Bool[Tensor, "S E"]:
        """Return whether each norm is within the tolerance."""
        return (self.error <= tolerance) | (self.norms == 0)

    def result(self, tolerance: float) -> tuple[Tensor, ...]:
        """Return the operator's blocks (S,) that this space is of, then their solutions.

        The solutions are the fields of :class:`DampedSolution` in their order, without
        ``products``.

        Args:
            tolerance: the relative error of a norm up to which ``converged`` is true.
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
    """Return upper bounds of ‖x‖ by Radau's rule of ‖x‖² = ∫(λ + ε)⁻²dμ, with a node at 0."""
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
    """Return the limit of the norms by two smaller Krylov spaces; the norms after few steps."""
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
    """Return y = argmin ‖By − ‖b‖e₁‖² + ε‖y‖² from the SVD of B."""
    u, s, wt = factors
    filtered = s[:, None] / (s[:, None] ** 2 + dampings[:, :, None]).clamp_min(1e-300)
    weights = filtered * (scale[:, None] * u[:, 0])[:, None]
    return torch.einsum("sek,skj->sej", weights, wt)


def _limit(last: Tensor, before: Tensor, first: Tensor) -> Tensor:
    """Return Aitken's extrapolation of a growing sequence from three entries at equal distances.

    With r = (last − before)/(before − first), the rest of a geometric series is
    (last − before) r/(1−r) (Aitken 1926). The norms of conjugate gradients' iterates grow in
    nearly that way, or in stairs. The rest is at most the growth over the three entries, so that
    the last stair is not extrapolated without end.
    """
    growth, earlier = (last - before).clamp_min(0), (before - first).clamp_min(0)
    # The rest is negative or infinite if the growth does not slow down.
    rest = growth * growth / (earlier - growth)
    slowing = (earlier > growth) & (rest < earlier + growth)
    return last + torch.where(slowing, rest, earlier + growth)
