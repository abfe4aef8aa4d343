"""End a batch's solution by steps that settle the states of its ReLUs, or that sharpen its edges.

*Sharpening.* If the equations determine the images, only the states of some ReLU units near zero
are in doubt. As the slope of a ReLU jumps, a wrong state changes the gradient, however near zero
the unit is. So each unit is blurred by its own posterior standard deviation. A unit whose sign the
equations have settled keeps its kink, and a doubtful unit is averaged over both states. Each step
solves the equations to first order for the whole batch, and draws images from their posterior. The
spread of a unit over the draws is its next blur, which falls with the residual.

Conjugate gradients solve the linear systems. Their preconditioner is the dense matrix of the system
in single precision. The weight of each group of equations follows from the group's residual, as
errors of ReLU states are not noise.

*Edges.* The prior of a run, ``‖s‖²`` with images x = μ + L s, penalises differences of neighbours
by their square. Let y be the field of a colour in images of H × W pixels, and A its prior variance
at the lowest frequency. The prior is then ``Σ (y² + (H/π)² |∇y|²) / A``, up to its highest
frequencies. Natural images have few large differences and many small ones. If the equations leave
images open, the square is replaced by ``|∇y|^p`` with p < 1, which penalises the few large
differences less. As in reweighted least squares (Levin et al. 2007), each step minimises squares
with the weights ``(g + ε²)^(p/2 − 1)``, where ``g = (H/π)² |∇y|² / A`` of all colours at the start
of the step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.inversion.annealing import Equations, RunEnd, residuals
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.inversion.settling import Doubts
from flwr_leakage.attacks.solve.descent import (
    Iterate,
    Posed,
    Shortening,
    descend,
    follow,
    geometric,
)
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors
from flwr_leakage.spectral.cholesky import cholesky, cholesky_solve, gram
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.values import require

SYSTEM_ITERATIONS, POSTERIOR_DRAWS = 60, 4
"""Largest number of iterations of conjugate gradients in a step of sharpening or of edges, and
number of draws of the posterior in a step of sharpening. Both bound the cost."""

EDGE_POWER, EDGE_WEIGHT, EDGE_BLURS = 0.5, 0.5, (0.5, 0.03)
"""The power p of differences in the prior of edges; the weight of that prior against the
likelihood, whose variances follow from the residual; and the widths of the blur of ReLUs and max
poolings in the first and the last step. They were chosen on development draws; no results are
kept."""


@dataclass(frozen=True)
class Sharpening:
    """The settings of final Gauss–Newton steps for a batch whose equations determine its images.

    In these steps each ReLU is averaged over noise with the posterior standard deviation of its own
    input, until it is settled which units are on.

    Attributes:
        unknowns: largest number of unknowns of a batch, ≥ 0. Time grows with its third power. With
            0 there are no such steps.
        max_bytes: largest memory of two Jacobians in single precision, in bytes. It grows with the
            number of unknowns times the number of equations.
        steps: largest number of steps, ≥ 1.
    """

    before: ClassVar[float] = 1.0
    """The share of its limit of Jacobian products that a run of Gauss–Newton may take before
    sharpening steps."""

    unknowns: int = 2000
    max_bytes: int = 4 * 2**30
    steps: int = 10

    def __post_init__(self) -> None:
        require(self, "be at least 0", "unknowns")
        require(self, "be at least 1", "steps")

    def obstacle(self, model: KnownErrors) -> str:
        """Return why sharpening steps cannot be taken on a batch with these equations, or "".

        In these steps each ReLU is blurred by the uncertainty of its own input. The batch may be
        too large, or have too few equations. Twice as many equations as unknowns are needed for
        every batch, as behind pooling many equations depend on each other.
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
        self, model: KnownErrors, likelihood: Likelihood, run: RunEnd, met: float, budget: Budget
    ) -> tuple[Tensor, str]:
        """Return the best images (B, C, H, W) of the sharpening steps, and a text about the steps.

        The images are in double precision. They are those of ``run``, from whose end the steps
        start, if no step comes nearer to the observed values of the equations. The limit ``met`` is
        not used: these steps also follow a run that met its equations, as states of ReLUs may still
        be in doubt.
        """
        inputs = run.inputs
        prior = ImagePrior.of(model.problem.spec)
        groups = channels(model, likelihood)
        best, least = inputs, run.distance

        def is_over(at: Iterate, _: Posterior | None) -> bool:
            nonlocal best, least
            here = prior.inputs(at.point)
            found = likelihood.distance(likelihood.residual(model.gradient(here, 0.0, True)))
            if found < least:
                best, least = here, found
            # The steps end at a relative squared distance of 1e-13, as only rounding is left there.
            return least <= 1e-13 or at.steps == self.steps or budget.is_spent

        def solvers(
            blurred: Equations, blur: float, inputs: Tensor, weights: Tensor
        ) -> tuple[Solver, Solver] | None:
            assert isinstance(blurred, KnownErrors)
            matrix = _normal_matrix(blurred, blur, inputs, weights, budget)
            if matrix is None:
                return None
            matrix.diagonal().add_(1)
            # 2e-7 of the largest entry is added to the diagonal, as single precision resolves
            # nothing below.
            factor, _ = cholesky(matrix, 2e-7 * float(matrix.diagonal().max()))
            step = Solver(SYSTEM_ITERATIONS, 1e-2, partial(cholesky_solve, factor))
            # A draw needs a tight tolerance. The equations determine most of its right side, and
            # the draw itself lies in the directions that they leave open.
            return step, replace(step, tolerance=1e-5)

        doubts = Doubts(
            model,
            prior,
            likelihood,
            # Images are smoother than the prior, so that the first blur, in posterior deviations,
            # is below 1. The blur falls with each step and ends near zero, even if the states of
            # some ReLUs remain in doubt.
            widths=[0.4 * 0.85**step for step in range(self.steps - 1)],
            variances=lambda residual: variances(likelihood, residual, groups),
            solvers=solvers,
            is_over=is_over,
            draws=POSTERIOR_DRAWS,
            is_sharp=True,
        )
        start = prior.coordinates(inputs.double())
        end = descend(doubts.pose, start, Shortening())
        return best, f"sharpened in {end.steps} steps"


