"""Gauss–Newton with the dense Jacobian, a prior of images, and variances read from the residual."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.inversion.gauss_newton import GaussNewton
from flwr_leakage.attacks.inversion.jacobian import Jacobian
from flwr_leakage.attacks.inversion.kinks import calls_kinks, is_rough
from flwr_leakage.attacks.inversion.likelihood import Likelihood, estimate_noise
from flwr_leakage.attacks.labels.assumed import answer, assume_targets
from flwr_leakage.attacks.labels.automatic import AutomaticLabels
from flwr_leakage.attacks.labels.base import LabelInference
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.starts.base import Initialisation
from flwr_leakage.attacks.starts.grey import Grey
from flwr_leakage.records import Batch, InputSpec, Reconstruction
from flwr_leakage.spectral.cholesky import cholesky_solve
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior

ROUNDING = 10.0
"""Noise that equations have at least, in units of float32's rounding: below it, that of the matrix
of a step would outweigh the prior."""

PANEL = 512
"""Rows of that matrix that are computed together."""

OUTSIDE = 1e-4
"""Deviation of pixels from their range, in pixel values, once the gradient is met as well; before,
it is the relative distance of gradients."""

NEAR = 1e-4
"""Relative squared distance of gradients near a solution; on batches of eight of LeNet first-order
attacks end there at best."""

REMAINING = 1.0
"""What must be left of a budget after the first step, in units of what that took: with less of it
steps lead nowhere, and others have use of the time."""

REUSED = 1 / 16
"""Iterations of conjugate gradients, for each unknown, that a step may take with the matrix of an
earlier one as their preconditioner. A step that takes as many is taken as it is, and the next one
has a matrix of its own, which costs as much as 700 iterations or more."""

TOLERANCE = 1e-4
"""… and the residual that they leave, in the norm of the preconditioner. With more of it the
directions that the gradient hardly tells fill with errors, though the gradient is met."""

HALVINGS = 8
"""Trials of a step, each of half the length of the one before."""

JITTER, JITTERS = 1e-13, 12
"""Added to the diagonal of a matrix that rounding left indefinite, in units of its largest entry,
and ten times as much in each further trial; trials at most."""

SETTLED = 1e-3
"""Fall of the objective, for each unknown, below which nothing is left to gain."""

STALLED, LATELY = 0.8, 3
"""Steps end if so much of the misfit is left of what it was so many steps before."""

FITTED = 1.5
"""A start led nowhere if its steps end at a larger misfit: about 1 is noise, or rounding."""

STALL = "led nowhere"
"""How a run ends that a new start may better."""


@dataclass(frozen=True)
class DenseGaussNewton(OneByOne):
    """Maximise the posterior of images behind a smooth network's update.

    With residuals e(x) = g(x) − g* (of entries that may have been pruned, by how far they exceed
    what pruning allows), and x = μ + L s of the prior of images, each step minimises to first order

        Σ_i e_i² / v_i + ‖s‖²,    v_i = max(σ_t², κ m_t)

    for the entries i of each tensor t. m_t is the mean of e² over the entries that were kept, and σ
    the noise, or float32's rounding. While the gradient is far from met, variances are large, so
    that the prior holds what the linearisation does not tell. They fall with the residual, and at
    the end what the update leaves open is the prior's alone (Bakushinskii 1992 for the fading
    weight; σ and m as in :class:`flwr_leakage.attacks.inversion.likelihood.Likelihood`). How far
    pixels are outside of their range counts likewise. A step that does not lower its objective is
    halved.

    J is dense and in float64: N forward derivatives of the gradient, for N pixels of all samples,
    8 N P' bytes for P' entries that are not within their bounds, and N² P'/2 + N³/6 multiplications
    for the factor of a step's matrix. That factor is the preconditioner of the steps that follow,
    by conjugate gradients with two products with J each, until these take long.

    From some starts the steps end where the gradient is far from met; the next start is tried then,
    and the likeliest candidate is kept. A batch may begin where another attack ended.

    Attributes:
        steps: at most from a start, ≥ 1.
        starts: at most, ≥ 1; one that is not random is taken once.
        share: of its budget, what it takes unless it is near a solution by then, in (0, 1].
        model_error: κ in (0, 1].
        tolerance: stop once the relative squared distance of gradients is at most this, ≥ 0.
        labels: how labels are inferred where the threat model does not grant them.
        initialisation: the first candidate.
        ahead: whose answer, labels too, is the first candidate of a batch; ``None`` for a start.
        max_entries: a Jacobian with more entries is refused, those within their bounds left out.
        chunk_size: columns of J computed together.
    """

    purpose: ClassVar[str] = "dense gauss newton"

    steps: int = 60
    starts: int = 4
    share: float = 1.0
    model_error: float = 0.5
    tolerance: float = 1e-13
    labels: LabelInference = field(default_factory=AutomaticLabels)
    initialisation: Initialisation = field(default_factory=Grey)
    ahead: GaussNewton | None = None
    max_entries: int = 100_000_000
    chunk_size: int = 128

    def __post_init__(self) -> None:
        for name in ("steps", "starts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("model_error", "share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}.")

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Attack one problem in float64.

        Raises:
            ValueError: the Jacobian has more than ``max_entries`` entries, or the network has ReLUs
                or other kinks: J does not see where its gradient jumps.
        """
        began = time.process_time()
        if calls_kinks(problem):
            raise ValueError("the network must be smooth, and has ReLUs or max pooling.")
        targets = assume_targets(problem, self.labels, generator).values
        model = Jacobian(problem, targets, self.chunk_size, self.max_entries)
        posterior = _Posterior.of(problem, model, self.model_error)
        likelihood, prior = posterior.likelihood, posterior.prior
        model.require(int((likelihood.bounds == 0).sum()))  # before passes of a large network
        if is_rough(problem):
            raise ValueError("the network must be smooth, and its derivative jumps between images.")
        found: list[_Run] = []
        own = budget.part(self.share)
        before, begun = self._look_ahead(problem, generator, restart, own)
        if before is not None:
            targets = before.targets
            posterior = replace(posterior, model=replace(model, targets=targets))
        for start in self._begin(problem, generator, restart, before):
            point = torch.stack([prior.coordinates(image[None]) for image in start.double()])
            found.append(self._descend(posterior, posterior.at(point), budget, own))
            if found[-1].end != STALL:
                break
        best = min(found, key=lambda run: posterior.energy(run.here))
        distance = likelihood.distance(best.here.residual)
        if not math.isfinite(distance):
            return failure("the objective was never finite.")
        stage = best.end
        if stage == STALL:
            stage += f" from {len(found)} start" + "s" * (len(found) > 1)
        return Reconstruction(
            batch=answer(problem.spec.clamp(best.here.inputs), targets),
            objective=distance,
            stats={
                **({"stage": stage} if stage else {}),
                "begun": begun,
                "iterations": sum(run.steps for run in found),
                "matrices": sum(run.matrices for run in found),
                "starts": len(found),
                "misfit": likelihood.misfit(best.here.residual),
                "prior_mean_square": float(best.here.point.square().mean()),
                "cpu_seconds": time.process_time() - began,
                **stop_mark(found[-1].is_stopped),
            },
        )

    def _look_ahead(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> tuple[Batch | None, str]:
        """Where another attack on a batch ended, or ``None``, and where the first start is."""
        if self.ahead is None or problem.num_samples == 1:
            return None, "its own start"
        try:
            found = self.ahead.solve(problem, generator, restart, budget)
        except ValueError as refusal:
            return None, f"its own start, as the attack ahead refused: {refusal}"
        if found.batch is None:
            return None, f"its own start, as the attack ahead refused: {found.error}"
        return found.batch, "where the attack ahead ended"

    def _begin(
        self, problem: Problem, generator: torch.Generator, restart: int, before: Batch | None
    ) -> Iterator[Tensor]:
        """The starts (B, C, H, W), the end of an attack before first; each is another one."""
        last = None
        for number in range(restart * self.starts, (restart + 1) * self.starts):
            if last is None and before is not None:
                start = before.inputs
            else:
                start = self.initialisation(problem.spec, problem.num_samples, number, generator)
            if last is not None and torch.equal(start, last):
                return
            last = start
            yield start

    def _descend(
        self, posterior: "_Posterior", here: "_Point", budget: Budget, own: Budget
    ) -> "_Run":
        """Steps from one start, until nothing is left to gain, or it leads nowhere.

        Args:
            posterior: whose maximum is sought.
            here: the start.
            budget: what near a solution may be spent.
            own: … elsewhere.
        """
        began = time.process_time()
        likelihood, model = posterior.likelihood, posterior.model
        misfits: list[float] = []
        factor: Tensor | None = None
        taken = matrices = 0
        while taken < self.steps:
            misfits.append(likelihood.misfit(here.residual))
            distance = likelihood.distance(here.residual)
            if not distance > self.tolerance:
                return _Run(here, taken, matrices)
            allowed = budget if distance <= NEAR else own
            if allowed.is_spent:
                return _Run(here, taken, matrices, is_stopped=True)
            if _is_stalled(misfits):
                break
            if taken == 1 and allowed.left < REMAINING * (time.process_time() - began):
                return _Run(here, taken, matrices, "a few steps do not fit into the budget", True)
            weights = posterior.weights(here)
            before = posterior.cost(here, weights)
            if factor is None:
                rows = posterior.rows(here)
                model.require(int(rows.sum()))
                transposed = model.transposed(here.inputs, budget, rows)
                if transposed is None:
                    return _Run(here, taken, matrices, is_stopped=True)
                factor = _factor(posterior.matrix(here, weights, transposed, rows))
                matrices += 1
                del transposed
            limit = max(1, int(REUSED * model.size))
            step, iterations = posterior.step(here, weights, factor, limit)
            if iterations >= limit:
                factor = None
            for halving in range(HALVINGS):
                trial = posterior.at(here.point - 0.5**halving * step)
                fall = before - posterior.cost(trial, weights)
                if fall > 0:
                    break
            else:
                break
            here, taken = trial, taken + 1
            if fall < SETTLED * model.size and not halving:
                break
        is_done = taken == self.steps or likelihood.misfit(here.residual) <= FITTED
        return _Run(here, taken, matrices, "" if is_done else STALL)


def _is_stalled(misfits: list[float]) -> bool:
    """Whether the steps lately did not lower the misfit by much, and it is no noise."""
    lately = misfits[-1 - LATELY :]
    return len(lately) > LATELY and lately[-1] > max(FITTED, STALLED * lately[0])


def _factor(matrix: Tensor) -> Tensor:
    """The Cholesky factor of a matrix, which is overwritten."""
    jitter = JITTER * float(matrix.diagonal().max())
    for _ in range(JITTERS):
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            return factor
        matrix.diagonal().add_(jitter)
        jitter *= 10
    raise ArithmeticError("the system of a step has no Cholesky factor.")


@dataclass(frozen=True)
class _Run:
    """Where the steps from one start ended, how many they were, and why they ended.

    Attributes:
        here: the last candidate.
        steps: taken.
        matrices: computed.
        end: said of it, empty where it converged or its steps were taken.
        is_stopped: whether the budget ended it.
    """

    here: "_Point"
    steps: int
    matrices: int
    end: str = ""
    is_stopped: bool = False


@dataclass(frozen=True)
class _Point:
    """A candidate: its coordinates and inputs (B, C, H, W), and what it gets wrong.

    Attributes:
        point: s.
        inputs: x = μ + L s.
        residual: g(x) − g* (P,).
        outside: how far x is from the nearest image, in pixel values.
    """

    point: Tensor
    inputs: Tensor
    residual: Tensor
    outside: Tensor


@dataclass(frozen=True)
class _Weights:
    """1 / v of each entry (P,), and of pixels that are outside of their range."""

    entries: Tensor
    outside: float


@dataclass(frozen=True)
class _Posterior:
    """What a step minimises.

    Attributes:
        spec: of the inputs.
        model: of the gradient.
        likelihood: what is known of every entry.
        prior: of each image.
        noise: σ of each tensor (T,).
        kept: share of each tensor's entries that was not pruned (T,).
        model_error: κ.
    """

    spec: InputSpec
    model: Jacobian
    likelihood: Likelihood
    prior: ImagePrior
    noise: Tensor
    kept: Tensor
    model_error: float

    @classmethod
    def of(cls, problem: Problem, model: Jacobian, model_error: float) -> "_Posterior":
        gradients = [posed.gradient for posed in problem.rounds]
        likelihood = Likelihood.of(gradients, estimate_noise(problem))
        noise = likelihood.noise.maximum(ROUNDING * Likelihood.of(gradients, None).noise)
        prior, kept = ImagePrior.of(problem.spec), _kept_shares(likelihood)
        return cls(problem.spec, model, likelihood, prior, noise, kept, model_error)

    def at(self, point: Tensor) -> _Point:
        """The candidate of coordinates (B, C, H, W)."""
        inputs = self.prior.grey + self.prior.push(point)
        residual = self.likelihood.residual(self.model.gradient(inputs))
        return _Point(
            point, inputs, residual, (inputs - self.spec.clamp(inputs)) / self.prior.scale
        )

    def weights(self, here: _Point) -> _Weights:
        """By what the candidate gets wrong."""
        means = self.likelihood.mean_squares(here.residual) / self.kept
        variances = (self.model_error * means).maximum(self.noise.square())
        outside = max(self.likelihood.distance(here.residual), OUTSIDE**2)
        return _Weights((1 / variances)[self.likelihood.tensors], 1 / outside)

    def cost(self, here: _Point, weights: _Weights) -> float:
        """Σ e²/v + ‖s‖²."""
        excess = self.likelihood.excess(here.residual).square()
        outside = weights.outside * here.outside.square().sum()
        return float((weights.entries * excess).sum() + outside + here.point.square().sum())

    def energy(self, here: _Point) -> float:
        """−2 log posterior up to a constant, at each tensor's most likely error."""
        misfit = self.likelihood.energy(here.residual, self.model.size)
        energy = misfit + float(here.point.square().sum())
        return energy if math.isfinite(energy) else math.inf

    def rows(self, here: _Point) -> Tensor:
        """The entries (P,) that are not within their bounds."""
        return (self.likelihood.bounds == 0) | (self.likelihood.excess(here.residual) > 0)

    def step(
        self, here: _Point, weights: _Weights, factor: Tensor, limit: int
    ) -> tuple[Tensor, int]:
        """The change of coordinates by which half of the cost is least, to first order in e.

        Args:
            here: where.
            weights: 1 / v.
            factor: of the matrix here, or nearby (N, N).
            limit: most iterations.

        Returns:
            The step (B, C, H, W), which is to be subtracted, and the iterations taken.
        """
        excess = here.residual.sign() * self.likelihood.excess(here.residual)
        entries = weights.entries * self.rows(here)
        pixels = self._pixels(here, weights)
        linear = Linearization(self.model.gradient, here.inputs)
        slope = linear.pull(entries * excess) + weights.outside * here.outside / self.prior.scale
        slope = (self.prior.pull(slope) + here.point).flatten()

        def product(flat: Tensor) -> Tensor:
            change = self.prior.push(flat.reshape(here.point.shape))
            pulled = linear.pull(entries * linear.push(change)) + pixels * change
            return self.prior.pull(pulled).flatten() + flat

        step, iterations = conjugate_gradients(
            product, slope, TOLERANCE, limit, partial(cholesky_solve, factor)
        )
        return step.reshape(here.point.shape), iterations

    def matrix(self, here: _Point, weights: _Weights, transposed: Tensor, rows: Tensor) -> Tensor:
        """Half of the cost's second derivative (N, N), to first order in e.

        Args:
            here: where.
            weights: 1 / v.
            transposed: Jᵀ (N, P'), overwritten.
            rows: whose entries those are (P,), P' of them.
        """
        scaled = transposed.mul_(weights.entries[rows].sqrt())
        shape, size = here.point.shape, len(scaled)
        gram = scaled.new_empty(size, size)
        for first in range(0, size, PANEL):  # one triangle: half of the multiplications
            last = min(first + PANEL, size)
            gram[first:last, :last] = scaled[first:last] @ scaled[:last].T
            gram[:first, first:last] = gram[first:last, :first].T
        gram.diagonal().add_(self._pixels(here, weights).flatten())
        for _ in range(2):
            gram = self.prior.pull(gram.reshape(-1, *shape)).reshape(size, size).T
        gram = gram.contiguous()
        gram.diagonal().add_(1.0)
        return gram

    def _pixels(self, here: _Point, weights: _Weights) -> Tensor:
        """What pixels outside of their range add to the diagonal, of the inputs' shape."""
        each = (weights.outside / self.prior.scale.square()).expand(here.point.shape)
        return each * (here.outside != 0)


def _kept_shares(likelihood: Likelihood) -> Tensor:
    """The share of each tensor's entries (T,) that is not zero, 1 where all are."""
    kept = torch.zeros_like(likelihood.counts).index_add_(
        0, likelihood.tensors, (likelihood.observed != 0).double()
    )
    return torch.where(kept > 0, kept / likelihood.counts, 1.0)
