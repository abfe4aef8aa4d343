"""Find the errors and features of every local step on one sample from the last layer's update.

A linear last layer with weight W and bias b takes T plain steps on one sample with target y, at the
learning rate η. Step t has the features h_t, which are the layer's inputs, and the *error* e_t,
which is the derivative of the loss by the logits. The layer moves by

    −ΔW / η = Σ_t e_t h_tᵀ,    −Δb / η = Σ_t e_t,    e_t = softmax(W_t h_t + b_t) − y,

where e_s and h_s of earlier steps s give W_t. Steps with errors below the noise do not show: a step
without error changes nothing, and no step after it has an error. So if the sum's rank is less than
T, the search first assumes as many steps as the rank.

Any invertible (T, T) matrix could mix the outer products. Only one mixture remains, as features
behind a ReLU are nonnegative and mostly zero, and each error is the softmax of its own features
minus y. Levenberg–Marquardt searches over the mixing of the sum's left singular vectors.
Non-negative least squares give the features in each column (variable projection: Golub and Pereyra
1973). The assumed noise falls from far above the true noise, so that features of neighbouring steps
are similar at first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.solve.descent import Damping, Iterate, Posed, follow

COARSE_STAGES = (1e4, 1e3, 1e2, 10.0, 1.0)
"""The falling noise that successive stages of the search for local steps' errors assume, in units
of the true noise. Its steps are large, for fast searches that are tried first."""

FINE_STAGES = (1e5, 3e4, 1e4, 3e3, 1e3, 3e2, 1e2, 30.0, 10.0, 3.0, 1.0)
"""The falling noise that successive stages of the search for local steps' errors assume, in units
of the true noise. Its steps are small, for a slow search after those with :data:`COARSE_STAGES`
failed."""

LATE_STAGES = (30.0, 1.0)
"""The falling noise that successive stages of the search for local steps' errors assume, in units
of the true noise, for starts that are nearly right."""

Start = Literal["even", "same features", "at once", "mean", "own units"]
"""The name of a start of the search for the errors of local steps; see :func:`_begin`."""

TRIES: Sequence[tuple[Start, Sequence[float], float]] = (
    ("at once", LATE_STAGES, 1.0),
    ("same features", LATE_STAGES, 1.0),
    ("mean", COARSE_STAGES, 0.1),
    ("at once", COARSE_STAGES, 1.0),
    ("even", COARSE_STAGES, 1.0),
    ("even", FINE_STAGES, 1.0),
    ("own units", LATE_STAGES, 10.0),
)
"""Successive searches for local steps' errors: the start, the stages of the assumed noise, and the
reach, the scale of the features' change from step to step in units of their size. Searches end in
different minima, and only the right one explains the observed update. On 160 updates of 2, 3 and 5
steps at rates of 0.01 to 0.2, errors are right to 1 % on all but 4."""

SOFTMAX_DEVIATION = 10.0
"""Standard deviation that the search for local steps' errors allows between a step's errors and
those that its features give by the softmax. The unit is the noise of an entry of the last layer's
change, relative to the root mean square of its entries. The value was chosen on development draws;
no results are kept."""

SOLVED_MISFIT = 4.0
"""Largest misfit (:attr:`_Mixture.misfit`) of a guess of the local steps' errors and features at
which no further start is tried. A misfit is the sum of two mean squares, each of which is at most 1
by noise alone. The limit is twice that sum."""


@dataclass(frozen=True)
class StepErrors:
    """The errors and features of each visible local step at the last layer, for one sample.

    The error of a step is the derivative of the loss by the K logits, and the features are the
    layer's n inputs. T is the number of visible steps.

    Attributes:
        errors: (T, K) errors e_t of the first T steps.
        features: (T, n) features h_t ≥ 0.
        deviations: (T, n) standard deviations of the features.
        misfit: mean squared residual of the update, in units of noise, plus that of the errors
            against those that the features give by the softmax.
    """

    errors: Tensor
    features: Tensor
    deviations: Tensor
    misfit: float


def separate_steps(
    observed: Tensor,
    weight: Tensor,
    bias: Tensor,
    target: Tensor,
    learning_rate: float,
    steps: int,
    noise: float,
    budget: Budget = UNLIMITED,
) -> StepErrors:
    """Return the errors and features of the local steps behind an update of the last layer.

    The error of a step is the derivative of the loss by the K logits, and the features are the
    layer's n inputs. All steps are on one sample.

    Args:
        observed: (K, n + 1) −[ΔW, Δb] / η, in double precision, for the change of weight and bias.
        weight: (K, n) W_0, the layer's weight before training.
        bias: (K,) b_0, the layer's bias before training.
        target: (K,) probabilities y of the classes.
        learning_rate: η.
        steps: number T of steps, ≥ 2.
        noise: standard deviation σ of every entry of the observation, > 0.
        budget: the CPU time of the search; once it is spent, the best mixture so far is judged.

    Raises:
        ValueError: there are as many steps as classes or more, the weight did not move, the bias
            does not give the scale, noise hides the steps, or no steps explain the update.
    """
    if not 2 <= steps < len(observed):
        raise ValueError(f"{steps} steps can not be told apart by {len(observed)} classes.")
    live = (observed[:, :-1] != 0).any(0)
    if not bool(live.any()):
        raise ValueError("the last layer's weight did not move.")
    told = observed[:, torch.cat([live, live.new_ones(1)])]
    # This is about the largest singular value of noise alone (Davidson, Szarek 2001). Only singular
    # values above it count as signal.
    most = noise * (len(told) ** 0.5 + told.shape[1] ** 0.5)
    rank = int((torch.linalg.svdvals(told) > most).sum())
    best: _Mixture | None = None
    for count in sorted({min(max(rank, 1), steps), steps}):
        sums = _Sums.of(told[:, :-1], told[:, -1], count, noise)
        if not sums.reach > 0:
            raise ValueError("the last bias's update does not tell the scale of the features.")
        # A relative noise above 3e-4 is refused: only below do the right errors explain the sums
        # over steps far better than others do (chosen on development draws; no results are kept).
        if sums.share > 3e-4:
            raise ValueError(f"noise of {sums.share:.0e} hides the local steps at the last layer.")
        layer = _LastLayer(weight[:, live], bias, target, learning_rate, count)
        best = _better(best, _search(sums, layer, budget))
        if budget.is_spent or (best is not None and best.misfit <= SOLVED_MISFIT):
            break
    # Results with a misfit above 100 are refused. On development draws, the first step was right up
    # to this misfit, and only steps with small errors were mixed up. No results are kept.
    if best is None or not best.misfit <= 100.0:
        raise ValueError("the last layer's update is not that of local steps on one sample.")
    shape = len(best.features), len(live)
    features, deviations = (observed.new_zeros(shape) for _ in range(2))
    try:
        features[:, live], deviations[:, live] = best.features, best.deviations()
    except torch.linalg.LinAlgError as error:
        raise ValueError("the last layer's update leaves its local steps open.") from error
    return StepErrors((best.sums.basis @ best.mixing).T, features, deviations, best.misfit)


def _search(sums: "_Sums", layer: "_LastLayer", budget: Budget) -> "_Mixture | None":
    """Return the best mixture of the local steps, from several starts; None if none is finite.

    The search ends early once the budget is spent.

    A mixture is a guess of the steps' errors (derivatives of the loss by the logits) and features
    (inputs of the last layer). The first one that explains the observed sums over steps is taken.
    If none does, the search continues from the best mixture with two neighbouring steps exchanged.
    Their errors are nearly equal at first, so that the exchange leads to another minimum. ``layer``
    gives the errors of training on guessed features.
    """
    best: _Mixture | None = None
    for start, stages, reach in TRIES:
        begin = partial(_begin, start, sums, layer)
        best = _better(best, _attempt(sums, layer, begin, stages, budget, reach))
        if budget.is_spent or (best is not None and best.misfit <= SOLVED_MISFIT):
            return best
    if best is None:
        return None
    for step in range(1, layer.steps):
        order = list(range(layer.steps))
        order[step - 1 : step + 1] = step, step - 1
        begin = partial(torch.matmul, sums.basis, best.mixing[:, order])
        found = _attempt(sums, layer, begin, LATE_STAGES, budget)
        if found is not None and found.misfit < best.misfit:
            best = found
        if budget.is_spent:
            break
    return best


def _better(best: "_Mixture | None", found: "_Mixture | None") -> "_Mixture | None":
    """Return the mixture (guess of the steps' errors) of less misfit; ``best`` in a draw."""
    if best is None or (found is not None and found.misfit < best.misfit):
        return found
    return best


def _attempt(
    sums: "_Sums",
    layer: "_LastLayer",
    begin: Callable[[], Tensor],
    stages: Sequence[float],
    budget: Budget,
    reach: float = 1.0,
) -> "_Mixture | None":
    try:
        return _fit(replace(sums, reach=reach * sums.reach), layer, begin(), stages, budget)
    except torch.linalg.LinAlgError:  # the normal equations of one step may be singular
        return None


@dataclass(frozen=True)
class _Sums:
    """The sums over T local steps of ``e_t h_tᵀ`` and of e_t, in a basis of r ≤ T vectors.

    The error e_t of a step is the derivative of the loss by K logits, and h_t are the n features
    that the last layer takes. The basis holds left singular vectors of the layer's update.

    Attributes:
        basis: (K, r) left singular vectors.
        weight: (r, n) coordinates of −ΔW / η = Σ e_t h_tᵀ, for the change ΔW of the weight at the
            learning rate η.
        bias: (r,) coordinates of −Δb / η = Σ e_t, for the change Δb of the bias.
        common: (n,) the features if all steps had the same features.
        noise: standard deviation σ of an entry of the sums.
        share: σ divided by the root mean square of the sums' entries.
        reach: standard deviation that the search assumes for a feature's change from one step to
            the next.
    """

    basis: Tensor
    weight: Tensor
    bias: Tensor
    common: Tensor
    noise: float
    share: float
    reach: float

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, steps: int, noise: float) -> "_Sums":
        left, _, right = torch.linalg.svd(
            torch.cat([weight, bias[:, None]], 1), full_matrices=False
        )
        basis = left[:, :steps]
        common = (right[0, :-1] / right[0, -1]).clamp_min(0)
        share = noise / float(weight.square().mean().sqrt())
        reach = float(common.square().mean().sqrt())
        return cls(basis, basis.T @ weight, basis.T @ bias, common, noise, share, reach)


