"""Descend by one loop of Gauss–Newton steps, which every second-order attack uses.

An attack *poses* each step: it gives the objective of the step to first order, or ends the descent.
The blur, the weight of the prior and the weights of the equations may differ from step to step. A
*search* takes the step. It shortens the step (:class:`Shortening`) or damps it (:class:`Damping`)
until it lowers the objective. If a schedule gives the settings of each step, :func:`follow` takes
one step for each entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

S = TypeVar("S")


@dataclass(frozen=True)
class Posed:
    """The objective of one step, ``Φ(s + Δ) ≈ Φ(s) + 2 ⟨g, Δ⟩ + ⟨Δ, A Δ⟩``.

    point: the point s, of any shape.
    value: the objective Φ(s).
    slope: the vector g, half of Φ's derivative at s, of the same shape.
    solve: map from a damping μ ≥ 0 to the solution Δ of ``(A + μ D) Δ = −g``, of the same
        shape, and the number of its iterations. The solver chooses the diagonal matrix D.
    cost: map from another point to Φ at that point.
    """

    point: Tensor
    value: float
    slope: Tensor
    solve: Callable[[float], tuple[Tensor, int]]
    cost: Callable[[Tensor], float]


@dataclass(frozen=True)
class Iterate:
    """The state of a descent between two steps.

    Attributes:
        point: the point s.
        steps: number of steps that were tried so far.
        value: Φ(s), for the objective Φ of the last step; infinite before the first step.
        fall: decrease of Φ in the last step, ≥ 0.
        length: share of the last step that was taken; 0 if no length lowered Φ.
        iterations: number of iterations for the last linear system.
        damping: the damping μ of the next step; ``None`` if no step was damped.
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
        """Return whether the last step lowered the objective Φ."""
        return self.length > 0


Pose = Callable[[Iterate], Posed | None]
"""Map from an iterate to the next step, or to ``None``, which ends the descent."""

Search = Callable[[Posed, Iterate], Iterate]
"""Map from a posed step to the next iterate."""


@dataclass(frozen=True)
class Shortening:
    """Shorten a step until it lowers Φ; a step that never does is not taken.

    Attributes:
        trials: largest number of lengths that are tried, ≥ 1.
        factor: ratio of each length to the one before, in (0, 1).
        is_best: whether shorter lengths are tried as long as each lowers Φ further.
    """

    trials: int = 6
    factor: float = 0.4
    is_best: bool = False

    def __call__(self, posed: Posed, at: Iterate) -> Iterate:
        """Return the iterate behind the first step length at which the objective Φ falls.

        With ``is_best`` it is the last of the lengths at which Φ falls further. If Φ falls at no
        length, the point stays where it is.
        """
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
    """Solve the system with growing damping μ until Φ falls (Levenberg 1944, Marquardt 1963).

    A step predicts the decrease ``p = −⟨g, Δ⟩``. If Φ falls by at least 3 p / 4, μ is divided by
    ten, and if by at least p / 4, it is halved. Otherwise μ grows, eightfold if Φ did not fall and
    threefold if it did, and the step is tried again unless Φ fell by a tenth.

    Attributes:
        first: μ of the first step, > 0.
        trials: largest number of trials of a step, ≥ 1.
    """

    first: float = 1e-3
    trials: int = 24

    def __call__(self, posed: Posed, at: Iterate) -> Iterate:
        """Return the iterate at the first trial that lowers Φ enough."""
        damping = self.first if at.damping is None else at.damping
        trial, found, iterations, value = posed.point, posed.value, 0, posed.value
        for _ in range(self.trials):
            step, iterations = posed.solve(damping)
            trial = posed.point + step
            found = posed.cost(trial)
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
    """Return the iterate after steps from a start until no further one is posed.

    Args:
        pose: map from an iterate to the next step, or to ``None`` at the end.
        start: the first point.
        search: map from a posed step to the next iterate.
    """
    at = Iterate(start)
    while (posed := pose(at)) is not None:
        at = search(posed, at)
    return at


def follow(
    schedule: Sequence[S],
    pose: Callable[[Iterate, S], Posed | None],
    start: Tensor,
    ends: Callable[[Iterate, S], bool],
    search: Search | None = None,
) -> Iterate:
    """Return the iterate after one step for each entry of a schedule.

    Args:
        schedule: the settings of each step, such as a blur or the weight of a prior.
        pose: map from an iterate and the settings of the next step to this step, or to ``None``,
            which ends the descent.
        start: the first point.
        ends: map from an iterate and the settings of the last step to whether the descent ends.
        search: see :func:`descend`; by default, steps are shortened until Φ falls.
    """

    def next_step(at: Iterate) -> Posed | None:
        if at.steps and ends(at, schedule[at.steps - 1]):
            return None
        return pose(at, schedule[at.steps]) if at.steps < len(schedule) else None

    return descend(next_step, start, search or Shortening())


def geometric(first: float, last: float, count: int) -> list[float]:
    """Return ``count`` numbers from the first to the last, each in the same ratio to the next."""
    return [first * (last / first) ** (step / max(1, count - 1)) for step in range(count)]
