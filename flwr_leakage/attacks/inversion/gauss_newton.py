"""Iteratively regularised Gauss–Newton on the gradient itself, through blurred networks.

The update tells g* = g(x) + noise, with g the replay of local training. With a Gaussian prior of
images, x = μ + L s and s ~ N(0, I), each step minimises to first order

    Σ_i (g_i(x; β) − g*_i)² / v_i + ρ ‖s‖²

(Bakushinskii 1992), where ReLUs and max pooling are averaged over noise of size β
(:mod:`flwr_leakage.attacks.network.blur`) and v_i is the variance of an entry
(:mod:`flwr_leakage.attacks.inversion.likelihood`). ρ falls from a tenth of the largest eigenvalue
of LᵀJᵀWJL to 1, Bayes' weight, and β with a power of it: what most equations agree on is fitted
first, in images that are smooth, and units that are off have a slope while it counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.budget import UNLIMITED, Budget, Stopwatch, stop_mark
from flwr_leakage.attacks.inversion.annealing import (
    Annealing,
    Candidate,
    Effort,
    Equations,
    anneal,
)
from flwr_leakage.attacks.inversion.label_moves import label_moves
from flwr_leakage.attacks.inversion.likelihood import (
    Likelihood,
    estimate_noise,
    kernel_groups,
)
from flwr_leakage.attacks.inversion.settling import Settling
from flwr_leakage.attacks.labels.assumed import answer, assume_targets
from flwr_leakage.attacks.labels.automatic import AutomaticLabels
from flwr_leakage.attacks.labels.base import LabelInference
from flwr_leakage.attacks.labels.last_layer import find_last_bias
from flwr_leakage.attacks.network.blur import Blurred, kink_inputs, measure
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.solve.linearization import Linearization, Linearized
from flwr_leakage.records import Batch, Reconstruction
from flwr_leakage.spectral.image_prior import ImagePrior

DRAWS = 16
"""Images of the prior that tell how far the inputs of ReLUs and pooling spread."""

FAILED = 0.1
"""Relative squared distance of several steps from which on other equations led nowhere: the
gradient is fitted, too. Of 48 development draws those that they led anywhere had 0.04 at most, the
other four 0.5 and more."""

EXPLAINED = 1.1
"""Misfit up to which noise explains what is left, so that no further run is made."""

CONTENT = 0.03
"""Labels are left as they are once the last bias's residual is below this share of a sample."""

MARGIN = 0.01
"""By so much an entry must other labels lower the energy of a short run to be taken."""

AT_ONCE = 3
"""Changes of labels that are compared before the best is taken: classes may be nearly tied."""


