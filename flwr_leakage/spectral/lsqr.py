"""LSQR with full reorthogonalisation: the damped solve for any number of dampings at once."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.spectral.bidiagonal import column_rules, lower_bidiagonal
from flwr_leakage.spectral.estimate import (
    keep_finished,
    normalize_rows,
    orthogonalize,
    remaining_growth,
)


@dataclass(frozen=True)
class DampedSolution:
    """x = (AᵀA + εI)⁻¹Aᵀb for E dampings ε of each of S blocks of an operator.

    Attributes:
        solutions: x (S, E, N), as far as the steps taken lead.
        norms: (S, E), ‖x‖ extrapolated to infinitely many steps.
        lower_bounds: (S, E), ‖x‖ of ``solutions``, which grows with the steps.
        converged: (S, E), whether the norm is within the tolerance.
        residual: (S, E), how far above the lower bound the upper one lies, relative to it.
        dampings: (S, E), ε as used.
        largest: (S,) λmax of AᵀA as the Krylov space sees it, from below.
        products: ``matvec`` and ``rmatvec`` spent for each operator.
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
    """X = argmin ‖Ax − b‖² + ε‖x‖² with ε = relative damping · λmax, by LSQR.

    Golub–Kahan bidiagonalisation A V = U B started from b (Paige and Saunders 1982, section
    3), with V kept orthonormal; the projected problem min ‖By − ‖b‖e₁‖² + ε‖y‖² is solved for
    every ε from one SVD of B. Equal to conjugate gradients on (AᵀA + εI)x = Aᵀb in exact
    arithmetic, without squaring the condition number, and λmax ≈ σmax(B)² comes along.

    ‖x‖ never decreases, and Radau's quadrature with a node at 0 bounds it from above (Golub and
    Meurant 1994, section 4). A damping stops where both agree to the tolerance, and where λmax, if
    it is not given, has grown by less than the tolerance over the last quarter of the steps. A
    block's result is that of the step at which all of its dampings have stopped, so that it does
    not depend on the other blocks.

    Args:
        operator: A, of S blocks.
        right_hand_side: b, (S, P).
        relative_dampings: ε/λmax, each > 0.
        tolerance: relative error of ‖x‖; 0 takes all steps.
        max_steps: most steps, of two products each.
        largest: (S,) λmax where it is known.
    """
    if not relative_dampings or min(relative_dampings) <= 0:
        raise ValueError(f"relative_dampings must be positive, got {relative_dampings}.")
    first = operator.products
    left, beta = normalize_rows(right_hand_side)
    scale = beta.double()
    right, alpha = normalize_rows(operator.rmatvec(left))
    basis = right[:, None]
    diagonal: list[Tensor] = []
    below: list[Tensor] = []
    largest_history: list[Tensor] = []
    relative = torch.tensor(relative_dampings, dtype=torch.float64)
    next_check = 1 if tolerance > 0 else max_steps
    steps = 0
    finished = torch.zeros(operator.num_blocks, dtype=torch.bool)
    kept: dict[str, Tensor] = {}
    while True:
        steps += 1
        diagonal.append(alpha.double())
        left, beta = normalize_rows(operator.matvec(right) - alpha[:, None] * left)
        below.append(beta.double())
        right, alpha = normalize_rows(
            orthogonalize(operator.rmatvec(left) - beta[:, None] * right, basis)
        )
        tiny = torch.finfo(alpha.dtype).eps * diagonal[0].to(alpha.dtype)
        exhausted = (alpha <= tiny) | torch.tensor(steps >= operator.num_inputs)
        alpha = torch.where(exhausted, 0.0, alpha)
        right = torch.where(exhausted[:, None], 0.0, right)
        last = steps >= min(max_steps, operator.num_inputs) or bool(exhausted.all())
        if steps >= next_check or last:
            next_check = steps + max(1, steps // 10)
            bidiagonal = lower_bidiagonal(diagonal, below)
            factors = torch.linalg.svd(bidiagonal, full_matrices=False)
            top = factors[1][:, 0] ** 2
            dampings = relative * (top if largest is None else largest.double())[:, None]
            coordinates = _project(factors, scale, dampings)
            norms = torch.linalg.vector_norm(coordinates, dim=2)
            upper = _upper_bounds(bidiagonal, alpha, scale, dampings)
            largest_history += [top] * (steps - len(largest_history))
            tiny_norm = torch.finfo(torch.float64).tiny
            error = ((upper - norms) / norms.clamp_min(tiny_norm)).clamp_min(0)
            error = torch.where(exhausted[:, None], 0.0, error)
            if largest is None:
                growth = torch.where(exhausted, 0.0, remaining_growth(largest_history))
                error = torch.maximum(error, growth[:, None])
            converged = (error <= tolerance) | (norms == 0)
            done = finished | converged.all(1)
            current = {
                "coordinates": coordinates,
                "norms": norms,
                "converged": converged,
                "error": error,
                "dampings": dampings,
                "top": top,
            }
            if last or bool((done & ~finished).any()):
                limit = _extrapolated(bidiagonal, scale, dampings, norms)
                current["limit"] = torch.minimum(limit, norms * (1 + error))
            for name, value in current.items():
                kept[name] = keep_finished(finished, kept.get(name), value)
            finished = done
            if last or bool(finished.all()):
                break
        basis = torch.cat([basis, right[:, None]], dim=1)
    solutions = torch.einsum("sej,sjn->sen", kept["coordinates"].to(operator.dtype), basis)
    return DampedSolution(
        solutions,
        kept["limit"],
        kept["norms"],
        kept["converged"],
        kept["error"],
        kept["dampings"],
        kept["top"],
        operator.products - first,
    )


def _upper_bounds(
    bidiagonal: Float[Tensor, "S k1 k"],
    next_alpha: Float[Tensor, " S"],
    scale: Float[Tensor, " S"],
    dampings: Float[Tensor, "S E"],
) -> Float[Tensor, "S E"]:
    """Upper bounds of the norms: Radau's rule of ‖x‖² = ∫(λ + ε)⁻²dμ, with a node at 0."""
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
    """The limit of the norms, from those in two smaller Krylov spaces; as is after few steps."""
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
    """Aitken's extrapolation of a growing sequence from three entries at equal distances.

    With r = (last − before)/(before − first), the rest of a geometric series is
    (last − before) r/(1−r) (Aitken 1926). The norms of conjugate gradients' iterates grow in
    nearly that way, or like a staircase. So that the last stair is not carried on for ever, the
    rest is at most what the three entries grew by.
    """
    growth, earlier = (last - before).clamp_min(0), (before - first).clamp_min(0)
    # r/(1−r), negative or infinite where the growth does not slow down.
    rest = growth * growth / (earlier - growth)
    slowing = (earlier > growth) & (rest < earlier + growth)
    return last + torch.where(slowing, rest, earlier + growth)
