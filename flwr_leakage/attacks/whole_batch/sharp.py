"""The end of a batch's solution where the equations determine the images.

Masks of units near zero are unknown to a candidate, and a wrong one moves the gradient as much as
a right one. So each unit is blurred by its own posterior standard deviation: units whose sign the
equations have settled keep their kink, doubtful ones are averages over both masks. Each step
solves the equations to first order for the whole batch, draws from the posterior that they leave,
and takes the spread of every unit over the draws as its next blur: as equations are met, it fades
by itself.

The linear systems are solved by conjugate gradients. Their preconditioner is the system
itself, dense, in single precision. Weights follow the residual of each tensor: what masks
get wrong is no noise.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.inversion.annealing import Equations
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.inversion.settling import Doubts
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.solve.descent import Iterate, Shortening, descend
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors
from flwr_leakage.spectral.cholesky import cholesky, cholesky_solve, gram
from flwr_leakage.spectral.image_prior import ImagePrior

BLOCK = 32
"""Columns of J that are computed at once."""

RIDGE = 2e-7
"""Of the preconditioner, in units of its largest entry: single precision sees no less."""

TOLERANCE = 1e-2
"""Relative, of a step's linear system."""

TIGHT = 1e-5
"""… of a draw's: its right side is mostly what the equations tell, the draw what they do not."""

MET = 1e-13
"""Relative squared distance of the equations at which nothing is left but rounding."""

CALM = 0.4
"""Blur of the second step in posterior deviations: images are smoother than the prior."""

FADING = 0.85
"""Blur of a step in these units over that of the step before: it must end, doubts or not."""


@dataclass(frozen=True)
class Sharpening:
    """How long the end is worked at.

    Attributes:
        unknowns: of a batch at most, ≥ 0: time grows with their third power. At 0 there is no
            such end.
        max_bytes: of the Jacobian in single precision, twice: memory grows with the unknowns times
            the gradient's entries.
        steps: at most, ≥ 1.
        iterations: of conjugate gradients in a step, at most, ≥ 1.
        draws: of the posterior in a step, ≥ 1.
    """

    unknowns: int = 2000
    max_bytes: int = 4 * 2**30
    steps: int = 10
    iterations: int = 60
    draws: int = 4

    def __post_init__(self) -> None:
        require(self, "be at least 0", "unknowns")
        require(self, "be at least 1", "steps", "iterations", "draws")

    def obstacle(self, model: KnownErrors) -> str:
        """Why a batch is too large, or has too few equations; empty where neither is so.

        Many of them depend on each other, where pooling narrows what they tell: twice as many as
        unknowns are asked for.
        """
        unknowns, equations = torch.Size(model.shape).numel(), model.num_equations
        if unknowns > self.unknowns:
            return f"{unknowns} unknowns, at most {self.unknowns} are asked for"
        if 2 * unknowns > equations:
            return f"{equations} equations of {unknowns} unknowns, fewer than two for each"
        if 2 * 4 * unknowns * equations > self.max_bytes:
            return f"its Jacobian takes more than {self.max_bytes} bytes"
        return ""

    def __call__(
        self, model: KnownErrors, likelihood: Likelihood, inputs: Tensor, budget: Budget
    ) -> tuple[Tensor, int]:
        """Better images (B, C, H, W) in double precision, and the steps taken.

        Args:
            model: the equations.
            likelihood: what was observed.
            inputs: where to begin.
            budget: looked at between steps, and between columns of the Jacobian.
        """
        prior = ImagePrior.of(model.problem.spec)
        groups = channels(model, likelihood)
        best, least = inputs, float("inf")

        def is_over(at: Iterate, _: Posterior | None) -> bool:
            nonlocal best, least
            here = prior.grey + prior.push(at.point)
            met = likelihood.distance(likelihood.residual(model.gradient(here, 0.0, True)))
            if met < least:
                best, least = here, met
            return least <= MET or at.steps == self.steps or budget.is_spent

        def solvers(
            blurred: Equations, blur: float, inputs: Tensor, weights: Tensor
        ) -> tuple[Solver, Solver] | None:
            assert isinstance(blurred, KnownErrors)
            matrix = _normal_matrix(blurred, blur, inputs, weights, budget)
            if matrix is None:
                return None
            matrix.diagonal().add_(1)
            factor, _ = cholesky(matrix, RIDGE * float(matrix.diagonal().max()))
            step = Solver(self.iterations, TOLERANCE, partial(cholesky_solve, factor))
            return step, replace(step, tolerance=TIGHT)

        run = Doubts(
            model,
            prior,
            likelihood,
            widths=[CALM * FADING**step for step in range(self.steps - 1)],
            variances=lambda residual: variances(likelihood, residual, groups),
            solvers=solvers,
            is_over=is_over,
            draws=self.draws,
            is_sharp=True,
        )
        start = torch.stack([prior.coordinates(image[None]) for image in inputs.double()])
        end = descend(run.pose, start, Shortening())
        return best, end.steps