@dataclass(frozen=True)
class GaussNewton(OneByOne):
    """Find the samples of an update by Gauss–Newton with a prior and a blur that fade.

    It takes any network, any batch whose labels are known or inferred, several local steps, sums
    of clients and several rounds, noise, and pruning. All samples are solved jointly. Among the
    runs the attacker's own evidence decides: misfit in units of noise plus prior.

    Attributes:
        annealings: one run from grey each, ≥ 1 of them.
        spread: of a batch's samples around grey, where runs start, in units of the prior's, ≥ 0.
            From grey itself those of one label would move alike.
        noise_std: σ of independent noise on every entry of the pseudo-gradient, if the attacker
            knows it; ``None`` estimates it from the last layer's gradient (see
            :func:`flwr_leakage.attacks.inversion.likelihood.estimate_noise`).
        steps: of a run, at most, ≥ 1.
        products: with the Jacobian of one gradient, or its transpose, in a run, at most, about,
            ≥ 1; one with that of n local steps counts n times. They take most of the time.
        iterations: of conjugate gradients in a step, at most, ≥ 1.
        tolerance: relative, of a step's linear system, in (0, 1).
        label_trials: short runs under corrected labels (see
            :func:`flwr_leakage.attacks.inversion.label_moves.label_moves`), at most, ≥ 0, where
            labels of a batch in one plain step are inferred.
        trial_steps: of a short run, ≥ 1.
        solved_distance: no further run once the relative squared distance is at most this.
        labels: how labels are inferred.
        settling: the end of the best runs of one image, kept where it lowers the energy.
        rewriting: other equations that the update tells of the same images, to be fitted in the
            place of its own where they apply, with annealings, products and an end of their own.
        both: whether the gradient itself is always fitted, too, not only where other equations of
            several steps led nowhere, and the likelier end answered. Where there are no other
            equations, the update is refused.
    """

    purpose: ClassVar[str] = "gauss newton"

    annealings: Sequence[Annealing] = (Annealing(),)
    spread: float = 0.3
    noise_std: float | None = None
    steps: int = 60
    products: int = 2500
    iterations: int = 60
    tolerance: float = 0.1
    label_trials: int = 9
    trial_steps: int = 8
    solved_distance: float = 1e-10
    labels: LabelInference = field(default_factory=AutomaticLabels)
    settling: Settling = field(default_factory=partial(Settling, steps=0))
    rewriting: "Rewriting | None" = None
    both: bool = False

    def __post_init__(self) -> None:
        if not self.annealings:
            raise ValueError("annealings must hold at least one run, got none.")
        if self.both and self.rewriting is None:
            raise ValueError("both needs a rewriting, got none.")
        require(self, "be at least 0", "label_trials", "spread")
        require(self, "be at least 1", "steps", "products", "iterations", "trial_steps")
        require(self, "lie in (0, 1)", "tolerance")
        if self.noise_std is not None:
            require(self, "be at least 0", "noise_std")
        if not math.isfinite(self.spread + (self.noise_std or 0.0)):
            raise ValueError(
                f"spread and noise_std must be finite, got {self.spread} and {self.noise_std}."
            )

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Attack one problem.

        Raises:
            ValueError: labels can not be inferred for this model or update, or both fits are
                asked for and the update tells no other equations.
        """
        watch = Stopwatch()
        assumed = assume_targets(problem, self.labels, generator)
        noise = estimate_noise(problem) if self.noise_std is None else self.noise_std
        likelihood = Likelihood.of([posed.gradient for posed in problem.rounds], noise)
        model = _Model.of(problem, assumed.values, generator)
        start = self._start(model.shape, generator)
        products = steps = moved = 0
        if assumed.may_change and self.label_trials:
            model, moved, products, steps = self._correct_labels(model, likelihood, budget, start)
        solver, equations, known, fitted = self._choose(problem, model, likelihood, generator)
        share = 1.0 if not self.both else 0.7
        found = solver._fit(equations, known, model, likelihood, budget.part(share), start)
        best, products, steps = found[0], products + found[1], steps + found[2]
        # Of one step, the distance holds the noise, too.
        failed = solver is not self and model.passes > 1 and not best.distance <= FAILED
        if failed:
            fitted = f"{fitted}, which led nowhere"
        if (self.both or failed) and not (self._explains(best) or budget.is_spent):
            found = self._fit(model, likelihood, model, likelihood, budget, start)
            products, steps = products + found[1], steps + found[2]
            energies = (each.grouped_energy(model, likelihood) for each in (found[0], best))
            is_nearer = self.both or found[0].distance < best.distance  # it may be cut short
            if next(energies) < next(energies) and is_nearer:
                best, fitted = found[0], "the gradient, which is the likelier fit"
        if not math.isfinite(best.distance):
            return failure("the objective was never finite.")
        return Reconstruction(
            batch=answer(problem.spec.clamp(best.inputs), model.targets),
            objective=best.distance,
            stats={
                "stage": best.stage,
                "equations": fitted,
                "misfit": best.misfit,
                "energy": best.energy,
                "noise_std": noise,
                "prior_mean_square": best.prior_mean_square,
                "labels_changed": moved,
                "iterations": steps,
                "products": products,
                "cpu_seconds": watch.seconds,
                **stop_mark(best.stopped),
            },
        )

    def _fit(
        self,
        equations: Equations,
        known: Likelihood,
        model: Equations,
        likelihood: Likelihood,
        budget: Budget,
        start: Tensor | None,
    ) -> tuple[Candidate, int, int]:
        """The likeliest end of all annealings, judged by the gradient; products; steps.

        Args:
            equations: what is fitted.
            known: what was observed of it.
            model: the gradient.
            likelihood: what was observed of that.
            budget: of all runs and their ends.
            start: of all runs.
        """
        settling, products, steps = self.settling, 0, 0
        is_single = model.shape[0] == 1 and settling.steps > 0
        ends = min(settling.candidates, len(self.annealings)) if is_single else 0
        each = max(1, int(settling.before * self.products)) if ends else self.products
        left = len(self.annealings) * each + ends * settling.products
        runs: list[Candidate] = []
        for number, annealing in enumerate(self.annealings):
            part = budget.part(each / left)
            run = replace(self, products=each).run(equations, known, annealing, part, start)
            left, products, steps = left - each, products + run.products, steps + run.steps
            stage = f"run {number + 1} of {len(self.annealings)}, {run.stage}"
            runs.append(replace(run, stage=stage))
            if self._explains(run.judged(model, likelihood)) or budget.is_spent:
                break
        rank = partial(Candidate.grouped_energy, model=equations, likelihood=known)
        runs.sort(key=rank)
        best = runs[0]
        for run in runs[:ends]:
            if self._explains(best.judged(model, likelihood)) or budget.is_spent:
                break
            part = budget.part(settling.products / left)
            end = settling(equations, known, run, part)
            left -= settling.products
            products, steps = products + end.products, steps + end.steps
            best = min(best, end, key=rank)
        return best.judged(model, likelihood), products, steps

    def _explains(self, candidate: Candidate) -> bool:
        """Whether nothing but noise is left."""
        return candidate.distance <= self.solved_distance or candidate.misfit <= EXPLAINED

    def _choose(
        self,
        problem: Problem,
        model: Equations,
        likelihood: Likelihood,
        generator: torch.Generator,
    ) -> "tuple[GaussNewton, Equations, Likelihood, str]":
        """By which settings which equations are fitted, and why, in words."""
        if self.rewriting is None:
            return self, model, likelihood, "the gradient"
        try:
            equations, known = self.rewriting(problem, likelihood, generator)
        except ValueError as refusal:
            if self.both:
                raise ValueError(
                    f"there is the gradient alone to be fitted, as {refusal}"
                ) from None
            return self, model, likelihood, f"the gradient, as {refusal}"
        solver = replace(
            self,
            annealings=self.rewriting.annealings,
            products=self.rewriting.products,
            settling=self.rewriting.settling,
        )
        return solver, equations, known, self.rewriting.purpose

    def _correct_labels(
        self, model: "_Model", likelihood: Likelihood, budget: Budget, start: Tensor | None
    ) -> "tuple[_Model, int, int, int]":
        """The model under better labels, how many changed, and products and steps spent on it."""
        problem = model.problem
        if problem.num_samples == 1 or not problem.is_single_gradient:
            return model, 0, 0, 0
        bias = find_last_bias(problem)
        if bias is None:
            return model, 0, 0, 0
        short = replace(self, steps=self.trial_steps)
        # The energy compares short runs only if what they have not fitted yet counts as error.
        annealing = replace(self.annealings[0], model_error=1.0)
        best = short.run(model, likelihood, annealing, budget, start)
        products, steps, moved, trials = best.products, best.steps, 0, 0
        tried = {tuple(model.targets.tolist())}
        while not budget.is_spent:
            batch = Batch(best.inputs, model.targets)
            gradient = problem.gradient_map(problem.params, batch, problem.buffers)
            residual = (gradient[bias] - problem.gradient[bias]).flatten()
            if float(residual.abs().max()) * problem.num_samples < CONTENT:
                break
            moves = label_moves(model.targets, residual, AT_ONCE + len(tried))
            moves = [targets for targets in moves if tuple(targets.tolist()) not in tried]
            rivals = []
            for targets in moves[: min(AT_ONCE, self.label_trials - trials)]:
                tried.add(tuple(targets.tolist()))
                trials += 1
                other = replace(model, targets=targets)
                found = short.run(other, likelihood, annealing, budget, start)
                products, steps = products + found.products, steps + found.steps
                rivals.append((found.energy, other, found))
            least = best.energy - MARGIN * len(likelihood.observed)
            rivals = [rival for rival in rivals if rival[0] < least]
            if not rivals:
                break
            _, model, best = min(rivals, key=lambda rival: rival[0])
            moved += 1
        return model, moved, products, steps

    def run(
        self,
        model: Equations,
        likelihood: Likelihood,
        annealing: Annealing,
        budget: Budget = UNLIMITED,
        start: Tensor | None = None,
    ) -> Candidate:
        """From its start to the end of one annealing; see :func:`anneal`."""
        effort = Effort(self.steps, self.products, self.iterations, self.tolerance)
        return anneal(model, likelihood, annealing, effort, budget, start)

    def _start(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """Coordinates (B, C, H, W) around grey; ``None`` for one sample, which starts from it."""
        if shape[0] == 1 or not self.spread:
            return None
        return self.spread * torch.randn(shape, generator=generator)


class Rewriting(Protocol):
    """Other equations that an update tells of its images.

    Attributes:
        purpose: what they are, in words.
        annealings: one run from grey each.
        products: as of :class:`GaussNewton`.
        settling: likewise.
    """

    purpose: ClassVar[str]
    annealings: Sequence[Annealing]
    products: int
    settling: Settling

    def __call__(
        self, problem: Problem, likelihood: Likelihood, generator: torch.Generator
    ) -> tuple[Equations, Likelihood]:
        """The equations, and what was observed of them.

        Args:
            problem: in double precision.
            likelihood: what is known of every entry of the update.
            generator: of probes.

        Raises:
            ValueError: why the update does not tell them, to follow "as".
        """


@dataclass(frozen=True)
class _Model:
    """The candidate's gradient as a function of its inputs and the blur, in both precisions."""

    problem: Problem
    single: Problem
    targets: Tensor
    prior: ImagePrior
    deviations: Sequence[Tensor]

    @classmethod
    def of(cls, problem: Problem, targets: Tensor, generator: torch.Generator) -> "_Model":
        single, prior = problem.to(torch.float32), ImagePrior.of(problem.spec).single()
        draws = torch.randn(DRAWS, *problem.spec.shape, generator=generator)
        images = problem.spec.clamp(prior.grey + prior.push(draws))
        deviations = measure(
            lambda: single.gradient_map.logits(single.params, images, single.buffers)
        )
        return cls(problem, single, targets, prior, deviations)

    @property
    def passes(self) -> int:
        """Gradients in one replay."""
        return sum(posed.schedule.num_steps for posed in self.problem.rounds)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.problem.num_samples, *self.problem.spec.shape)

    def inputs(self, coordinates: Tensor) -> Tensor:
        return self.prior.grey + self.prior.push(coordinates)

    @property
    def groups(self) -> Tensor:
        """Of each entry (P,)."""
        return kernel_groups(
            [value.shape for posed in self.problem.rounds for value in posed.gradient.values()]
        )

    def linearize(self, inputs: Tensor, blur: float) -> Linearized:
        """In single precision."""
        return Linearization(partial(self.gradient, blur=blur), inputs)

    def kinks(self, inputs: Tensor) -> list[Tensor]:
        """Inputs of every ReLU and pooling, in the first gradient of a replay."""
        posed = self.single
        return kink_inputs(
            lambda: posed.gradient_map.logits(posed.params, inputs.float(), posed.buffers)
        )

    def blurred_by(self, widths: Sequence[Tensor]) -> "_Model":
        """The same replay, whose blur of 1 is a width of each of these inputs."""
        return replace(self, deviations=widths)

    def gradient(self, inputs: Tensor, blur: float, precise: bool = False) -> Tensor:
        """g(x; β) (P,), of all rounds one after another."""
        dtype = torch.float64 if precise else torch.float32
        targets = self.targets.to(dtype) if self.targets.is_floating_point() else self.targets
        batch = Batch(inputs.to(dtype), targets)
        found = []
        for posed in (self.problem if precise else self.single).rounds:
            with Blurred(self.deviations, blur):
                gradient = simulate_gradient(
                    posed.gradient_map,
                    posed.params,
                    posed.buffers,
                    posed.schedule,
                    batch,
                    posed.members,
                )
            found += [gradient[name].reshape(-1) for name in posed.gradient]
        return torch.cat(found)
