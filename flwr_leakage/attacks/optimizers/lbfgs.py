"""Run L-BFGS with a strong Wolfe line search for many independent objectives in lockstep.

Each objective has its own row of variables. Each iteration evaluates one trial point of every
unfinished row. Each row then decides by itself whether it continues to bracket a minimum, zooms
into a bracket, or accepts the point and takes a new direction. So the rows share evaluations, and
nothing else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.optimizers.base import Evaluate, Minimum, Report
from flwr_leakage.values import require

ARMIJO, CURVATURE = 1e-4, 0.9
"""The constants c₁ of sufficient decrease and c₂ of curvature in the strong Wolfe conditions, as
Nocedal and Wright advise for quasi-Newton methods (2006, section 3.1)."""


@dataclass(frozen=True)
class LBFGS:
    """Limited-memory BFGS for many objectives (Nocedal and Wright 2006, algorithms 7.5, 3.5, 3.6).

    Each objective has its own row of variables. Only the result lies in the feasible set, as the
    best point is projected at the end.

    Attributes:
        iterations: largest number of accepted steps, ≥ 1.
        history: number of past steps, each kept with its change of the gradient, ≥ 1.
        tolerance: value of an objective at which its row is finished.
        relative_tolerance: fraction of the objective. A row is finished once each of 10 successive
            steps has lowered its objective by at most this fraction.
    """

    iterations: int = 1000
    history: int = 30
    tolerance: float = 0.0
    relative_tolerance: float = 0.0

    def __post_init__(self) -> None:
        require(self, "be at least 1", "iterations", "history")

    def __call__(
        self,
        evaluate: Evaluate,
        start: Float[Tensor, "R D"],
        project: Callable[[Tensor], Tensor] | None = None,
        report: Report | None = None,
        budget: Budget = UNLIMITED,
    ) -> Minimum:
        """Return the best points that L-BFGS found for R objectives, one in each row.

        See :class:`.Optimizer` for the arguments.
        """
        num_rows = start.shape[0]
        all_rows = torch.arange(num_rows, device=start.device)
        values, gradients = evaluate(start, all_rows)
        best = start.clone()
        best_values = torch.where(torch.isfinite(values), values, math.inf)
        iterations = torch.zeros(num_rows, dtype=torch.int64, device=start.device)
        evaluations = torch.ones_like(iterations)
        state = _State.begin(all_rows, start, values, gradients, self.history)
        state = state.select(torch.isfinite(values) & ~self._converged(values, gradients))
        stopped = False
        while len(state.rows) and not stopped:
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
                step = int(state.steps.max()) if len(state.rows) else self.iterations
                report(step, best_values)
            stopped = budget.is_spent and len(state.rows) > 0
        if project is not None:
            best = project(best)
        return Minimum(best, best_values, iterations, evaluations, stopped)

    def _converged(self, values: Tensor, gradients: Tensor) -> Tensor:
        flat = gradients.abs().amax(dim=1) <= 0
        return (values <= self.tolerance) | flat

    def _advance(self, s: "_State", f: Tensor, g: Tensor) -> Tensor:
        """Update the line search of each of A unfinished rows by its trial point.

        The result (A,) is true for rows that are finished. The state ``s`` is changed in place.
        ``f`` (A,) and ``g`` (A, D) are values and gradients at the trial points.
        """
        slope = (g * s.d).sum(dim=1)
        usable = torch.isfinite(f) & torch.isfinite(slope)
        f = torch.where(usable, f, math.inf)
        slope = torch.where(usable, slope, 0.0)
        s.searched += 1

        too_high = f > s.f + ARMIJO * s.t * s.slope
        worse = f >= s.low_f
        fails = ~usable | too_high | torch.where(s.zooming | (s.searched > 1), worse, False)
        wolfe = ~fails & (slope.abs() <= -CURVATURE * s.slope)
        accept = wolfe.clone()

        # While a row brackets a minimum (Nocedal and Wright, algorithm 3.5), `low` is the previous
        # trial.
        bracketing = ~s.zooming & ~accept
        turned = bracketing & ~fails & (slope >= 0)
        # While a row zooms into its bracket (algorithm 3.6), a trial with a lower objective becomes
        # `low`, and `high` is the other end of the bracket.
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
            (s.searched >= 25) | (s.zooming & (width <= 1e-15 * (1 + s.x.abs().amax(dim=1))))
        )
        settles = stuck & (s.low_t > 0)
        fails_for_good = stuck & (s.low_t <= 0)

        s.next_trial(extrapolates, previous_t, previous_f, previous_slope, f, slope)
        step = torch.where(settles, s.low_t, torch.where(accept, s.trial_t, s.t))
        new_f = torch.where(settles, s.low_f, f)
        new_g = torch.where(settles[:, None], s.low_g, g)
        moves = accept | settles
        finished = s.move(moves, step, new_f, new_g, self.history, self.relative_tolerance)
        finished |= moves & (self._converged(s.f, s.g) | (s.steps >= self.iterations))
        return finished | s.restart(fails_for_good)


@dataclass
class _State:
    """The state of L-BFGS for A unfinished rows, each an objective of D variables.

    ``x``, ``f``, ``g`` and ``d`` are the points, objectives, gradients and search directions; ``t``
    are the trial step lengths. ``slope`` is the objective's derivative along ``d``. ``steps``
    counts accepted steps, ``searched`` the trials of the present line search, and ``stalled``
    successive steps that lower the objective too little. The names with ``low`` and ``high`` belong
    to the ends of the bracket of the line search. A pair is a past step with its change of the
    gradient; m pairs are kept for each row.
    """

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
    stalled: Tensor
    zooming: Tensor
    low_t: Tensor
    low_f: Tensor
    low_slope: Tensor
    low_g: Tensor
    high_t: Tensor
    high_f: Tensor
    high_slope: Tensor
    pairs: Tensor  # (A,) the number of valid pairs of each row
    next_pair: Tensor  # (A,) the index at which the next pair is written
    s: Tensor  # steps s of the pairs, (A, m, D)
    y: Tensor  # changes y of the gradient in these steps, (A, m, D)
    sy: Tensor  # products ⟨s_i, y_j⟩ of the pairs, (A, m, m)
    yy: Tensor  # products ⟨y_i, y_j⟩ of the pairs, (A, m, m)

    @classmethod
    def begin(cls, rows: Tensor, x: Tensor, f: Tensor, g: Tensor, history: int) -> "_State":
        def full(value: float) -> Tensor:
            return torch.full_like(f, value)

        def count() -> Tensor:
            return torch.zeros_like(rows)

        state = cls(
            rows=rows.clone(), x=x.clone(), f=f.clone(), g=g.clone(), d=-g, slope=full(0.0),
            t=full(1.0), trial_t=full(1.0), steps=count(), searched=count(), stalled=count(),
            zooming=count().bool(), low_t=full(0.0), low_f=f.clone(), low_slope=full(0.0),
            low_g=g.clone(), high_t=full(0.0), high_f=full(0.0), high_slope=full(0.0),
            pairs=count(), next_pair=count(),
            s=x.new_zeros(len(rows), history, x.shape[1]),
            y=x.new_zeros(len(rows), history, x.shape[1]),
sy=x.new_zeros(len(rows), history, history),
            yy=x.new_zeros(len(rows), history, history),
        )  # fmt: skip
        state.begin_search(torch.ones_like(state.zooming))
        return state

    def select(self, keep: Tensor) -> "_State":
        if bool(keep.all()):
            return self
        return _State(**{f.name: getattr(self, f.name)[keep] for f in fields(self)})

    def next_trial(
        self,
        extrapolates: Tensor,
        previous_t: Tensor,
        previous_f: Tensor,
        previous_slope: Tensor,
        f: Tensor,
        slope: Tensor,
    ) -> None:
        """Choose the next step length ``t`` of rows whose line search continues.

        The attribute ``trial_t`` keeps the step length of the latest trial. ``extrapolates`` (A,)
        is true for rows that look beyond their trial point. ``f`` and ``slope`` (A,) are the
        objectives at the latest trial and their derivatives along the direction. Those at the trial
        before it, and its step length, are called ``previous``.
        """
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

    def move(
        self,
        moves: Tensor,
        step: Tensor,
        f: Tensor,
        g: Tensor,
        history: int,
        relative_tolerance: float,
    ) -> Tensor:
        """Take the accepted steps of the A unfinished rows, and give each row its next direction.

        ``moves`` (A,) is true for rows whose step is accepted, and ``step`` (A,) holds step lengths
        along the directions. ``f`` (A,) and ``g`` (A, D) are objectives and gradients after the
        step. At most ``history`` pairs (step, change of gradient) are kept. The result (A,) is true
        for rows that are finished: after ten successive steps in which the objective falls by at
        most the share ``relative_tolerance``.
        """
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
        pair_s, pair_y, everyone = s[useful], y[useful], torch.arange(history, device=s.device)
        rows, slots = kept[:, None], slot[:, None]
        self.sy[rows, slots, everyone] = torch.einsum("ad,amd->am", pair_s, self.y[kept])
        self.sy[rows, everyone, slots] = torch.einsum("amd,ad->am", self.s[kept], pair_y)
        products = torch.einsum("amd,ad->am", self.y[kept], pair_y)
        self.yy[rows, slots, everyone] = products
        self.yy[rows, everyone, slots] = products
        self.next_pair[kept] = (slot + 1) % history
        self.pairs[kept] = (self.pairs[kept] + 1).clamp_max(history)
        decrease = self.f[index] - f[index]
        slow = decrease <= relative_tolerance * self.f[index].abs()
        self.stalled[index] = torch.where(slow, self.stalled[index] + 1, 0)
        finished[index] = (decrease <= 0) | (self.stalled[index] >= 10)
        self.x[index] += s
        self.f[index], self.g[index] = f[index], g[index]
        self.steps[index] += 1
        self.d[index] = self.direction(index)
        self.begin_search(moves)
        return finished

    def restart(self, failed: Tensor) -> Tensor:
        """Delete the history of rows whose line search failed, and let them search downhill.

        They search along the negative gradient. ``failed`` (A,) is true for rows whose line search
        failed. The result (A,) is true for those among them that searched downhill already: they
        are finished.
        """
        hopeless = failed & (self.pairs == 0)
        index = (failed & ~hopeless).nonzero()[:, 0]
        if len(index):
            self.pairs[index] = 0
            self.d[index] = -self.g[index]
            self.begin_search(failed & ~hopeless)
        return hopeless

    def begin_search(self, which: Tensor) -> None:
        """Begin a line search along a row's direction, or along −g if the direction leads uphill.

        Here g is the row's gradient. ``which`` (A,) is true for rows that begin a search.
        """
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
        """Return the quasi-Newton directions −H g of the rows ``index``, each with its gradient g.

        The inverse Hessian H is kept in compact form. Let s be the past steps of a row and y the
        changes of its gradient in them, the columns of S and Y. Let R be the upper triangle of SᵀY,
        in the order of time, D its diagonal, and γ = ⟨s, y⟩ / ‖y‖² of the latest step. Then
        ``H g = γ g + S R⁻ᵀ((D + γ YᵀY) u − γ Yᵀg) − γ Y u`` for ``u = R⁻¹ Sᵀg`` (Byrd, Nocedal,
        Schnabel 1994, theorem 2.2). This takes a few large products, while the two-loop recursion
        takes four small ones for each pair.
        """
        gradient, history = self.g[index], self.s.shape[1]
        if not int(self.pairs[index].max()):
            return -gradient
        ages = torch.arange(history, device=index.device)
        first = self.next_pair[index] - self.pairs[index]
        order = (first[:, None] + ages) % history  # oldest pair first
        valid = ages < self.pairs[index, None]
        both = valid[:, :, None] & valid[:, None, :]
        rows = index[:, None, None]
        sy = torch.where(both, self.sy[rows, order[:, :, None], order[:, None, :]], 0.0)
        yy = torch.where(both, self.yy[rows, order[:, :, None], order[:, None, :]], 0.0)
        diagonal = sy.diagonal(dim1=1, dim2=2)
        triangle = sy.triu() + torch.diag_embed((~valid).to(sy.dtype))
        s, y = self.s[index], self.y[index]
        newest = (self.pairs[index] - 1).clamp_min(0)[:, None]
        y_norm = yy.diagonal(dim1=1, dim2=2).gather(1, newest).clamp_min(1e-300)
        gamma = diagonal.gather(1, newest) / y_norm
        gamma = torch.where(self.pairs[index, None] > 0, gamma, 1.0)
        s_g = torch.where(valid, torch.einsum("amd,ad->am", s, gradient).gather(1, order), 0.0)
        y_g = torch.where(valid, torch.einsum("amd,ad->am", y, gradient).gather(1, order), 0.0)
        u = torch.linalg.solve_triangular(triangle, s_g[..., None], upper=True)[..., 0]
        right = diagonal * u + gamma * (torch.einsum("aij,aj->ai", yy, u) - y_g)
        w = torch.linalg.solve_triangular(triangle.mT, right[..., None], upper=False)[..., 0]
        in_slots_w = torch.zeros_like(w).scatter(1, order, torch.where(valid, w, 0.0))
        in_slots_u = torch.zeros_like(u).scatter(1, order, torch.where(valid, u, 0.0))
        product = gamma * gradient + torch.einsum("am,amd->ad", in_slots_w, s)
        return -(product - gamma * torch.einsum("am,amd->ad", in_slots_u, y))


def _cubic_minimum(
    t1: Tensor, f1: Tensor, d1: Tensor, t2: Tensor, f2: Tensor, d2: Tensor
) -> Tensor:
    """Return the minimiser of the cubic with values f and slopes d at two points t.

    The equation is 3.59 of Nocedal and Wright (2006).
    """
    a = d1 + d2 - 3 * (f1 - f2) / (t1 - t2)
    b = (t2 - t1).sign() * (a.square() - d1 * d2).sqrt()
    return t2 - (t2 - t1) * (d2 + b - a) / (d2 - d1 + 2 * b)
