"""Descend by one loop of Gauss–Newton steps, which every second-order attack uses.

An attack *poses* each step: it gives a quadratic model of the objective near the present point, or
ends the descent. The objective may differ from step to step, as the blur of the network, the weight
of the prior or the weights of the equations change. A *search* takes the step. It shortens the step
(:class:`Shortening`) or damps it (:class:`Damping`) until it lowers the objective. If a schedule
gives the settings of each step, :func:`follow` takes one step for each entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

S = TypeVar("S")


@dataclass(frozen=True)
class Posed:
    """The quadratic model of one step's objective, ``Φ(s + Δ) ≈ Φ(s) + 2 ⟨g, Δ⟩ + ⟨Δ, A Δ⟩``.

    The matrix A is half of the second derivative of Φ, or its approximation by Gauss–Newton.

    Attributes:
        point: the point s, of any shape.
        value: the objective Φ(s).
        slope: the vector g, half of Φ's derivative at s, of the same shape.
        solve: map from a damping μ ≥ 0 to the solution Δ of ``(A + μ D) Δ = −g``, of the same
            shape, and the number of iterations that it took. The solver chooses the diagonal matrix
            D.
        cost: map from another point to Φ at that point.
    """

    point: Tensor
    value: float
    slope: Tensor
    solve: Callable[[float], tuple[Tensor, int]]
    cost: Callable[[Tensor], float]


@dataclass(frozen=True)
class Iterate:
    """The state of a descent between two steps, of which each lowers an objective Φ of its own.

    Attributes:
        point: the point s.
        steps: number of steps that were tried so far.
        value: Φ(s), for the objective Φ of the latest step; infinite before the first.
        fall: decrease of Φ in the latest step, ≥ 0.
        length: share of the latest step that was taken; 0 if no length lowered Φ.
        iterations: number of iterations for the latest linear system.
        damping: the damping μ with which the next step begins; ``None`` if no step was damped.
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
        """Return whether the latest step of the descent lowered its objective."""
        return self.length > 0


Pose = Callable[[Iterate], Posed | None]
"""Map from an iterate of a descent to the quadratic model of the next step, or to ``None``, which
ends the descent."""

Search = Callable[[Posed, Iterate], Iterate]
"""Map from the quadratic model of a step, and the iterate before the step, to the next iterate."""


@dataclass(frozen=True)
class Shortening:
    """Shorten a step until it lowers its objective Φ; a step that never does is not taken.

    Attributes:
        trials: largest number of lengths that are tried, ≥ 1. The first is the full step.
        factor: ratio of each length to the one before, in (0, 1).
        is_best: whether shorter lengths are tried as long as each lowers Φ further.
    """

    trials: int = 6
    factor: float = 0.4
    is_best: bool = False

    def __call__(self, posed: Posed, at: Iterate) -> Iterate:
        """Return the iterate after the longest tried share of a step at which Φ falls.

        Φ is the objective of the step, which ``posed`` models near the point of ``at``. With
        ``is_best``, shorter lengths follow as long as Φ falls further, and the shortest of these
        counts. If Φ falls at no length, the point stays where it is.
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
    """Solve a step's linear system with growing damping μ until the objective Φ falls enough.

    The rules are those of Levenberg (1944) and Marquardt (1963). A step Δ predicts the decrease
    ``p = −⟨g, Δ⟩``, where g is half of Φ's derivative. If Φ falls by at least p / 4, the step is
    taken and μ falls: to a tenth if Φ falls by 3 p / 4 or more, else to a half. Otherwise μ grows,
    eightfold if Φ did not fall and threefold if it did. Then the step is tried again, unless Φ fell
    by more than a tenth of its value.

    Attributes:
        first: μ of the first step, > 0.
        trials: largest number of trials of a step, ≥ 1.
    """

    first: float = 1e-3
    trials: int = 24

    def __call__(self, posed: Posed, at: Iterate) -> Iterate:
        """Return the iterate after the first damped step that lowers the objective Φ enough.

        If no trial does, the final one is taken if it lowers Φ at all; else the point stays where
        it is. ``posed`` models Φ near the point of ``at``, which tells the damping to begin with.
        """
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
    """Return the iterate at which a descent ends, because ``pose`` gives no further step.

    ``pose`` maps an iterate to the quadratic model of the next step, or to ``None`` at the end.
    ``search`` maps this model, and the iterate before the step, to the next iterate. The start may
    have any shape.
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
    """Take one step of a descent for each entry of a schedule, and return the iterate at its end.

    An entry is the settings of a step, such as a blur or the weight of a prior. ``pose`` maps an
    iterate and the settings of the next step to this step, or to ``None``, which ends the descent
    early. So does ``ends``, if it is true for an iterate and the settings of the step that led to
    it. ``search`` maps a posed step, and the iterate before it, to the next iterate; by default,
    steps are shortened until their objective falls. The start may have any shape.
    """

    def next_step(at: Iterate) -> Posed | None:
        if at.steps and ends(at, schedule[at.steps - 1]):
            return None
        return pose(at, schedule[at.steps]) if at.steps < len(schedule) else None

    return descend(next_step, start, search or Shortening())


def geometric(first: float, last: float, count: int) -> list[float]:
    """Return ``count`` numbers in a geometric series from ``first`` to ``last``, both included."""
    return [first * (last / first) ** (step / max(1, count - 1)) for step in range(count)]
