"""Solve least squares by damped Gauss–Newton, with a Jacobian that is given by its products."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from flwr_leakage.attacks.solve.descent import Damping, Iterate, Posed, follow
from flwr_leakage.attacks.solve.linearization import Linearized
from flwr_leakage.attacks.solve.posterior import Kept, Solver
from flwr_leakage.spectral.cholesky import cholesky, cholesky_solve

MANY_ITERATIONS, MOST_ITERATIONS = 40, 60
"""Two numbers of iterations of conjugate gradients in one linear system of damped Gauss–Newton.
After more than 40, the preconditioner is computed anew for the next step. At most 60 are taken:
then it is computed anew for the same step, which costs as much as about 60 iterations."""

LEAST_SHIFT = 1e-5
"""Least multiple of the identity that the preconditioner adds to JᵀJ, as a share of the mean of its
diagonal. Rounding moves eigenvalues of a matrix of n rows in single precision by about √n 2⁻²⁴,
4e-6 for 5,000 rows, and could make JᵀJ indefinite."""


@dataclass(frozen=True)
class LeastSquares:
    """The problem ``min ‖r(x)‖²``, linearised at inputs x (1, *shape).

    Attributes:
        linear: the residuals r(x) (R,), with products with their derivative J by x.
        sum_of_squares: map from other inputs x' (1, *shape) to ‖r(x')‖².
        normal_matrix: function that computes JᵀJ (D, D) for inputs of D entries, in the precision
            in which it will be factored.
    """

    linear: Linearized
    sum_of_squares: Callable[[Tensor], float]
    normal_matrix: Callable[[], Tensor]


def damped_gauss_newton(
    problem_at: Callable[[Tensor], LeastSquares | None],
    start: Tensor,
    steps: int,
    progress: float = 0.75,
    solved: float = 1e-7,
) -> list[Tensor]:
    """Return the inputs (1, *shape) after each step of a descent, each better than the one before.

    The steps Δ solve ``(JᵀJ + μ d̄ I) Δ = −Jᵀr`` for the problem ``min ‖r(x)‖²``. J is the
    derivative of the residuals r by x, and d̄ the mean of JᵀJ's diagonal.
    :class:`~flwr_leakage.attacks.solve.descent.Damping` chooses the damping μ. Conjugate gradients
    solve each system. Their preconditioner is the Cholesky factor of an earlier step's matrix,
    until they take many iterations with it.

    ``problem_at`` maps inputs to the problem that is linearised there, which may differ from step
    to step; ``None`` ends the descent. It also ends after ``steps`` ≥ 0 steps, at a sum of squares
    of at most ``solved``, and if two steps in a row do not lower the sum to the share ``progress``
    in (0, 1] of its value before the step.
    """
    found: list[Tensor] = []
    kept: Kept[_Factored] = Kept(MANY_ITERATIONS)
    slow, before = 0, 0.0

    def ends(at: Iterate, _: int) -> bool:
        nonlocal slow
        if not at.has_moved:
            return True
        found.append(at.point)
        slow = slow + 1 if at.value > progress * before else 0
        return at.value <= solved or slow >= 2

    def pose(at: Iterate, _: int) -> Posed | None:
        nonlocal before
        problem = problem_at(at.point)
        if problem is None:
            return None
        before = float(problem.linear.value.square().sum())
        slope = problem.linear.pull(problem.linear.value)
        solve = partial(_solved, problem, slope, kept)
        return Posed(at.point, before, slope, solve, problem.sum_of_squares)

    follow(range(steps), pose, start, ends, Damping(trials=6))
    return found


def _solved(
    problem: LeastSquares, slope: Tensor, kept: Kept["_Factored"], damping: float
) -> tuple[Tensor, int]:
    """Return the solution Δ of ``(JᵀJ + μ d̄ I) Δ = −Jᵀr``, and its number of iterations.

    r are the problem's residuals with derivative J. The slope is Jᵀr, of the shape of the inputs,
    and μ the damping. ``kept`` stores the preconditioner, the factored JᵀJ of this or an earlier
    step. d̄ is the mean of the diagonal of that JᵀJ.
    """
    used = kept.made
    if used is None or used.problem is not problem:
        used = kept.get(lambda: _Factored(problem))
    assert used is not None
    used.fit(max(damping, LEAST_SHIFT))
    shift = damping * used.mean

    def product(vector: Tensor) -> Tensor:
        return problem.linear.pull(problem.linear.push(vector)) + shift * vector

    step, iterations = Solver(MOST_ITERATIONS, 1e-2, used)(product, -slope)
    kept.note(iterations)
    if iterations >= MOST_ITERATIONS and used.problem is not problem:
        kept.is_due = True
        return _solved(problem, slope, kept, damping)
    return step, iterations


class _Factored:
    """The Cholesky factor of ``JᵀJ + σ d̄ I``, which preconditions conjugate gradients.

    J is the derivative of a problem's residuals, d̄ the mean of JᵀJ's diagonal, and σ a shift. A
    call solves with the factor.
    """

    def __init__(self, problem: LeastSquares) -> None:
        self.problem, self.matrix, self.shift = problem, problem.normal_matrix(), 0.0
        self.mean = float(self.matrix.diagonal().mean())

    def fit(self, shift: float) -> None:
        """Factor ``JᵀJ + σ d̄ I`` again if the shift σ differs from the present one by more than a
        factor of 30.

        J is the derivative of a problem's residuals, and d̄ the mean of JᵀJ's diagonal.
        """
        if not self.shift / 30 <= shift <= self.shift * 30:
            mean = max(self.mean, 1e-30)
            self.factor, jitter = cholesky(self.matrix.clone(), shift * mean)
            self.shift = jitter / mean

    def __call__(self, vector: Tensor) -> Tensor:
        return cholesky_solve(self.factor, vector).to(vector.dtype)
