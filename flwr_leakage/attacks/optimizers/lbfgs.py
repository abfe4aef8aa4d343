"""L-BFGS with a strong Wolfe line search, over many rows in lockstep.

Each tick evaluates one trial point of every unfinished row; each row then takes its own
decision: go on bracketing, zoom, or accept and turn to a new direction. So the rows share
evaluations, and nothing else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.optimizers.base import Evaluate, Minimum, Report


@dataclass(frozen=True)
class LBFGS:
    """Limited-memory BFGS (Nocedal and Wright 2006, algorithms 7.5, 3.5 and 3.6).

    The feasible set is respected by the result only: the best point is projected at the end.

    Attributes:
        iterations: accepted steps, ≥ 1.
        history: pairs (s, y) kept, ≥ 1.
        tolerance: a row is finished once its objective is at most this.
        gradient_tolerance: … or once the gradient's largest entry is at most this.
        armijo: c₁ of the sufficient decrease condition.
        curvature: c₂ of the strong curvature condition.
        max_search: evaluations in one line search, ≥ 1.
    """

    iterations: int = 1000
    history: int = 30
    tolerance: float = 0.0
    gradient_tolerance: float = 0.0
    armijo: float = 1e-4
    curvature: float = 0.9
    max_search: int = 25

    def __post_init__(self) -> None:
        for name in ("iterations", "history", "max_search"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.armijo < self.curvature < 1:
            raise ValueError(
                f"0 < armijo < curvature < 1 must hold, got {self.armijo} and {self.curvature}."
            )

    def __call__(
        self,
        evaluate: Evaluate,
        start: Float[Tensor, "R D"],
        project: Callable[[Tensor], Tensor] | None = None,
        report: Report | None = None,
    ) -> Minimum:
        """Minimise from ``start`` (R, D)."""
        num_rows = start.shape[0]
        all_rows = torch.arange(num_rows, device=start.device)
        values, gradients = evaluate(start, all_rows)
        best = start.clone()
        best_values = torch.where(torch.isfinite(values), values, math.inf)
        iterations = torch.zeros(num_rows, dtype=torch.int64, device=start.device)
        evaluations = torch.ones_like(iterations)
        state = _State.begin(all_rows, start, values, gradients, self.history)
        state = state.select(torch.isfinite(values) & ~self._converged(values, gradients))
        while len(state.rows):
            trial = state.x + state.t[:, None] * state.d
            values, gradients = evaluate(trial, state.rows)
            evaluations[state.rows] += 1
            finished = self._advance(state, values, gradients)
            best[state.rows] = state.x
            best_values[state.rows] = state.f
            iterations[state.rows] = state.steps
            if bool(finished.any()):
                state = state.select(~finished)
            if report is not None:
                done = num_rows - len(state.rows)
                report(
                    int(state.steps.max()) if len(state.rows) else self.iterations,
                    done,
                    best_values,
                )
        if project is not None:
            best = project(best)
        return Minimum(best, best_values, iterations, evaluations)

    def _converged(self, values: Tensor, gradients: Tensor) -> Tensor:
        flat = gradients.abs().amax(dim=1) <= self.gradient_tolerance
        return (values <= self.tolerance) | flat

    def _advance(self, s: "_State", f: Tensor, g: Tensor) -> Tensor:
        """Let every row digest its trial (f, g); returns which rows are finished."""
        slope = (g * s.d).sum(dim=1)
        usable = torch.isfinite(f) & torch.isfinite(slope)
        f = torch.where(usable, f, math.inf)
        slope = torch.where(usable, slope, 0.0)
        s.searched += 1

        too_high = f > s.f + self.armijo * s.t * s.slope
        worse = f >= s.low_f
        fails = ~usable | too_high | torch.where(s.zooming | (s.searched > 1), worse, False)
        wolfe = ~fails & (slope.abs() <= -self.curvature * s.slope)
        accept = wolfe.clone()

        # Bracketing (algorithm 3.5): `low` is the previous trial.
        bracketing = ~s.zooming & ~accept
        turned = bracketing & ~fails & (slope >= 0)
        # Zooming (algorithm 3.6): a better trial becomes `low`, and `high` the other end.
        improves = s.zooming & ~fails & ~accept
        flips = improves & (slope * (s.high_t - s.low_t) >= 0)
        low_becomes_high = turned | flips
        s.high_t = torch.where(fails, s.t, torch.where(low_becomes_high, s.low_t, s.high_t))
        s.high_f = torch.where(fails, f, torch.where(low_becomes_high, s.low_f, s.high_f))
        s.high_slope = torch.where(
            fails, slope, torch.where(low_becomes_high, s.low_slope, s.high_slope)
        )
        previous_t, previous_f, previous_slope = s.low_t, s.low_f, s.low_slope
        becomes_low = (bracketing & ~fails) | improves
        s.low_t = torch.where(becomes_low, s.t, s.low_t)
        s.low_f = torch.where(becomes_low, f, s.low_f)
        s.low_slope = torch.where(becomes_low, slope, s.low_slope)
        s.low_g = torch.where(becomes_low[:, None], g, s.low_g)
        extrapolates = bracketing & ~fails & ~turned
        s.zooming = s.zooming | (bracketing & (fails | turned))

        width = (s.high_t - s.low_t).abs() * s.d.abs().amax(dim=1)
        stuck = ~accept & (
            (s.searched >= self.max_search)
            | (s.zooming & (width <= 1e-15 * (1 + s.x.abs().amax(dim=1))))
        )
        settles = stuck & (s.low_t > 0)
        fails_for_good = stuck & (s.low_t <= 0)

        s.next_trial(extrapolates, previous_t, previous_f, previous_slope, f, slope)
        step = torch.where(settles, s.low_t, s.accepted_t(accept))
        new_f = torch.where(settles, s.low_f, f)
        new_g = torch.where(settles[:, None], s.low_g, g)
        moves = accept | settles
        finished = s.move(moves, step, new_f, new_g, self.history)
        finished |= moves & (self._converged(s.f, s.g) | (s.steps >= self.iterations))
        return finished | s.restart(fails_for_good)


@dataclass
class _State:
    """Everything of the unfinished rows; A rows, D variables, m pairs of history."""

    rows: Tensor
    x: Tensor
    f: Tensor
    g: Tensor
    d: Tensor
    slope: Tensor
    t: Tensor
    trial_t: Tensor
    steps: Tensor
    searched: Tensor
    zooming: Tensor
    low_t: Tensor
    low_f: Tensor
    low_slope: Tensor
    low_g: Tensor
    high_t: Tensor
    high_f: Tensor
    high_slope: Tensor
    pairs: Tensor  # valid pairs a row
    next_pair: Tensor  # where the next pair is written
    s: Tensor  # (A, m, D)
    y: Tensor  # (A, m, D)
    rho: Tensor  # (A, m), 1/⟨s, y⟩

    @classmethod
    def begin(cls, rows: Tensor, x: Tensor, f: Tensor, g: Tensor, history: int) -> "_State":
        def full(value: float) -> Tensor:
            return torch.full_like(f, value)

        def count() -> Tensor:
            return torch.zeros_like(rows)

        state = cls(
            rows=rows.clone(), x=x.clone(), f=f.clone(), g=g.clone(), d=-g, slope=full(0.0),
            t=full(1.0), trial_t=full(1.0), steps=count(), searched=count(),
            zooming=count().bool(), low_t=full(0.0), low_f=f.clone(), low_slope=full(0.0),
            low_g=g.clone(), high_t=full(0.0), high_f=full(0.0), high_slope=full(0.0),
            pairs=count(), next_pair=count(),
            s=x.new_zeros(len(rows), history, x.shape[1]),
            y=x.new_zeros(len(rows), history, x.shape[1]),
            rho=x.new_zeros(len(rows), history),
        )  # fmt: skip
        state.begin_search(torch.ones_like(state.zooming))
        return state

    def select(self, keep: Tensor) -> "_State":
        if bool(keep.all()):
            return self
        return _State(**{f.name: getattr(self, f.name)[keep] for f in fields(self)})

    def accepted_t(self, accept: Tensor) -> Tensor:
        """The step that was just tried, for rows that accept it."""
        return torch.where(accept, self.trial_t, self.t)

    def next_trial(
        self,
        extrapolates: Tensor,
        previous_t: Tensor,
        previous_f: Tensor,
        previous_slope: Tensor,
        f: Tensor,
        slope: Tensor,
    ) -> None:
        """Choose the next step of rows that go on searching; keeps the last in ``trial_t``."""
        self.trial_t = self.t
        further = _cubic_minimum(previous_t, previous_f, previous_slope, self.t, f, slope)
        least = self.t + 0.1 * (self.t - previous_t)
        further = torch.where(torch.isfinite(further), further, 10 * self.t)
        further = torch.minimum(torch.maximum(further, least), 10 * self.t)
        within = _cubic_minimum(
            self.low_t, self.low_f, self.low_slope, self.high_t, self.high_f, self.high_slope
        )
        left = torch.minimum(self.low_t, self.high_t)
        span = (self.high_t - self.low_t).abs()
        middle = left + 0.5 * span
        within = torch.where(torch.isfinite(within), within, middle)
        within = torch.minimum(torch.maximum(within, left + 0.1 * span), left + 0.9 * span)
        self.t = torch.where(extrapolates, further, torch.where(self.zooming, within, self.t))

    def move(self, moves: Tensor, step: Tensor, f: Tensor, g: Tensor, history: int) -> Tensor:
        """Take the accepted steps, and turn those rows to their next direction."""
        index = moves.nonzero()[:, 0]
        finished = torch.zeros_like(moves)
        if not len(index):
            return finished
        s = step[index, None] * self.d[index]
        y = g[index] - self.g[index]
        curvature = (s * y).sum(dim=1)
        useful = curvature > 1e-16 * y.square().sum(dim=1)
        kept, slot = index[useful], self.next_pair[index[useful]]
        self.s[kept, slot], self.y[kept, slot] = s[useful], y[useful]
        self.rho[kept, slot] = 1 / curvature[useful]
        self.next_pair[kept] = (slot + 1) % history
        self.pairs[kept] = (self.pairs[kept] + 1).clamp_max(history)
        decrease = self.f[index] - f[index]
        finished[index] = decrease <= 0
        self.x[index] += s
        self.f[index], self.g[index] = f[index], g[index]
        self.steps[index] += 1
        self.d[index] = self.direction(index)
        self.begin_search(moves)
        return finished

    def restart(self, failed: Tensor) -> Tensor:
        """Forget the history of rows whose search failed; without any, they are finished."""
        hopeless = failed & (self.pairs == 0)
        index = (failed & ~hopeless).nonzero()[:, 0]
        if len(index):
            self.pairs[index] = 0
            self.d[index] = -self.g[index]
            self.begin_search(failed & ~hopeless)
        return hopeless

    def begin_search(self, which: Tensor) -> None:
        """Start a line search along ``d``; an uphill direction is replaced by the steepest."""
        slope = (self.g * self.d).sum(dim=1)
        uphill = which & ~(slope < 0)
        self.d = torch.where(uphill[:, None], -self.g, self.d)
        self.pairs = torch.where(uphill, 0, self.pairs)
        slope = torch.where(uphill, -self.g.square().sum(dim=1), slope)
        first = (1 / self.g.abs().sum(dim=1).clamp_min(1e-300)).clamp_max(1.0)
        self.t = torch.where(which, torch.where(self.pairs == 0, first, 1.0), self.t)
        self.slope = torch.where(which, slope, self.slope)
        self.searched = torch.where(which, 0, self.searched)
        self.zooming = self.zooming & ~which
        self.low_t = torch.where(which, 0.0, self.low_t)
        self.low_f = torch.where(which, self.f, self.low_f)
        self.low_slope = torch.where(which, slope, self.low_slope)
        self.low_g = torch.where(which[:, None], self.g, self.low_g)

    def direction(self, index: Tensor) -> Tensor:
        """−H g by the two-loop recursion, for some rows; pairs from newest to oldest."""
        most = int(self.pairs[index].max())
        q = self.g[index].clone()
        history = self.rho.shape[1]
        slots, alphas = [], []
        for age in range(most):
            slot = (self.next_pair[index] - 1 - age) % history
            rho = torch.where(age < self.pairs[index], self.rho[index, slot], 0.0)
            alpha = rho * (self.s[index, slot] * q).sum(dim=1)
            q -= alpha[:, None] * self.y[index, slot]
            slots.append((slot, rho))
            alphas.append(alpha)
        if most:
            newest = slots[0][0]
            y = self.y[index, newest]
            scale = 1 / (self.rho[index, newest] * y.square().sum(dim=1)).clamp_min(1e-300)
            q *= torch.where(self.pairs[index] > 0, scale, 1.0)[:, None]
        for (slot, rho), alpha in zip(reversed(slots), reversed(alphas), strict=True):
            beta = rho * (self.y[index, slot] * q).sum(dim=1)
            q += (alpha - beta)[:, None] * self.s[index, slot]
        return -q


def _cubic_minimum(
    t1: Tensor, f1: Tensor, d1: Tensor, t2: Tensor, f2: Tensor, d2: Tensor
) -> Tensor:
    """Minimiser of the cubic through two points and slopes (Nocedal and Wright, eq. 3.59)."""
    a = d1 + d2 - 3 * (f1 - f2) / (t1 - t2)
    b = (t2 - t1).sign() * (a.square() - d1 * d2).sqrt()
    return t2 - (t2 - t1) * (d2 + b - a) / (d2 - d1 + 2 * b)