def _alone(model: KnownErrors, index: int) -> KnownErrors:
    """Return the equations of a batch for the sample with a given index alone.

    The gradients' equations then hold this sample's part of the sums over the batch.
    """
    count, here = len(model.errors), [index]
    *widths, spread = (
        each[here] if each.ndim and len(each) == count else each
        for each in (*model.passed.deviations, model.passed.spread)
    )
    passed = replace(model.passed, deviations=widths, spread=spread)
    known = model.known.map(lambda each: each[here])
    return replace(model, passed=passed, known=known, errors=model.errors[here])


def channels(model: KnownErrors, likelihood: Likelihood) -> Tensor:
    """Return the group number (P,) of each of a batch's P equations.

    The entries of a weight's gradient are grouped by their output channel. A bias is one group, and
    the features of all samples are one. A wrong state of a ReLU moves the gradients of its own
    channel. The likelihood holds the observed values of the equations.
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
    """Return the variance (P,) of each equation's error: the mean square residual of its group.

    The images may meet the equations of a small group alone. Its weight would then grow until no
    other equation counts. So variances have a floor: the least mean square residual, relative to
    the observed values, among the tensors with at least a tenth of all entries. No variance is
    below that of the noise. ``groups`` (P,) are the numbers of the equations' groups.
    """
    tensors, observed = likelihood.tensors, likelihood.observed
    sizes = (likelihood.sums(observed.square()) / likelihood.counts).clamp_min(
        1e-9**2 * observed.square().mean()
    )
    relative = likelihood.mean_squares(residual) / sizes
    floor = relative[likelihood.counts >= 0.1 * likelihood.counts.sum()].min()
    counts = groups.bincount().to(residual)
    sums = torch.zeros_like(counts).index_add_(0, groups, residual.square() / sizes[tensors])
    each = (sums / counts).clamp_min(floor)[groups] * sizes[tensors]
    return torch.maximum(each, likelihood.noise.square()[tensors])


def _normal_matrix(
    model: KnownErrors, blur: float, inputs: Tensor, weights: Tensor, budget: Budget
) -> Tensor | None:
    """Return LᵀJᵀWJL in single precision; ``None`` if the budget ends before.

    J is the derivative by the images (B, C, H, W) of the numbers that the equations predict, with
    ReLUs and max poolings averaged over noise of the size ``blur``. W is the diagonal matrix of the
    equations' weights (P,), and L maps coordinates under the prior to images. The matrix has a row
    for each coordinate of each image. The gradients are sums over samples, and each feature belongs
    to one sample. So J is built sample by sample.
    """
    prior, (count, *shape) = model.prior, inputs.shape
    size, features = inputs[0].numel(), model.errors.shape[1]
    shared = len(weights) - count * features
    roots = weights.sqrt().float()
    matrix = torch.empty(count * size, count * size)
    blocks: list[Tensor] = []
    for index in range(count):
        alone = _alone(model, index)
        here = Linearization(partial(alone.parts, blur=blur), inputs[[index]].float())
        rows = torch.empty(size, shared + features)
        for part in torch.arange(size).split(32):
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


@dataclass(frozen=True)
class Edges:
    """The settings of final Gauss–Newton steps, with a prior of edges, if equations are too few.

    That prior penalises large differences of neighbouring pixels less than a normal prior does. The
    images of these steps are kept if they lower :meth:`energy`, −2 log posterior.

    Attributes:
        steps: number of steps, ≥ 0; with 0 there are no such steps.
    """

    before: ClassVar[float] = 0.5
    """The share of its limit of Jacobian products that a run of Gauss–Newton may take before steps
    with a prior of edges."""

    steps: int = 14

    def __post_init__(self) -> None:
        require(self, "be at least 0", "steps")

    def obstacle(self, model: KnownErrors) -> str:
        """Return why steps with a prior of edges do not fit these equations; empty if they do.

        They fit if there are at most 1.25 equations for each unknown, so that images stay open.
        """
        if not self.steps:
            return "no step was asked for"
        unknowns, equations = torch.Size(model.shape).numel(), model.num_equations
        # On development draws (no results are kept) images became worse by these steps at 1.4
        # equations per unknown, and better at 1.0.
        if equations > 1.25 * unknowns:
            return f"{equations} equations leave {unknowns} unknowns little room"
        return ""

    def __call__(
        self, model: KnownErrors, likelihood: Likelihood, run: RunEnd, met: float, budget: Budget
    ) -> tuple[Tensor, str]:
        """Return the images (B, C, H, W) after steps with a prior of edges, and a text about them.

        The images are in double precision. They are those of ``run``, from whose end the steps
        start, if the steps do not lower :meth:`energy`, if the run ended at a relative squared
        distance of at most ``met`` from the observed values, so that it met its equations, or if
        the budget is spent.
        """
        if run.distance <= met:
            return run.inputs, "no edges, as the equations were met"
        if budget.is_spent:
            return run.inputs, "no edges, as the budget was spent"
        prior = model.prior
        start = prior.coordinates(run.inputs.float())

        def pose(at: Iterate, blur: float) -> Posed:
            residual_at = residuals(model, likelihood, blur)
            residual = residual_at(at.point)
            variances = likelihood.variances(residual, 1.0)
            unit = float((likelihood.observed.square() / variances).sum())
            here = model.linearize(model.prior.inputs(at.point), blur)
            return Posterior(
                *(here, prior, 1 / (unit * variances), residual, at.point, residual_at),
                weight=EDGE_WEIGHT / unit,
                cost=reweighted(prior, at.point, EDGE_POWER),
            ).posed(Solver(SYSTEM_ITERATIONS))

        blurs = geometric(*EDGE_BLURS, self.steps)
        end = follow(blurs, pose, start, lambda *_: budget.is_spent)
        point, taken = end.point, end.steps
        before, after = (self.energy(model, likelihood, each) for each in (start, point))
        if not after < before:
            return run.inputs, "edges were not kept"
        return model.prior.inputs(point).double(), f"edges in {taken} steps"

    def energy(self, model: KnownErrors, likelihood: Likelihood, point: Tensor) -> float:
        """Return −2 log posterior of images, up to a constant, with the prior of edges.

        ReLUs and max poolings are blurred as in the final step with this prior. The images'
        coordinates (B, C, H, W) belong to the normal prior. The likelihood holds the observed
        values of the equations and their noise.
        """
        misfit = likelihood.energy(residuals(model, likelihood, EDGE_BLURS[1])(point))
        return misfit + EDGE_WEIGHT * float(edge_energy(model.prior, point, EDGE_POWER))


def edge_energy(prior: ImagePrior, point: Tensor, power: float) -> Tensor:
    """Return the energy of images under a prior in which few large differences cost little.

    It is ``Σ y² / A + C (2/p) Σ (g + ε²)^(p/2)`` over the pixels, with p, the power, in (0, 2). The
    C fields y of the colours have the variance A at the lowest frequency under the normal prior, to
    which the coordinates (B, C, H, W) belong. g is their squared slope, in a mean over colours; see
    :func:`_steepness` for ε.
    """
    field = _field(prior, point)
    edges = _steepness(field).double() ** (power / 2)
    return field.double().square().sum() + point.shape[1] * 2 / power * edges.sum()


def reweighted(prior: ImagePrior, point: Tensor, power: float) -> Callable[[Tensor], Tensor]:
    """Return a linear map Q such that ``sᵀ Q s`` and the edge energy have one gradient at a point.

    The point and s (B, C, H, W) are coordinates of images under the normal prior. The edge energy
    and its power p are those of :func:`edge_energy`.
    """
    weights = _steepness(_field(prior, point)) ** (power / 2 - 1)

    def cost(coordinates: Tensor) -> Tensor:
        field = _field(prior, coordinates)
        height, width = field.shape[-2:]
        down, right = (weights * slope for slope in _slopes(field))
        # ``roll`` moves the last row and column to the opposite border, where they add nothing:
        # slopes are zero there.
        field = field + height / math.pi * (down.roll(1, -2) - down)
        field = field + width / math.pi * (right.roll(1, -1) - right)
        return _shares(prior) * (prior.rows @ field @ prior.columns.T)

    return cost


def _shares(prior: ImagePrior) -> Tensor:
    """Return each coordinate's standard deviation under the normal prior, as a ratio (C, H, W).

    It is divided by the standard deviation of the same colour at the lowest frequency.
    """
    return prior.deviations / prior.deviations[:, :1, :1]


def _field(prior: ImagePrior, coordinates: Tensor) -> Tensor:
    """Return the pixels (B, C, H, W) of each colour, from coordinates (B, C, H, W) under the prior.

    A colour is the mean or a difference of channels. Its pixels are divided by its standard
    deviation under the normal prior at the lowest frequency.
    """
    return prior.rows.T @ (_shares(prior) * coordinates) @ prior.columns


def _slopes(field: Tensor) -> tuple[Tensor, Tensor]:
    """Return the differences of neighbours in a field (B, C, H, W), downward and to the right.

    The first are multiplied by H/π and zero in the last row. The second are multiplied by W/π and
    zero in the last column.
    """
    height, width = field.shape[-2:]
    below = torch.cat([field[..., 1:, :], field[..., -1:, :]], -2)
    beside = torch.cat([field[..., 1:], field[..., -1:]], -1)
    return height / math.pi * (below - field), width / math.pi * (beside - field)


def _steepness(field: Tensor) -> Tensor:
    """Return ``g + ε²`` (B, 1, H, W) with the squared slope g of a field, a mean over colours.

    The field (B, C, H, W) holds the pixels of each colour, divided by its standard deviation under
    the normal prior at the lowest frequency. The prior of edges takes a power of the result below
    one. Under such a power, differences below ε = 0.05 cost about their square, and larger ones
    less. ε was chosen on development draws; no table of results is kept.
    """
    down, right = _slopes(field)
    return (down.square() + right.square()).mean(1, keepdim=True) + 0.05**2
