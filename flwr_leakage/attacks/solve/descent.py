"""One loop of Gauss–Newton steps, for every second-order attack.

An attack *poses* each step: it says what the step minimises to first order, with a blur, a weight
of the prior and weights of the equations that may be others than those of the step before, or that
no further step follows. A *search* takes the step: as short as it must be (:class:`Shortening`), or
with as much damping (:class:`Damping`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Posed:
    """What one step minimises: ``Φ(s + Δ) ≈ Φ(s) + 2 ⟨g, Δ⟩ + ⟨Δ, A Δ⟩``.

    Attributes:
        point: s, of any shape.
        value: Φ(s).
        slope: g, half of Φ's derivative at s, of the same shape.
        solve: maps a damping μ ≥ 0 to the solution Δ of ``(A + μ D) Δ = −g``, of the same shape,
            and to the iterations that it took. The diagonal D is the solver's choice.
        cost: maps another point to Φ there.
    """

    point: Tensor
    value: float
    slope: Tensor
    solve: Callable[[float], tuple[Tensor, int]]
    cost: Callable[[Tensor], float]


@dataclass(frozen=True)
class Iterate:
    """Where a descent stands between two steps.

    Attributes:
        point: s.
        steps: how many steps were tried so far.
        value: Φ(s) as the last step knew it; infinite before the first one.
        fall: by how much the last step lowered Φ, ≥ 0.
        length: which part of the last step was taken; 0 where no part lowered Φ.
        iterations: how many iterations the last linear system took.
        damping: μ of the next step; ``None`` where no step was damped.
    """

    point: Tensor
    steps: int = 0
    value: float = float("inf")
    fall: float = 0.0
    length: float = 0.0
    iterations: int = 0
    damping: float | None = None

    @property
    def has_moved(self) -> bool:
        """Whether the last step lowered Φ."""
        return self.length > 0


Pose = Callable[[Iterate], Posed | None]
"""Poses the step that follows an iterate, or returns ``None`` to end the descent."""

Search = Callable[[Posed, Iterate], Iterate]
"""Turns a posed step into the next iterate."""


@dataclass(frozen=True)
class Shortening:
    """Take a step as short as it must be to lower Φ; a step that never does is not taken.

    Attributes:
        trials: how many lengths are tried at most, ≥ 1.
        factor: each length is this part of the one before, in (0, 1).
        is_best: whether shorter lengths are tried for as long as each lowers Φ further.
    """

    trials: int = 6
    factor: float = 0.4
    is_best: bool = False

    def __call__(self, posed: Posed, at: Iterate) -> Iterate:
        """Return the first length that lowers Φ, or the best one."""
        change, iterations = posed.solve(0.0)
        found, length = Iterate(posed.point, at.steps + 1, posed.value, iterations=iterations), 1.0
        for _ in range(self.trials):
            trial = posed.point + length * change
            value = posed.cost(trial)
            if value < found.value:
                fall = posed.value - value
                found = Iterate(trial, at.steps + 1, value, fall, length, iterations)
            if found.has_moved and not (self.is_best and value == found.value):
                break
            length *= self.factor
        return found


@dataclass(frozen=True)
class Damping:
    """Solve the system with more and more damping μ (Levenberg 1944, Marquardt 1963).

    A step promises the fall ``p = −⟨g, Δ⟩``. After one that keeps three quarters of it μ falls
    tenfold, after one that keeps a quarter to half. Otherwise μ grows, eightfold where Φ did not
    fall, and the step is tried again unless Φ fell by a tenth.

    Attributes:
        first: μ of the first step, > 0.
        trials: how often a step is tried at most, ≥ 1.
        factor: where it is given, any fall of Φ is enough, after which μ falls by this factor, > 1;
            it grows by the same factor where Φ did not fall.
    """

    first: float = 1e-3
    trials: int = 24
    factor: float | None = None

    def __call__(self, posed: Posed, at: Iterate) -> Iterate:
        """Return the first trial that keeps enough of its promise."""
        damping = self.first if at.damping is None else at.damping
        trial, found, iterations, value = posed.point, posed.value, 0, posed.value
        for _ in range(self.trials):
            step, iterations = posed.solve(damping)
            trial = posed.point + step
            found = posed.cost(trial)
            if self.factor is not None:
                damping *= 1 / self.factor if found < value else self.factor
                if found < value:
                    break
                continue
            promised = -float((posed.slope * step).sum())
            if found <= value - 0.25 * promised:
                damping /= 10 if found <= value - 0.75 * promised else 2
                break
            damping *= 8 if found >= value else 3
            if found < 0.9 * value:
                break
        if not found < value:
            return Iterate(posed.point, at.steps + 1, value, 0.0, 0.0, iterations, damping)
        return Iterate(trial, at.steps + 1, found, value - found, 1.0, iterations, damping)


def descend(pose: Pose, start: Tensor, search: Search) -> Iterate:
    """Take steps from a start until no further one is posed.

    Args:
        pose: what the next step minimises, or ``None`` at the end.
        start: the first point.
        search: how a step is taken.
    """
    at = Iterate(start)
    while (posed := pose(at)) is not None:
        at = search(posed, at)
    return at
