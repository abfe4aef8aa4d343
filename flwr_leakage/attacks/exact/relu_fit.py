"""The fit of an input through ReLUs: successive candidates, each of which may prove masks.

The walk through the layers ends at a weight gradient with too few equations, or at a mask that is
not proven. From there on the fit seeks an input that meets the equations found so far
(:mod:`flwr_leakage.attacks.exact.mask_equations`). These are continuous in x, while the gradient
itself jumps at every flip of a ReLU.

Gauss–Newton would get stuck in the nearest local minimum. So it starts with a prior of images and
with blurred ReLUs, which fade together (:mod:`flwr_leakage.attacks.exact.fading`). Each fading ends
at a candidate, which helps to prove further masks. Their equations bring the next candidate nearer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.exact.fading import FadingSolver, fade
from flwr_leakage.attacks.exact.fading_prior import FadingPrior
from flwr_leakage.attacks.exact.fading_stages import Outcome, Stage, first_stage, next_stage
from flwr_leakage.attacks.exact.hidden import Hidden
from flwr_leakage.attacks.exact.mask_equations import MaskEquations
from flwr_leakage.attacks.solve.damped import DampedGaussNewton, LeastSquares
from flwr_leakage.attacks.solve.linearization import Products
from flwr_leakage.spectral.image_prior import ImagePrior


@dataclass(frozen=True)
class FittedInput:
    """An input at which a fit ended.

    Attributes:
        stage: the stage of the attack that found it.
        inputs: (1, *shape) input.
    """

    stage: str
    inputs: Tensor


@dataclass(frozen=True)
class ReluFit:
    """The result of a fit.

    Attributes:
        candidates: the candidate that meets the last equations best. If no mask is proven, these
            equations do not hold exactly. Then all candidates are returned, and the caller chooses
            by the gradient.
        hidden: the ReLUs, with all masks that were proven.
        stopped: whether the budget ended the fit.
    """

    candidates: list[FittedInput]
    hidden: Hidden
    stopped: bool = False


def fit_through_relus(
    hidden: Hidden,
    prior: ImagePrior,
    fading: FadingPrior,
    newton: DampedGaussNewton,
    budget: Budget = UNLIMITED,
) -> ReluFit:
    """Return the fit of the input to the equations of ReLUs and of the layer behind them.

    Fadings follow one another until a candidate meets the equations. It is then refined, first
    with a prior fitted to it, then by Gauss–Newton without a prior. The best candidate has the
    least ‖r‖² in the last equations, which are continuous where the gradient is not.

    Args:
        hidden: the ReLUs with the masks that are proven so far.
        prior: the prior of the inputs.
        fading: the settings of the fadings.
        newton: the settings of Gauss–Newton, which is left out for inputs of more than
            ``newton.most_unknowns`` entries.
        budget: the fit ends with the step in which this is spent.
    """
    solver = FadingSolver.of(prior, fading.solver)
    stage, met = first_stage(hidden.is_settled), False
    candidates: list[FittedInput] = []
    for _ in range(fading.rounds):
        start = prior.grey
        if candidates and stage is not Stage.DEEP_FROM_GREY:
            start = best_of(candidates, hidden.equations).inputs
        inputs, value = fade(hidden.equations, start, fading.of(stage), solver, budget)
        candidates.append(FittedInput(stage.value, inputs))
        met = value <= fading.near
        if stage.is_deep and met:
            stage = Stage.MET
            break
        if budget.is_spent:
            break
        refined = hidden.refine(inputs)
        has_proven = refined.num_proven > hidden.num_proven
        hidden = refined
        outcome = Outcome(met, has_proven, hidden.is_settled, hidden.is_doubtful)
        stage = next_stage(stage, outcome)
        if stage.is_end:
            break
    if stage is Stage.DOUBTFUL:
        return ReluFit(candidates, hidden)
    if stage is Stage.MET and not budget.is_spent:
        candidates.append(_refit(hidden.equations, candidates[-1].inputs, fading, prior, budget))
    if budget.is_spent:
        return ReluFit(candidates, hidden, stopped=True)
    if met and hidden.num_proven and prior.grey.numel() <= newton.most_unknowns:
        exact, hidden = _solve_exactly(hidden, candidates[-1].inputs, newton, budget)
        candidates += exact
    stopped = budget.is_spent
    return ReluFit([best_of(candidates, hidden.equations)], hidden, stopped)


def best_of(candidates: Sequence[FittedInput], equations: MaskEquations) -> FittedInput:
    """Return the candidate that meets equations best."""
    return min(candidates, key=lambda each: equations.sum_of_squares(each.inputs))


def _refit(
    equations: MaskEquations,
    inputs: Tensor,
    fading: FadingPrior,
    prior: ImagePrior,
    budget: Budget,
) -> FittedInput:
    """Return the end of a fading from a candidate, with a prior of the candidate's spectrum."""
    solver = FadingSolver.of(prior.fitted(inputs), fading.solver)
    inputs, _ = fade(equations, inputs, fading.fitted(), solver, budget)
    return FittedInput("fitted prior", inputs)


def _solve_exactly(
    hidden: Hidden, start: Tensor, newton: DampedGaussNewton, budget: Budget
) -> tuple[list[FittedInput], Hidden]:
    """Return the iterates of Gauss–Newton without a prior, and the ReLUs.

    Every step first tries to prove more masks.
    """

    def problem_at(inputs: Tensor) -> LeastSquares | None:
        nonlocal hidden
        if budget.is_spent:
            return None
        hidden = hidden.refine(inputs)
        return least_squares(hidden.equations, inputs)

    found = newton.iterates(problem_at, start)
    return [FittedInput("exact equations", inputs) for inputs in found], hidden


def least_squares(equations: MaskEquations, inputs: Tensor) -> LeastSquares:
    """Return the equations at some inputs (1, *shape), without a blur."""
    residual, system = equations.linearise(inputs)
    linear = Products(residual, system.push, system.pull_back())
    return LeastSquares(linear, equations.sum_of_squares, system.normal_matrix)