def _alone(model: KnownErrors, index: int) -> KnownErrors:
    """The equations of one sample."""
    count, here = len(model.known), [index]
    *widths, spread = (
        each[here] if each.ndim and len(each) == count else each
        for each in (*model.passed.deviations, model.passed.spread)
    )
    own = {name: getattr(model, name)[here] for name in ("known", "errors", "bounds", "doubtful")}
    return replace(model, passed=replace(model.passed, deviations=widths, spread=spread), **own)


def channels(model: KnownErrors, likelihood: Likelihood) -> Tensor:
    """The number of the group of each equation (P,).

    A weight's entries are grouped by the channel that they lead to; a bias is a group, and so are
    the features of all samples. A wrong mask moves the gradients of its own channel.
    """
    found, first = [], 0
    for name in model.passed.names:
        shape = model.problem.params[name].shape
        rows = shape[0] if len(shape) > 1 else 1
        found.append(first + torch.arange(rows).repeat_interleave(shape.numel() // rows))
        first += rows
    rest = len(likelihood.observed) - sum(len(each) for each in found)
    return torch.cat([*found, torch.full((rest,), first)])


def variances(likelihood: Likelihood, residual: Tensor, groups: Tensor) -> Tensor:
    """… of each entry (P,), by the residual of its group, none much surer than the others.

    A small group can be met by itself. Its weight would grow until nothing else counts: so none
    has less than the least relative residual of the tensors with a tenth of all entries.

    Args:
        likelihood: what was observed.
        residual: of all equations (P,).
        groups: see :func:`channels`.
    """
    tensors, observed = likelihood.tensors, likelihood.observed
    sizes = torch.zeros_like(likelihood.counts).index_add_(0, tensors, observed.square())
    sizes = (sizes / likelihood.counts).clamp_min(1e-9**2 * observed.square().mean())
    relative = likelihood.mean_squares(residual) / sizes
    floor = relative[likelihood.counts >= 0.1 * likelihood.counts.sum()].min()
    counts = groups.bincount().to(residual)
    sums = torch.zeros_like(counts).index_add_(0, groups, residual.square() / sizes[tensors])
    each = (sums / counts).clamp_min(floor)[groups] * sizes[tensors]
    return torch.maximum(each, likelihood.noise.square()[tensors])


def _normal_matrix(
    model: KnownErrors, blur: float, inputs: Tensor, weights: Tensor, budget: Budget
) -> Tensor | None:
    """LᵀJᵀWJL in single precision; ``None`` where the budget ends before.

    The gradients are sums over samples, and features are of one sample each: so J is built sample
    by sample.
    """
    prior, (count, *shape) = model.prior, inputs.shape
    size, features = inputs[0].numel(), model.known.shape[1]
    shared = len(weights) - count * features
    roots = weights.sqrt().float()
    matrix = torch.empty(count * size, count * size)
    blocks: list[Tensor] = []
    for index in range(count):
        alone = _alone(model, index)
        here = Linearization(partial(alone.gradient, blur=blur), inputs[[index]].float())
        rows = torch.empty(size, shared + features)
        for part in torch.arange(size).split(BLOCK):
            if budget.is_spent:
                return None
            units = torch.zeros(len(part), size)
            units[torch.arange(len(part)), part] = 1
            rows[part] = here.columns(prior.push(units.reshape(-1, 1, *shape)))
        first = shared + index * features
        rows[:, :shared] *= roots[:shared]
        rows[:, shared:] *= roots[first : first + features]
        own = slice(index * size, (index + 1) * size)
        matrix[own, own] = gram(rows)
        blocks.append(rows[:, :shared].clone())
        for other, block in enumerate(blocks[:-1]):
            there = slice(other * size, (other + 1) * size)
            matrix[own, there] = blocks[-1] @ block.T
            matrix[there, own] = matrix[own, there].T
    return matrix
