"""Run Gauss–Newton with a dense Jacobian and a prior of images, for smooth networks.

The variance of an equation's error is read from its residual.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.budget import Budget, Stopwatch, stop_mark
from flwr_leakage.attacks.inversion.gauss_newton import GaussNewton
from flwr_leakage.attacks.inversion.jacobian import Jacobian, calls_kinks, gram_seconds, is_rough
from flwr_leakage.attacks.inversion.likelihood import Likelihood, estimate_noise
from flwr_leakage.attacks.labels.assumed import (
    AutomaticLabels,
    LabelInference,
    answer,
    assume_targets,
)
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.solve.descent import Iterate, Posed, Shortening, descend
from flwr_leakage.attacks.solve.linearization import Linearization, Linearized
from flwr_leakage.attacks.solve.posterior import Kept, Posterior, Solver
from flwr_leakage.attacks.starts import Grey, Initialisation
from flwr_leakage.records import Batch, Reconstruction
from flwr_leakage.spectral.cholesky import cholesky, cholesky_solve, gram
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.values import require

FITTED_MISFIT = 1.5
"""Misfit, the mean squared residual in units of the noise's variance, up to which the search from a
start counts as successful. By noise alone, the mean of 200 squares or more exceeds it once in 1e5
times."""

STALL = "led nowhere"
"""The text on the end of a search that found no solution, so that another start is worth a try."""


@dataclass(frozen=True)
class DenseGaussNewton(OneByOne):
    """An attack that maximises the posterior of the images behind a smooth network's update.

    g(x) is the gradient of images x, and g* the observed one. The prior is x = μ + L s, with
    s ~ N(0, I). With residuals e(x) = g(x) − g*, each step of Gauss–Newton minimises to first order

        Σ_i e_i² / v_i + ‖s‖²,    v_i = max(σ_t², κ m_t)

    over the entries i of all tensors t. If an entry may have been pruned, its residual is its
    distance from the values that pruning allows. m_t is the mean of e² over the entries of tensor t
    that were kept, and σ_t the size of the noise or of float32's rounding. While the gradient is
    far from the observed one, variances v are large, so that the prior determines the directions
    that the linearisation leaves open. Variances fall with the residual, until the prior only
    decides about the directions that the update leaves open (Bakushinskii 1992). The distances of
    pixels from their range are residuals as well.

    The Jacobian J of the gradient is dense and in float64. It takes N forward derivatives of the
    gradient, for N input values of all samples, and 8 N P' bytes, for P' entries that pruning does
    not leave open. The Cholesky factor of a step's matrix takes N² P'/2 + N³/6 multiplications, and
    preconditions several steps.

    From some starts the steps end far from the observed gradient. Then the next start is tried, and
    the likeliest result is kept. For a batch, the first start may be the result of another attack.

    Attributes:
        steps: largest number of steps from a start, ≥ 1.
        starts: largest number of starts, ≥ 1. A start that is not random is taken once.
        share: share of the budget in (0, 1] that the attack takes. Near a solution, it may take the
            whole budget.
        model_error: the share κ in (0, 1].
        tolerance: relative squared distance of gradients at which the attack stops, ≥ 0.
        labels: the inference of labels that the threat model does not grant.
        initialisation: the images to start from.
        ahead: another attack, whose images and labels are the first start for a batch; ``None`` for
            a start by ``initialisation``.
        max_entries: largest number N P' of entries of the Jacobian. With more, the attack refuses
            the problem.
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

    def __post_init__(self) -> None:
        require(self, "be at least 1", "steps", "starts")
        require(self, "lie in (0, 1]", "model_error", "share")

    def with_share(self, share: float) -> "DenseGaussNewton":
        """Return a copy of the attack that takes at most this share of its budget of CPU seconds.

        Near a solution it may take the whole budget.

        Args:
            share: a number in (0, 1].
        """
        return replace(self, share=share)

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the likeliest samples that were found, for one problem in float64.

        Args:
            problem: the network, the observed update and the attacker's knowledge.
            generator: the random stream of this observation and restart.
            restart: number of the restart, from 0; each has other starts.
            budget: the limit of CPU time; the best images at that time are returned.

        Raises:
            BudgetExhausted: the budget does not last to find out if the network is smooth.
            ValueError: the Jacobian has more than ``max_entries`` entries, or the network has ReLUs
                or other kinks. At a kink the gradient jumps, which its Jacobian does not show.
        """
        problem = problem.held
        if calls_kinks(problem):
            raise ValueError("the network must be smooth, and has ReLUs or max pooling.")
        targets = assume_targets(problem, self.labels, generator).values
        model = Jacobian(problem, targets, self.max_entries)
        equations = _Equations.of(problem, model, self.model_error)
        likelihood, prior = equations.likelihood, equations.prior
        # The size of the Jacobian is checked before the network is called.
        model.require(int((likelihood.bounds == 0).sum()))
        if is_rough(problem, budget.part(self.share)):
            raise ValueError("the network must be smooth, and its derivative jumps between images.")
        own = budget.part(self.share)
        before, begun = self._look_ahead(problem, generator, restart, own)
        if before is not None:
            targets = before.targets
            equations = replace(equations, model=replace(model, targets=targets))
        runs: list[_Run] = []
        for start in self._begin(problem, generator, restart, before):
            point = prior.coordinates(start.double())
            runs.append(_Run(equations, self, budget, own, point))
            descend(runs[-1].pose, point, Shortening(8, 0.5))
            if runs[-1].end != STALL:
                break
        best = min(runs, key=lambda run: equations.energy(run.point, run.residual))
        distance = likelihood.distance(best.residual)
        if not math.isfinite(distance):
            return failure("the objective was never finite.")
        stage = best.end
        if stage == STALL:
            stage += f" from {len(runs)} start" + "s" * (len(runs) > 1)
        return Reconstruction(
            batch=answer(problem.spec.clamp(prior.inputs(best.point)), targets),
            objective=distance,
            stats={
                **({"stage": stage} if stage else {}),
                "begun": begun,
                "iterations": sum(run.taken for run in runs),
                "matrices": sum(run.matrices for run in runs),
                "starts": len(runs),
                "misfit": likelihood.misfit(best.residual),
                "prior_mean_square": float(best.point.square().mean()),
                **stop_mark(runs[-1].is_stopped),
            },
        )

    def _look_ahead(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> tuple[Batch | None, str]:
        """Return the batch that the attack ``ahead`` finds, and a text on the first start's source.

        The batch is ``None`` if there is no such attack, if it refuses, or for a single sample. The
        text, for the result's ``stats``, then says that the attack takes its own start, and why the
        other attack refused.
        """
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
        """Yield up to ``starts`` batches of images (B, C, H, W), at which the runs start.

        There are fewer if a start would equal the one before. Each restart has other starts. The
        first start is ``before``, the batch that another attack found, unless it is ``None``.
        """
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


@dataclass(frozen=True)
class _Equations:
    """The nonlinear least-squares equations that the images solve.

    There are P residuals of the gradient, and N distances of pixels from their valid range.

    Attributes:
        model: the gradient as a function of the images.
        likelihood: the value, noise and pruning bound of every entry of the update.
        prior: the prior of each image.
        noise: (T,) standard deviation of the noise or rounding of each of T tensors.
        kept: (T,) share of each tensor's entries that was not pruned.
        model_error: share κ of a tensor's mean squared residual that counts as variance.
    """

    model: Jacobian
    likelihood: Likelihood
    prior: ImagePrior
    noise: Tensor
    kept: Tensor
    model_error: float

    @classmethod
    def of(cls, problem: Problem, model: Jacobian, model_error: float) -> "_Equations":
        gradients = [posed.gradient for posed in problem.rounds]
        likelihood = Likelihood.of(gradients, estimate_noise(problem))
        # The noise is taken to be at least ten times the rounding of a float32 gradient. With less,
        # the rounding of a step's matrix would outweigh the prior.
        noise = likelihood.noise.maximum(10.0 * Likelihood.of(gradients, None).noise)
        kept = likelihood.sums((likelihood.observed != 0).double())
        kept = torch.where(kept > 0, kept / likelihood.counts, 1.0)
        return cls(model, likelihood, ImagePrior.of(problem.spec), noise, kept, model_error)

    def wrong(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        """Return P residuals of the gradient, followed by N distances of pixels from their range.

        The images (B, C, H, W) have N values, and their gradient is ``gradient`` (P,). The residual
        of an entry that may have been pruned is its distance from the values that pruning allows.
        """
        residual = self.likelihood.residual(gradient)
        excess = residual.sign() * self.likelihood.excess(residual)
        spec = self.model.problem.spec
        return torch.cat([excess, ((inputs - spec.clamp(inputs)) / self.prior.scale).flatten()])

    def weights(self, residual: Tensor) -> Tensor:
        """Return the inverse variances (P + N,) by which the squares of all residuals are weighted.

        The first P residuals, which are given, are the entries of the gradient minus the observed
        ones. The other N are the distances of pixels from their valid range.
        """
        means = self.likelihood.mean_squares(residual) / self.kept
        variances = (self.model_error * means).maximum(self.noise.square())
        # The standard deviation of pixels' distances from their range is the relative distance of
        # the gradients, or 1e-4 of the range of pixel values if that is larger.
        outside = max(self.likelihood.distance(residual), 1e-4**2)
        entries = self.likelihood.spread(1 / variances)
        return torch.cat([entries, entries.new_full((self.model.size,), 1 / outside)])

    def energy(self, point: Tensor, residual: Tensor) -> float:
        """Return −2 log posterior of images up to a constant; ∞ if it is not finite.

        ``point`` (B, C, H, W) are the images' coordinates under the prior, and ``residual`` (P,) is
        their gradient minus the observed one. Each tensor of the gradient has an unknown variance
        of errors, of which the most likely value is taken.
        """
        misfit = self.likelihood.energy(residual, self.model.size)
        energy = misfit + float(point.square().sum())
        return energy if math.isfinite(energy) else math.inf


@dataclass
class _Run:
    """The Gauss–Newton steps from one start, until they converge or make no progress.

    Attributes:
        equations: the gradient, the likelihood and the prior of the images.
        attack: the attack, with its settings.
        budget: the limit of CPU time near a solution.
        own: the attack's share of ``budget``, the limit as long as no solution is near.
        point: (B, C, H, W) the present coordinates of the images under the prior.
        residual: (P,) the gradient at these coordinates minus the observed one.
        taken: number of steps so far.
        matrices: number of Jacobians computed and matrices factored so far.
        end: a text on why the run ended; empty if it converged or took all its steps.
        is_stopped: whether the budget ended the run.
    """

    equations: _Equations
    attack: DenseGaussNewton
    budget: Budget
    own: Budget
    point: Tensor
    residual: Tensor = field(default_factory=lambda: torch.empty(0))
    taken: int = 0
    matrices: int = 0
    end: str = ""
    is_stopped: bool = False

    def __post_init__(self) -> None:
        self._watch, self._misfits = Stopwatch(), list[float]()
        self._longest = 0.0  # CPU seconds of the longest step so far
        self._making = 0.0  # CPU seconds that the latest step took for its matrix
        # With an earlier step's matrix as the preconditioner, a step may take one iteration of
        # conjugate gradients for every 16 unknowns. After a step that takes as many, the next one
        # has a matrix of its own, which costs as much as 700 iterations or more.
        self._limit = max(1, int(self.equations.model.size / 16))
        self._factor: Kept[Tensor] = Kept(self._limit - 1)

    def pose(self, at: Iterate) -> Posed | None:
        """Return the linear least-squares problem of the next Gauss–Newton step; ``None`` to end.

        ``at`` holds the images' coordinates after the previous step, and that step's outcome.
        """
        equations, prior, model = self.equations, self.equations.prior, self.equations.model
        inputs = prior.inputs(at.point)
        watch = Stopwatch()
        linear = Linearization(model.gradient, inputs)
        product = watch.seconds  # one iteration of conjugate gradients takes about as long
        self.point, self.residual = at.point, equations.likelihood.residual(linear.value)
        if self._is_over(at):
            return None
        wrong, weights = equations.wrong(inputs, linear.value), equations.weights(self.residual)
        bounds = torch.cat(
            [equations.likelihood.bounds, torch.ones_like(weights[len(linear.value) :])]
        )
        rows = (bounds == 0) | (wrong != 0)
        making = Stopwatch()
        factor = self._factor.get(lambda: self._matrix(inputs, weights, rows))
        self._making = making.seconds
        if factor is None:
            self.is_stopped = True
            return None

        def wrong_at(point: Tensor) -> Tensor:
            trial = prior.inputs(point)
            return equations.wrong(trial, model.gradient(trial))

        def push(direction: Tensor) -> Tensor:
            moved = linear.push(direction), (direction / prior.scale).flatten()
            return rows * torch.cat(moved)

        def pull(dual: Tensor) -> Tensor:
            pulled = linear.pull((rows * dual)[: -model.size])
            return pulled + (rows * dual)[-model.size :].reshape(inputs.shape) / prior.scale

        # Products leave out (``rows``) the residuals within their bounds and the pixels within
        # their range, as their derivative is 0.
        here = Linearized(wrong, push, pull)
        posterior = Posterior(here, prior, weights, wrong, at.point, wrong_at)
        # Conjugate gradients run until the relative residual, in the norm of the preconditioner, is
        # 1e-4. A larger one would leave errors in the directions that the gradient hardly
        # determines.
        iterations = max(1, self.budget.affordable(self._limit, product))
        precondition = partial(cholesky_solve, factor)
        return posterior.posed(Solver(iterations, 1e-4, precondition, self.budget))

    def _is_over(self, at: Iterate) -> bool:
        """Count the latest Gauss–Newton step, and return whether the run ends after it.

        ``at`` is the outcome of the step.
        """
        attack, likelihood = self.attack, self.equations.likelihood
        misfit, distance = likelihood.misfit(self.residual), likelihood.distance(self.residual)
        self._misfits.append(misfit)
        last = 0.0
        if at.steps:
            self._factor.note(at.iterations)
            self._longest = max(self._longest, self._watch.seconds)
            # The next step reuses the matrix of the latest one, unless it is due to make its own.
            last, self._watch = self._watch.seconds - self._making, Stopwatch()
            self.taken += at.has_moved
            # The run ends if a step lowers the objective by less than 1e-3 for each unknown, as
            # then little is left to gain.
            is_settled = at.fall < 1e-3 * self.equations.model.size and at.length in (0, 1)
            if is_settled or self.taken == attack.steps:
                is_done = self.taken == attack.steps or misfit <= FITTED_MISFIT
                self.end = "" if is_done else STALL
                return True
        if not distance > attack.tolerance:
            return True
        # A run counts as near a solution at a relative squared distance of at most 1e-4. On LeNet
        # with batches of eight, first-order attacks reach that at best.
        allowed = self.budget if distance <= 1e-4 else self.own
        if allowed.is_spent:
            self.is_stopped = True
        elif _is_stalled(self._misfits):
            self.end = "" if misfit <= FITTED_MISFIT else STALL
            return True
        elif at.steps and allowed.left < (self._longest if self._factor.is_due else last):
            # The run ends before a step that would not fit into the budget, as other attacks can
            # use the time.
            self.end, self.is_stopped = "another step does not fit into the budget", True
        return self.is_stopped

    def _matrix(self, inputs: Tensor, weights: Tensor, rows: Tensor) -> Tensor | None:
        """Return the Cholesky factor (N, N) of the linearised posterior's precision, or None.

        The precision is LᵀJᵀWJL + I, with the Jacobian J of the residuals at images (B, C, H, W),
        the inverse variances W (P + N,), and the prior's map L from coordinates to images. ``rows``
        (P + N,) is false for residuals within their bounds, which are left out. The result is
        ``None`` if the budget is too small.
        """
        equations, model, size = self.equations, self.equations.model, self.equations.model.size
        told, outside = rows[:-size], rows[-size:]
        model.require(int(told.sum()))
        transposed = model.transposed(inputs, self.budget, told)
        if transposed is None or not self.budget.affordable(1, gram_seconds(transposed)):
            return None
        self.matrices += 1
        matrix = gram(transposed.mul_(weights[:-size][told].sqrt()))
        scale = equations.prior.scale.square().expand(inputs.shape).flatten()
        matrix.diagonal().add_(weights[-size:] * outside / scale)
        for _ in range(2):
            matrix = equations.prior.pull(matrix.reshape(-1, *inputs.shape)).reshape(size, size).T
        matrix = matrix.contiguous()
        matrix.diagonal().add_(1.0)
        return cholesky(matrix, 0.0)[0]


def _is_stalled(misfits: list[float]) -> bool:
    """Return whether the latest misfit is at least 0.8 of the one three steps before.

    The misfits are the mean squared residuals, in units of noise, after each step so far. A latest
    misfit of at most 1.5 (``FITTED_MISFIT``), which noise explains, is never stalled.
    """
    lately = misfits[-4:]
    return len(lately) > 3 and lately[-1] > max(FITTED_MISFIT, 0.8 * lately[0])
