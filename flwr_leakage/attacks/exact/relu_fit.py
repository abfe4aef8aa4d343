"""The fit of an input through ReLUs: successive candidates, each of which may prove masks.

When the weight gradients have too few equations left, or a mask is not proven, the input is sought
that meets what was found: equations that are continuous in x, where the gradient itself jumps at
every flip of a ReLU. Gauss–Newton would get stuck in the nearest local minimum, unless it starts
with a prior of images and with blurred ReLUs that fade together
(:mod:`flwr_leakage.attacks.exact.fading`). Its candidates help to prove further masks, whose
equations (:mod:`flwr_leakage.attacks.exact.mask_equations`) bring the next candidate nearer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.attacks.exact.fading import fade
from flwr_leakage.attacks.exact.fading_prior import FadingPrior
from flwr_leakage.attacks.exact.fading_solver import FadingSolver
from flwr_leakage.attacks.exact.fading_stages import Outcome, Stage, first_stage, next_stage
from flwr_leakage.attacks.exact.hidden import Hidden
from flwr_leakage.attacks.exact.mask_equations import MaskEquations
from flwr_leakage.spectral.gauss_newton import GaussNewton, Iterate
from flwr_leakage.spectral.image_prior import ImagePrior


@dataclass(frozen=True)
class Candidate:
    """An input that may be the one sought.

    Attributes:
        stage: of the attack that found it.
        inputs: (1, *shape).
    """

    stage: str
    inputs: Tensor


@dataclass(frozen=True)
class ReluFit:
    """What a fit found.

    Attributes:
        candidates: the one that meets the last equations best; or all, for the gradient to choose
            from, if not one mask is proven and the equations do not hold exactly.
        hidden: the ReLUs, with all masks that were proven.
    """

    candidates: list[Candidate]
    hidden: Hidden


def fit_through_relus(
    hidden: Hidden, prior: ImagePrior, fading: FadingPrior, newton: GaussNewton
) -> ReluFit:
    """Fit the input to what is known of ReLUs and of the layer behind them.

    A candidate that meets the equations is the last of the fadings; it is refined with a prior
    fitted to it, and by Gauss–Newton without one. The best candidate has the least ‖r‖² in the
    last equations, which are continuous as the gradient is not.

    Args:
        hidden: the ReLUs with the masks that are proven so far.
        prior: of inputs.
        fading: the stages' settings.
        newton: settings of the last refinement, left out for inputs of more than
            ``newton.most_unknowns`` entries.
    """
    solver = FadingSolver(prior, fading.solver)
    stage, met = first_stage(hidden.is_settled), False
    candidates: list[Candidate] = []
    for _ in range(fading.rounds):
        start = prior.grey
        if candidates and stage is not Stage.DEEP_FROM_GREY:
            start = best_of(candidates, hidden.equations).inputs
        faded = fade(hidden.equations, start, fading.of(stage), solver)
        candidates.append(Candidate(stage.value, faded.inputs))
        solver, met = faded.solver, faded.value <= fading.near
        if stage.is_deep and met:
            stage = Stage.MET
            break
        refined = hidden.refine(faded.inputs)
        has_proven = refined.num_proven > hidden.num_proven
        hidden = refined
        outcome = Outcome(met, has_proven, hidden.is_settled, hidden.is_doubtful)
        stage = next_stage(stage, outcome)
        if stage.is_end:
            break
    if stage is Stage.DOUBTFUL:
        return ReluFit(candidates, hidden)
    if stage is Stage.MET:
        candidates.append(_refit(hidden.equations, candidates[-1].inputs, fading, prior))
    if met and hidden.num_proven and prior.grey.numel() <= newton.most_unknowns:
        exact, hidden = _solve_exactly(hidden, candidates[-1].inputs, newton)
        candidates += exact
    return ReluFit([best_of(candidates, hidden.equations)], hidden)


def best_of(candidates: Sequence[Candidate], equations: MaskEquations) -> Candidate:
    """The candidate that meets equations best."""
    return min(candidates, key=lambda each: equations.sum_of_squares(each.inputs))


def _refit(
    equations: MaskEquations, inputs: Tensor, fading: FadingPrior, prior: ImagePrior
) -> Candidate:
    """Fade the prior that has the spectrum of a candidate."""
    solver = FadingSolver(prior.fitted(inputs), fading.solver)
    return Candidate("fitted prior", fade(equations, inputs, fading.fitted(), solver).inputs)


def _solve_exactly(
    hidden: Hidden, start: Tensor, newton: GaussNewton
) -> tuple[list[Candidate], Hidden]:
    """Gauss–Newton without a prior; every step tries to prove more masks first."""
    found: list[Candidate] = []
    iterate = Iterate(start)
    for _ in range(newton.steps):
        hidden = hidden.refine(iterate.inputs)
        iterate = newton.step(hidden.equations, iterate)
        if iterate.has_moved:
            found.append(Candidate("exact equations", iterate.inputs))
        if iterate.is_last:
            break
    return found, hidden
