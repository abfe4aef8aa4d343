"""Fit an input through ReLUs by a series of candidates, each of which may prove masks.

A mask says which units of a ReLU are on.
:func:`~flwr_leakage.attacks.exact.feature_matching.walk_back` reads features from the last layer
on. It ends at a weight gradient with too few equations, or at a mask that is not proven. Then the
fit seeks an input x that meets the equations found so far
(:mod:`flwr_leakage.attacks.exact.mask_equations`). The equations are continuous in x, while the
gradient itself jumps if a ReLU flips. An inactive ReLU has no slope, so that Gauss–Newton from far
away ends in the nearest local minimum. To avoid this, every step minimises, to first order,

    ‖r(x)‖² + α ‖s‖²,   x = μ + L s,

where r are the residuals of the equations, μ is the mean of a normal prior of images, L a root of
its covariance, and s is standard normal under the prior (iteratively regularised Gauss–Newton,
Bakushinskii 1992). In r every ReLU is averaged over Gaussian noise, the *blur*. A *fading* is a
series of steps in which the weight α and the blur fall together. While α is large, images stay
smooth, and the fit follows the majority of the equations. Each fading ends at a candidate for x,
which helps to prove further masks. The equations of these masks bring the next candidate nearer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.exact.known import single
from flwr_leakage.attacks.exact.mask_equations import Hidden, MaskEquations
from flwr_leakage.attacks.solve.damped import LeastSquares, damped_gauss_newton
from flwr_leakage.attacks.solve.descent import Iterate, Posed, follow
from flwr_leakage.attacks.solve.posterior import Kept, Posterior, Solver
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.low_rank import LowRank


@dataclass(frozen=True)
class Fading:
    """The settings of successive Gauss–Newton steps in which the weight α of the prior falls.

    A step minimises ``‖r‖² + α ‖s‖²``, where r are the residuals of the equations, and s is
    standard normal under the prior.

    Attributes:
        first: α of the first step.
        last: the series ends before α would fall to this value or below.
        factor: ratio of α from each step to the next, in (0, 1).
        blur: standard deviation at α = 100 of the noise over which ReLUs are averaged. The noise is
            added to the inputs of the ReLUs' layers, and is proportional to the fourth root of α.
        iterations: largest number of iterations of conjugate gradients in a step.
        sharpens: whether the steps with α ≤ 10 ``last`` have no blur.
        enough: the series also ends once ‖r‖² is at most this value.
    """

    first: float
    last: float
    factor: float
    blur: float
    iterations: int
    sharpens: bool = False
    enough: float = 0.0

    @property
    def weights(self) -> list[float]:
        """The weights α of the prior in successive Gauss–Newton steps, in falling order."""
        found = [self.first]
        while found[-1] * self.factor > self.last:
            found.append(found[-1] * self.factor)
        return found

    def blur_at(self, weight: float) -> float:
        """Return the standard deviation of the noise over which ReLUs are averaged.

        The noise is added to the input of the ReLU's layer. ``weight`` is the weight α of the prior
        in the step. The result is ``blur`` · (α / 100)^¼, or 0 in the last steps of a series that
        sharpens.
        """
        if self.sharpens and weight <= 10 * self.last:
            return 0.0
        return self.blur * (weight / 100) ** 0.25


def fade(
    equations: MaskEquations,
    inputs: Tensor,
    fading: Fading,
    prior: ImagePrior,
    kept: Kept[LowRank],
    budget: Budget = UNLIMITED,
) -> tuple[Tensor, float]:
    """Return the inputs after one Gauss–Newton step at every weight of a fading, and their ‖r‖².

    A fading is a series of steps, in which the weight α of the prior and the blur of the ReLUs
    fall. A step minimises ``‖r‖² + α ‖s‖²``, where r are the residuals of the equations, and s is
    standard normal under the prior. It starts from ``inputs`` (1, C, H, W), and ends early once the
    budget is spent. The result is x (1, C, H, W), and ‖r‖² at x with the blur of the final step;
    ‖r‖² is infinite if no step was taken.

    Conjugate gradients in single precision solve a step's linear system. They first fit the
    directions that the equations or the prior favour, so that ending them early regularises. After
    a slow step, the largest eigenvalues of the next step's matrix are approximated, and stored in
    ``kept``, which may serve several fadings. These eigenvalues precondition the next steps, whose
    matrices differ little, so that they need fewer iterations.
    """
    narrow, narrow_prior = single(equations), prior.single()
    value = math.inf

    def pose(at: Iterate, weight: float) -> Posed:
        blur, here = fading.blur_at(weight), prior.inputs(at.point)

        def residual_at(point: Tensor) -> Tensor:
            return equations.residual(prior.inputs(point), blur)

        linear = narrow.linearise(here.float(), blur)
        found = kept.get(lambda: approximate(narrow, here, blur, narrow_prior))
        inverse = torch.clone if found is None else found.preconditioner(weight)
        return Posterior(
            *(linear, narrow_prior, torch.ones(1).double(), residual_at(at.point), at.point),
            residual_at,
            weight,
        ).posed(Solver(fading.iterations, precondition=inverse))

    def ends(at: Iterate, weight: float) -> bool:
        nonlocal value
        kept.note(at.iterations)
        value = at.value - weight * float(at.point.square().sum())
        return not value > fading.enough or budget.is_spent

    end = follow(fading.weights, pose, prior.coordinates(inputs), ends)
    return prior.inputs(end.point), value


def eigenvalues_kept(many: int = 100) -> Kept[LowRank]:
    """Return an empty store for the eigenvalues by which Gauss–Newton steps are preconditioned.

    The eigenvalues are computed for the step after one that took more than ``many`` iterations of
    conjugate gradients, and serve for at least 1000 iterations.
    """
    return Kept(many, 1000, is_due=False)


def approximate(
    equations: MaskEquations, inputs: Tensor, blur: float, prior: ImagePrior, rank: int = 500
) -> LowRank:
    """Return a low-rank approximation of the matrix LᵀJᵀJL, from ``rank`` of its columns.

    J is the derivative of the equations' residuals by the input at the point ``inputs`` (1, C, H,
    W), with ReLUs averaged over noise of standard deviation ``blur``. L is a root of the prior's
    covariance, so that column i belongs to coordinate i of an input under the prior. The columns of
    the ``rank`` coordinates with the largest standard deviations are computed. A column costs as
    much as an iteration of conjugate gradients. All is in single precision.
    """
    smoothest = prior.deviations.flatten().argsort(descending=True)[:rank]
    units = torch.zeros(len(smoothest), inputs.numel())
    units[torch.arange(len(units)), smoothest] = 1
    images = prior.push(units.reshape(-1, *inputs.shape[1:]))
    columns = prior.pull(normal_products(equations, inputs, images, blur))
    return LowRank.from_columns(columns.flatten(1), smoothest)


def normal_products(
    equations: MaskEquations, inputs: Tensor, directions: Tensor, blur: float = 0.0, block: int = 32
) -> Tensor:
    """Return JᵀJ d (M, C, H, W) for M directions d of the input, in single precision.

    J is the derivative of the equations' residuals by the input at the point ``inputs``
    (1, C, H, W), with ReLUs averaged over noise of standard deviation ``blur``. ``block`` is the
    number of directions whose products are computed at once.
    """
    size, width = len(directions), min(block, len(directions))
    here = equations.linearise(inputs.float(), blur, width)
    found = torch.empty_like(directions)
    for first in [*range(0, size - width, width), size - width]:
        part = slice(first, first + width)
        found[part] = here.pull(here.push(directions[part]))
    return found


MOST_UNKNOWNS = 5000
"""Largest number of entries of an input for which Gauss–Newton forms its normal matrix. The matrix
has the square of this number of entries, which take 100 MB in float32."""


class Stage(Enum):
    """The stages of a fit through ReLUs, whose values are their names in an attack's ``stats``.

    A *fading* is a series of Gauss–Newton steps in which the weight of the prior falls. It starts
    from an input and ends at a *candidate*, which may help to prove masks of ReLUs.
    """

    ROUGH = "rough fading"
    """The first series of Gauss–Newton steps with a falling weight of the prior. It starts from a
    grey image, with the masks of ReLUs that are proven without a candidate for the input."""

    MIDDLE = "fading"
    """A series of Gauss–Newton steps with a falling weight of the prior. It starts from the best
    candidate for the input, after a candidate that proved masks of ReLUs."""

    LONGER = "longer fading"
    """A series of Gauss–Newton steps with a weight of the prior that falls lower than in
    ``MIDDLE``. It starts from the best candidate for the input, after a candidate that proved no
    mask of a ReLU."""

    DEEP = "deep fading"
    """A series of Gauss–Newton steps with a weight of the prior that falls to almost 0. It starts
    from the best candidate for the input, once no more masks of ReLUs can be proven or two
    candidates in a row proved none."""

    DEEP_FROM_GREY = "deep fading from grey"
    """A series of Gauss–Newton steps like ``DEEP``, but from a grey image and with a wider blur of
    the ReLUs. It follows ``DEEP`` if that did not meet the equations, and may end at another
    input."""

    FITTED = "fitted prior"
    """A series of Gauss–Newton steps with a weight of the prior that falls to almost 0. It starts
    from a candidate for the input that meets the equations, and the prior is fitted to this
    candidate. Gauss–Newton without a prior ends the fit."""

    EXHAUSTED = "exhausted"
    """The end of a fit in which no series of Gauss–Newton steps met the equations."""

    DOUBTFUL = "doubtful"
    """The end of a fit in which no mask of a ReLU was proven, which shows that the gradient is not
    exact."""

    @property
    def is_deep(self) -> bool:
        """Return whether the stage is one of the two deep fadings, which must meet the equations.

        A fading is a series of Gauss–Newton steps in which the weight of the prior falls. A deep
        fading ends at a negligible weight, and its prior is not fitted to a candidate.
        """
        return self in (Stage.DEEP, Stage.DEEP_FROM_GREY)

    @property
    def is_last(self) -> bool:
        """Return whether no other stage of a fit through ReLUs follows this one."""
        return self in (Stage.FITTED, Stage.EXHAUSTED, Stage.DOUBTFUL)


def next_stage(
    stage: Stage,
    has_proven: bool = False,
    is_met: bool = False,
    is_settled: bool = False,
    is_doubtful: bool = False,
) -> Stage:
    """Return the stage that follows a fading of a fit through ReLUs, before the prior is fitted.

    A *fading* is a series of Gauss–Newton steps in which the weight of the prior falls. It ends at
    a candidate for the input, which may prove masks of ReLUs. A *deep* fading ends at a negligible
    weight.

    - After a candidate that proved masks, the equations have changed. The next fading starts from
      that candidate. It is deep if no more masks can be proven.
    - After two candidates in a row that proved no mask, a deep fading follows, too. But if no mask
      is proven at all, the gradient is inexact, so that its equations should not be met to the last
      digit. Then the fit ends.
    - After a deep fading whose candidate meets the equations, the prior is fitted to the candidate.

    Args:
        stage: the stage of the fading that has ended.
        has_proven: whether the fading's candidate proved further masks.
        is_met: whether the fading's candidate meets the equations.
        is_settled: whether no further mask can be proven.
        is_doubtful: whether masks were sought, and none is proven so far.
    """
    if stage.is_deep and is_met:
        return Stage.FITTED
    if has_proven:
        return Stage.DEEP if is_settled else Stage.MIDDLE
    if stage is Stage.LONGER:
        return Stage.DOUBTFUL if is_doubtful else Stage.DEEP
    if stage.is_deep:
        return Stage.DEEP_FROM_GREY if stage is Stage.DEEP else Stage.EXHAUSTED
    return Stage.LONGER


MET_EQUATIONS = 1e-3
"""Value of ‖r‖² up to which a candidate for the input meets the equations with residuals r. Each
set of equations is in units of the root mean square of its right-hand side. The fadings
:attr:`Stage.DEEP` and :attr:`Stage.DEEP_FROM_GREY` end once ‖r‖² is that small. A larger value ends
a fit farther from the solution."""


def fading_of(stage: Stage) -> Fading:
    """Return the settings of the Gauss–Newton steps of a stage, in which the prior's weight falls.

    ``DEEP``, ``DEEP_FROM_GREY`` and ``FITTED`` share their last weight, their factor and the number
    of iterations, and their last steps do not average ReLUs over noise. All values were chosen on
    development draws; no table of results is kept.
    """
    if stage is Stage.ROUGH:
        return Fading(10.0, 3e-3, 0.3, 0.8, 60)
    if stage in (Stage.MIDDLE, Stage.LONGER):
        return Fading(0.3, 1e-3 if stage is Stage.MIDDLE else 1e-4, 0.3, 0.8, 120)
    deep = Fading(1e-2, 1e-8, 0.3, 0.8, 200, sharpens=True, enough=MET_EQUATIONS)
    if stage is Stage.DEEP_FROM_GREY:
        return replace(deep, first=10.0, blur=1.5)
    return deep if stage is Stage.DEEP else replace(deep, first=1e-4, enough=1e-5)


Candidate = tuple[str, Tensor]
"""The name of a stage of a fit through ReLUs, and the input (1, *shape) at which it ended."""


def fit_through_relus(
    hidden: Hidden,
    prior: ImagePrior,
    rounds: int,
    newton_steps: int,
    budget: Budget = UNLIMITED,
) -> tuple[list[Candidate], Hidden, bool]:
    """Return inputs that fit the equations of a layer of ReLUs and of the layer behind it.

    A *fading* is a series of steps in which the weight of the prior falls; it ends at a candidate.
    Fadings, at most ``rounds`` ≥ 1, follow one another until a candidate meets the equations. The
    candidate is then refined, first by a fading with a prior fitted to it, and then by up to
    ``newton_steps`` ≥ 0 steps of Gauss–Newton without a prior. The best candidate has the least
    ‖r‖² in the latest equations. Their residuals r are continuous in the input, while the gradient
    jumps where a ReLU flips. If no mask of a ReLU is proven, the equations do not hold exactly.
    Then all candidates are returned, and the caller must choose by the gradient.

    Returns:
        The best candidate, or all if no mask is proven or the budget ended the fit; the ReLUs
        ``hidden`` with all masks that were proven; and whether the budget ended the fit.
    """
    kept = eigenvalues_kept()
    stage, is_met = Stage.DEEP_FROM_GREY if hidden.is_settled else Stage.ROUGH, False
    candidates: list[Candidate] = []
    for _ in range(rounds):
        start = prior.grey
        if candidates and stage is not Stage.DEEP_FROM_GREY:
            start = best_of(candidates, hidden.equations)[1]
        inputs, value = fade(hidden.equations, start, fading_of(stage), prior, kept, budget)
        candidates.append((stage.value, inputs))
        is_met = value <= MET_EQUATIONS
        if budget.is_spent:
            break
        proven = hidden.num_proven
        if not (is_met and stage.is_deep):
            hidden = hidden.refine(inputs)
        has_proven = hidden.num_proven > proven
        stage = next_stage(stage, has_proven, is_met, hidden.is_settled, hidden.is_doubtful)
        if stage.is_last:
            break
    if stage is Stage.DOUBTFUL:
        return candidates, hidden, False
    if stage is Stage.FITTED:
        fitted, kept = prior.fitted(inputs), eigenvalues_kept()
        inputs, _ = fade(hidden.equations, inputs, fading_of(stage), fitted, kept, budget)
        candidates.append((stage.value, inputs))
    if budget.is_spent:
        return candidates, hidden, True
    if is_met and hidden.num_proven and prior.grey.numel() <= MOST_UNKNOWNS:

        def problem_at(inputs: Tensor) -> LeastSquares | None:
            nonlocal hidden
            if budget.is_spent:
                return None
            hidden = hidden.refine(inputs)  # each candidate first serves to prove more masks
            return least_squares(hidden.equations, inputs)

        found = damped_gauss_newton(problem_at, candidates[-1][1], newton_steps)
        candidates += [("exact equations", each) for each in found]
    stopped = budget.is_spent
    return [best_of(candidates, hidden.equations)], hidden, stopped


def best_of(candidates: Sequence[Candidate], equations: MaskEquations) -> Candidate:
    """Return the candidate whose input has the least sum of squared residuals.

    A candidate is an input (1, *shape) with the name of the stage at which it was found. The
    residuals are those of ``equations``.
    """
    return min(candidates, key=lambda each: equations.sum_of_squares(each[1]))


def least_squares(equations: MaskEquations, inputs: Tensor) -> LeastSquares:
    """Return the least-squares problem of equations from masks, linearised at an input (1, *shape).

    The residuals' ReLUs are not averaged over noise.
    """
    units = torch.eye(inputs.numel()).reshape(-1, *inputs.shape[1:])
    return LeastSquares(
        equations.linearise(inputs),
        equations.sum_of_squares,
        lambda: normal_products(single(equations), inputs, units, block=128).flatten(1),
    )