@dataclass(frozen=True)
class _LastLayer:
    """The last layer of a client that trains on one sample's given features by plain steps.

    Attributes:
        weight: (K, n) the weight before training.
        bias: (K,) the bias before training.
        target: (K,) probabilities y of the classes.
        learning_rate: η.
        steps: the number T of steps.
    """

    weight: Tensor
    bias: Tensor
    target: Tensor
    learning_rate: float
    steps: int

    def errors(self, features: Tensor) -> Tensor:
        """Return the errors e_t of all local steps, in the columns of a matrix (K, T).

        The error e_t = softmax(z_t) − y is the derivative of the loss by the logits z_t of step t,
        with the target y. The features (T, n) are the layer's inputs h_t in each step.
        """
        return self.along(features, features[None][:0])[0]

    def along(self, features: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the errors e_t (K, T) of all steps, and their derivatives (D, K, T).

        The logits are ``z_t = W_0 h_t + b_0 − η Σ_{s<t} e_s (⟨h_s, h_t⟩ + 1)``, with the layer's
        weight W_0 and bias b_0 before training and the learning rate η. The error is e_t =
        softmax(z_t) − y, with the target y. The features h_t (T, n) are the layer's inputs in each
        step, and the D directions (D, T, n) are changes of these.
        """
        logits, products = self.weight @ features.T + self.bias[:, None], features @ features.T
        moved, turned = self.weight @ directions.mT, directions @ features.T
        turned = turned + turned.mT
        errors: list[Tensor] = []
        slopes: list[Tensor] = []
        for step in range(len(features)):
            own, slope = logits[:, step], moved[:, :, step]
            for before, (error, change) in enumerate(zip(errors, slopes, strict=True)):
                scale = self.learning_rate * (products[before, step] + 1)
                own = own - scale * error
                turn = self.learning_rate * turned[:, before, step, None]
                slope = slope - scale * change - turn * error
            shares = torch.softmax(own, 0)
            slopes.append(shares * (slope - (slope @ shares)[:, None]))
            errors.append(shares - self.target)
        return torch.stack(errors, 1), torch.stack(slopes, 2)


def _begin(start: Start, sums: _Sums, layer: _LastLayer) -> Tensor:
    """Return the errors (K, T) of T local steps with which a search begins.

    An error is the derivative of the loss by a step's K logits, and its features are the last
    layer's inputs. ``start`` is one of five names. With "own units", each step has active units of
    its own. The other starts assume equal features in all steps. With "mean", each error is the
    mean of all errors. With "same features", they are the errors of training on these features.
    With "even" and "at once", the first of these errors is taken, and the rest of the sum is spread
    evenly over the other steps, or put into the second.
    """
    if start == "own units":
        return _extreme(sums, layer)
    total = sums.basis @ sums.bias
    if start == "mean":
        return (total / layer.steps)[:, None].repeat(1, layer.steps)
    same = layer.errors(sums.common.expand(layer.steps, -1))
    if start == "same features":
        return same
    later = torch.zeros_like(same[:, 1:])
    if start == "even":
        later += ((total - same[:, 0]) / max(1, layer.steps - 1))[:, None]
    else:
        later[:, :1] = (total - same[:, 0])[:, None]
    return torch.cat([same[:, :1], later], 1)


@dataclass(frozen=True)
class _Mixture:
    """A mixing matrix A of T local steps, with the features that fit best under an assumed noise.

    The errors of the steps are the derivatives of the loss by K logits, and the features are the n
    inputs of the last layer.

    Attributes:
        sums: the observed sums over steps, in a basis of r singular vectors.
        layer: the last layer, with which features give errors.
        mixing: A (r, T), such that ``basis A`` (K, T) has the steps' errors e_t as columns.
        features: (T, n) the non-negative features H that fit A best.
        inverse: (n, T, T) inverse normal matrix of each feature's column, zero for steps in which
            the feature is off.
        residual: residuals of the sums, of the errors against those that the features give, and of
            features' changes from step to step, each in units of its standard deviation.
        sigma: the assumed standard deviation of the noise.
    """

    sums: _Sums
    layer: _LastLayer
    mixing: Tensor
    features: Tensor
    inverse: Tensor
    residual: Tensor
    sigma: float

    @classmethod
    def of(
        cls, sums: _Sums, layer: _LastLayer, mixing: Tensor, sigma: float, on: Tensor | None = None
    ) -> "_Mixture":
        """Return the mixture of T local steps for a mixing matrix A (r, T), with its best features.

        A holds the errors' coordinates in the basis of r vectors of the sums over steps. ``sigma``
        is the assumed standard deviation of the noise. ``on`` (T, n) is a guess of the features
        that are not zero, or ``None``.
        """
        steps = mixing.shape[1]
        change = _changes(steps, mixing) / sums.reach
        normal = mixing.T @ mixing / sigma**2 + change.T @ change
        right = mixing.T @ sums.weight / sigma**2
        features, inverse = _non_negative(normal, right, on)
        errors = sums.basis @ mixing
        parts = (
            (sums.weight - mixing @ features) / sigma,
            (sums.bias - mixing.sum(1)) / sigma,
            (errors - layer.errors(features)) / (SOFTMAX_DEVIATION * sums.share),
            change @ features,
        )
        residual = torch.cat([part.flatten() for part in parts])
        return cls(sums, layer, mixing, features, inverse, residual, sigma)

    @property
    def cost(self) -> float:
        """The sum of squared residuals, each in units of its standard deviation.

        It measures how badly the mixture, a guess of the local steps' errors and features, explains
        the update.
        """
        return float(self.residual @ self.residual)

    @property
    def misfit(self) -> float:
        """The mean squared residual of the sums over local steps, plus that of the steps' errors.

        The sum ``Σ_t e_t h_tᵀ``, over steps t with errors e_t and features h_t, is compared with
        the observed change of the last layer. The errors are compared with those that the features
        give by the softmax. Each residual is divided by its assumed standard deviation.
        """
        entries = self.sums.weight.numel()
        start = entries + len(self.mixing)
        errors = self.residual[start : start + self.sums.basis.shape[0] * self.mixing.shape[1]]
        return float(self.residual[:entries].square().mean() + errors.square().mean())

    def slopes(self) -> Tensor:
        """Return ∂H/∂A (r, T, T, n), the derivative of the features by the mixing matrix.

        The features H (T, n), the last layer's inputs in T steps, are those that fit the mixing A
        (r, T) of the steps' errors best.
        """
        rest = self.sums.weight - self.mixing @ self.features
        own = torch.einsum("nti,kn->kitn", self.inverse, rest)
        other = torch.einsum("nts,ks,in->kitn", self.inverse, self.mixing, self.features)
        return (own - other) / self.sigma**2

    def jacobian(self) -> Tensor:
        """Return the derivative (R, r T) of all R residuals by the mixing matrix A (r, T) of T
        steps.

        A holds the steps' errors in a basis of r vectors. The residuals are those of the observed
        sums over steps, of the errors' softmax, and of the features' changes.
        """
        slopes, (rows, steps) = self.slopes(), self.mixing.shape
        eye, each = torch.eye(rows).to(slopes), torch.eye(steps).to(slopes)
        sums = torch.einsum("kq,in->kiqn", eye, self.features)
        sums = sums + torch.einsum("qt,kitn->kiqn", self.mixing, slopes)
        bias = eye[:, None].expand(rows, steps, rows)
        own = torch.einsum("ck,it->kict", self.sums.basis, each)
        moved = self.layer.along(self.features, slopes.flatten(0, 1))[1].reshape(own.shape)
        change = _changes(steps, slopes) / self.sums.reach
        parts = (
            -sums / self.sigma,
            -bias / self.sigma,
            (own - moved) / (SOFTMAX_DEVIATION * self.sums.share),
            torch.einsum("st,kitn->kisn", change, slopes),
        )
        return torch.cat([part.flatten(2).flatten(0, 1) for part in parts], 1).T

    def deviations(self) -> Tensor:
        """Return the standard deviations (T, n) of the features that the update's noise causes.

        The features are the last layer's n inputs in T local steps. Their deviations include the
        error of the mixing matrix, which holds the steps' errors. All features are taken as free to
        vary, also those that are zero.
        """
        jacobian = self.jacobian()
        normal = jacobian.T @ jacobian
        scale = normal.diagonal().sqrt()
        covariance = torch.linalg.inv(normal / scale[:, None] / scale) / scale[:, None] / scale
        change = _changes(len(self.features), normal) / self.sums.reach
        own = torch.linalg.inv(self.mixing.T @ self.mixing / self.sigma**2 + change.T @ change)
        free = replace(self, inverse=own.expand_as(self.inverse))
        slopes = free.slopes().flatten(0, 1)
        mixed = torch.einsum("atn,ab,btn->tn", slopes, covariance, slopes)
        return ((own.diagonal()[:, None] + mixed) * max(1.0, self.misfit)).sqrt()


def _fit(
    sums: _Sums, layer: _LastLayer, errors: Tensor, stages: Sequence[float], budget: Budget
) -> _Mixture | None:
    """Return the mixture of local steps after damped steps in every stage, or None if not finite.

    A mixture is a guess of the steps' errors (derivatives of the loss by the logits) and features
    (inputs of the last layer). The search begins with the errors (K, T). ``stages`` are the assumed
    noises, in units of the true one, which fall.
    """
    found: _Mixture | None = None
    for stage in stages:
        mixing = sums.basis.T @ errors if found is None else found.mixing
        found = _settled(_Mixture.of(sums, layer, mixing, stage * sums.noise), sums, layer)
        if found is None or budget.is_spent:
            break
    return found


def _settled(start: _Mixture, sums: _Sums, layer: _LastLayer) -> _Mixture | None:
    """Return the mixture of local steps after damped steps from ``start``, or None if not finite.

    A mixture is a guess of the steps' errors (derivatives of the loss by the logits) and features
    (inputs of the last layer). The noise is the one that ``start`` assumes.
    """
    here = there = start
    is_finite = True

    def ends(at: Iterate, _: int) -> bool:
        nonlocal here
        here = there if at.has_moved else here  # the mixture that the last step tried
        # A stage ends once a step lowers its cost by less than 1e-3 of it.
        return at.fall < 1e-3 * (at.value + at.fall)

    def pose(at: Iterate, _: int) -> Posed | None:
        nonlocal is_finite
        base = here
        jacobian = base.jacobian()
        normal, slope = jacobian.T @ jacobian, jacobian.T @ base.residual
        is_finite = bool(torch.isfinite(normal).all())
        if not is_finite:
            return None
        # A small addend damps directions in which no residual changes, too.
        scale = normal.diagonal() + 1e-9 * normal.diagonal().max()

        def solve(damping: float) -> tuple[Tensor, int]:
            step = torch.linalg.solve(normal + damping * scale.diag(), slope)
            return -step.reshape(at.point.shape), 0

        def cost(point: Tensor) -> float:
            nonlocal there
            there = _Mixture.of(sums, layer, point, base.sigma, base.features > 0)
            return there.cost

        return Posed(at.point, base.cost, slope.reshape(at.point.shape), solve, cost)

    follow(range(20), pose, start.mixing, ends, Damping())
    return here if is_finite else None


def _extreme(sums: _Sums, layer: _LastLayer) -> Tensor:
    """Return the errors (K, T) of T steps in order, if each step has a feature of its own.

    Such a feature is zero in all other steps. In the returned order each error follows best from
    training on the steps before it. A feature's column of the update is ``Σ_t h_t e_t`` with h_t ≥
    0. The label's entry is negative in every error. Divided by that entry, a column is a mean of
    the steps' errors, each divided by its own label's entry. It is an extreme point of all columns
    if the feature is nonzero in one step only. Successive projections find the extreme points
    (Gillis and Vavasis 2014), and the bias gives their scales. Columns below 1000 times the noise
    are left out.

    Raises:
        LinAlgError: there are fewer singular vectors than steps, or the points do not determine the
            scales.
    """
    if len(sums.weight) < layer.steps:
        raise torch.linalg.LinAlgError("there are fewer columns than steps.")
    label = -(layer.target @ sums.basis)
    sizes = label @ sums.weight
    points = sums.weight / sizes
    points[:, sizes < 1e3 * sums.noise] = 0.0
    left, chosen = points.clone(), []
    for _ in range(len(points)):
        chosen.append(int(left.square().sum(0).argmax()))
        axis = left[:, chosen[-1]]
        left = left - torch.outer(axis, axis @ left) / axis.square().sum()
    rays = points[:, chosen]
    mixing = rays * torch.linalg.solve(rays, sums.bias)
    features = torch.linalg.solve(mixing, sums.weight).clamp_min(0)
    errors = sums.basis @ mixing
    order: list[int] = []
    while len(order) < len(chosen):
        rest = [step for step in range(len(chosen)) if step not in order]
        told = torch.stack([layer.errors(features[[*order, step]])[:, -1] for step in rest], 1)
        gaps = (told - errors[:, rest]).norm(dim=0) / errors[:, rest].norm(dim=0)
        order.append(rest[int(gaps.argmin())])
    return errors[:, order]


def _changes(steps: int, like: Tensor) -> Tensor:
    """Return the matrix (T − 1, T) that maps a feature's values in T steps to their changes.

    It has the device and precision of ``like``.
    """
    eye = torch.eye(steps).to(like)
    return eye[1:] - eye[:-1]


def _non_negative(normal: Tensor, right: Tensor, on: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the solution h of ``min_{h ≥ 0} ½ hᵀ N h − rᵀ h`` for each column r, by active sets.

    A column belongs to one of n features, and its entries to T steps; N (T, T) is positive
    definite. The set of steps in which a feature is on changes in at most 20 rounds, for all
    columns at once. ``on`` (T, n) is a guess of the entries that are not zero, or ``None``.

    Returns:
        The solutions (T, n), and N⁻¹ (n, T, T) restricted to the steps in which each feature is on.
    """
    if on is None:
        on = torch.linalg.solve(normal, right) > 0
    for _ in range(20):
        live = on.T.to(right)
        both = live[:, :, None] * live[:, None, :]
        masked = normal * both + torch.diag_embed(1 - live) * normal.diagonal()
        inverse = torch.linalg.inv(masked) * both
        found = torch.einsum("nts,sn->tn", inverse, right)
        better = (on & (found > 0)) | (~on & (normal @ found < right))
        if bool((better == on).all()):
            break
        on = better
    return found, inverse
