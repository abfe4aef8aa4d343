"""Run iteratively regularised Gauss–Newton on the gradient itself, through blurred networks.

The update is g* = g(x) + noise, where g replays local training on the images x. The prior of the
images is normal, x = μ + L s with s ~ N(0, I). Each step minimises to first order

    Σ_i (g_i(x; β) − g*_i)² / v_i + ρ ‖s‖²

(iteratively regularised Gauss–Newton, Bakushinskii 1992). The blur β is the size of the noise over
which ReLUs and max pooling are averaged (:mod:`flwr_leakage.attacks.network.blur`). The variance of
an entry is v_i (:mod:`flwr_leakage.attacks.inversion.likelihood`), and W holds 1 / v_i. The weight
ρ of the prior falls from a tenth of the largest eigenvalue of LᵀJᵀWJL, with the Jacobian J of g, to
1, its weight in the posterior. β falls with a power of ρ. So early steps keep images smooth and
follow the majority of the equations. Through the blur, units that are off have a slope, too.
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
from flwr_leakage.attacks.contrast import Contrast
from flwr_leakage.attacks.inversion.annealing import (
    Annealed,
    Annealing,
    Equations,
    RunEnd,
)
from flwr_leakage.attacks.inversion.likelihood import Groups, Likelihood, estimate_noise
from flwr_leakage.attacks.inversion.settling import Settling
from flwr_leakage.attacks.labels.assumed import (
    AutomaticLabels,
    LabelInference,
    answer,
    assume_targets,
)
from flwr_leakage.attacks.labels.counts import label_moves
from flwr_leakage.attacks.network.blur import blurring, kink_inputs, measure
from flwr_leakage.attacks.network.linear import find_last_bias
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.solve.linearization import Linearization, Linearized
from flwr_leakage.attacks.solve.posterior import POWER_ITERATIONS
from flwr_leakage.records import Batch, Reconstruction
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.values import require

DRAWS = 16
"""Number of images of the prior from which the standard deviation of the inputs of each ReLU and
max pooling is estimated, the unit of the blur. From 16 draws it has an error of 1/√32, 18 %. By
default the blur falls by more than that in two steps."""


@dataclass(frozen=True)
class GaussNewton(OneByOne):
    """An attack by Gauss–Newton, in which the prior's weight and the blur of ReLUs fall.

    The blur averages ReLUs and max pooling over noise in their inputs. The attack takes any
    network, any batch whose labels are known or inferred, several local steps, sums of clients and
    several rounds, noise, and pruning. It solves all samples jointly. There may be several runs.
    The result is the end of the run with the least energy, −2 log posterior up to a constant.

    Attributes:
        annealings: settings of the runs, at least one. Each run begins at grey images.
        spread: standard deviation of a batch's starts around grey, in units of the prior's standard
            deviation, ≥ 0. From grey itself, samples of one label would move alike.
        noise_std: σ of independent noise on every entry of the pseudo-gradient, if the attacker
            knows it; ``None`` estimates it from the last layer's gradient (see
            :func:`flwr_leakage.attacks.inversion.likelihood.estimate_noise`).
        steps: largest number of steps of a run, ≥ 1.
        products: approximate largest number of products with the Jacobian of one gradient or its
            transpose in a run, ≥ 1. A product with the Jacobian of n local steps counts n times.
            Products take most of the time.
        iterations: largest number of iterations of conjugate gradients in a step, ≥ 1.
        tolerance: relative residual of a step's linear system, in (0, 1).
        label_trials: largest number of short runs that try other labels (see
            :func:`flwr_leakage.attacks.labels.counts.label_moves`), ≥ 0. They are made if the
            labels of a batch in one plain step are inferred.
        trial_steps: largest number of steps of a short run, ≥ 1.
        solved_distance: relative squared distance of the gradients at which no further run follows.
        labels: the inference of labels that the threat model does not grant.
        settling: settings of the additional steps that follow the best runs for a single image.
            Their result is kept if it lowers the energy.
        rewriting: a source of other equations of the same images, or ``None``. If the update
            provides them, they are fitted in place of the gradient, with annealings, products and
            settling of their own.
        both: if true, the gradient is fitted as well as the other equations, and the likelier
            result is kept; an update without other equations is refused. If false, the gradient is
            fitted as well only if the fit of other equations of several local steps failed.
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
        """Return the likeliest samples at which a run of Gauss–Newton ends, for one problem.

        Args:
            problem: the network, the observed update and the attacker's knowledge, in float64.
            generator: the random stream of this observation and restart.
            restart: number of the restart, which is not used.
            budget: the limit of CPU time; the best images at that time are returned.

        Raises:
            BudgetExhausted: the budget does not last for one step.
            ValueError: labels cannot be inferred for this model or update, or ``both`` is set and
                the update is of several samples or rounds, or gives no other equations.
        """
        if self.both and (problem.num_samples != 1 or problem.earlier):
            raise ValueError("several annealings are for one image in one round.")
        problem = problem.held
        assumed = assume_targets(problem, self.labels, generator)
        noise = estimate_noise(problem) if self.noise_std is None else self.noise_std
        likelihood = Likelihood.of([posed.gradient for posed in problem.rounds], noise)
        model = _Model.of(problem, assumed.values, generator)
        start = self._start(model.shape, generator)
        products = steps = moved = 0
        if assumed.may_change and self.label_trials:
            model, moved, products, steps = self._correct_labels(model, likelihood, budget, start)
        solver, equations, known, fitted = self._choose(
            problem, model, likelihood, generator, budget.part(0.5)
        )
        if not products:  # short runs for the trials of labels already have an answer
            self._require(equations, budget)
        share = 1.0 if not self.both else 0.7
        found = solver.fit(equations, known, model, likelihood, budget.part(share), start)
        best, products, steps = found[0], products + found[1], steps + found[2]
        # If local training has several steps, the fit of the other equations failed if it leaves
        # the gradient a relative squared distance above 0.1. On 48 development draws the distance
        # was at most 0.04 after a success, and at least 0.5 in the four failures. For one step, the
        # distance would also contain the noise.
        failed = solver is not self and model.passes > 1 and not best.distance <= 0.1
        if failed:
            fitted = f"{fitted}, which led nowhere"
        if (self.both or failed) and not (self._explains(best) or budget.is_spent):
            found = self.fit(model, likelihood, model, likelihood, budget, start)
            products, steps = products + found[1], steps + found[2]
            energies = (each.grouped_energy(model, likelihood) for each in (found[0], best))
            # The budget may have ended the fit of the gradient early, far from the observed
            # gradient, so that less energy alone is not enough.
            is_nearer = self.both or found[0].distance < best.distance
            if next(energies) < next(energies) and is_nearer:
                best, fitted = found[0], "the gradient, which is the likelier fit"
        if not math.isfinite(best.distance):
            return failure("the objective was never finite.")
        return Reconstruction(
            batch=answer(problem.spec.clamp(best.inputs), model.targets),
            objective=best.distance,
            stats={
                "stage": f"{best.stage}{model.contrast.note}",
                "equations": fitted,
                "misfit": best.misfit,
                "energy": best.energy,
                "noise_std": noise,
                "prior_mean_square": best.prior_mean_square,
                "labels_changed": moved,
                "iterations": steps,
                "products": products,
                **stop_mark(best.stopped),
            },
        )

    def _require(self, equations: Equations, budget: Budget) -> None:
        """Raise ``BudgetExhausted`` unless the budget lasts for one step of five iterations.

        Steps with fewer iterations make no progress. One linearisation is timed, which takes about
        as long as an iteration. The prior's first weight takes a few products with the Jacobian.
        The trials of the step's length and the judgement of its end take as long as five more
        iterations.
        """
        if budget.left < math.inf:
            watch = Stopwatch()
            equations.linearize(equations.prior.inputs(torch.zeros(equations.shape)), 1.0)
            budget.require((POWER_ITERATIONS + 10) * watch.seconds, "one step")

    def fit(
        self,
        equations: Equations,
        known: Likelihood,
        model: Equations,
        likelihood: Likelihood,
        budget: Budget,
        start: Tensor | None = None,
    ) -> tuple[RunEnd, int, int]:
        """Fit equations by runs of Gauss–Newton, and by further steps that settle the best ones.

        No further run follows one that fits the gradient to the noise.

        Args:
            equations: the equations to fit.
            known: their observed numbers and noise.
            model: the gradient as equations, by which the result is measured.
            likelihood: the observed gradient and its noise.
            budget: the limit of CPU time.
            start: (B, C, H, W) coordinates of images under the prior, at which runs start; ``None``
                for grey.

        Returns:
            The likeliest end of a run, with its fit to the gradient; the number of products with
            Jacobians in all runs; and their number of steps.
        """
        settling, products, steps = self.settling, 0, 0
        is_single = model.shape[0] == 1 and settling.steps > 0
        ends = min(settling.candidates, len(self.annealings)) if is_single else 0
        each = max(1, int(settling.before * self.products)) if ends else self.products
        left = len(self.annealings) * each + ends * settling.products
        runs: list[RunEnd] = []
        for number, annealing in enumerate(self.annealings):
            part = budget.part(each / left)
            run = replace(self, products=each).run(equations, known, annealing, part, start)
            left, products, steps = left - each, products + run.products, steps + run.steps
            stage = f"run {number + 1} of {len(self.annealings)}, {run.stage}"
            runs.append(replace(run, stage=stage))
            if self._explains(run.judged(model, likelihood)) or budget.is_spent:
                break
        rank = partial(RunEnd.grouped_energy, model=equations, likelihood=known)
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

    def _explains(self, end: RunEnd) -> bool:
        """Return whether the images at the end of a run of Gauss–Newton fit the observed numbers.

        They do if the mean squared residual is at most 1.1 times the noise's variance, or the
        relative squared distance of the gradients at most ``solved_distance``.
        """
        return end.distance <= self.solved_distance or end.misfit <= 1.1

    def _choose(
        self,
        problem: Problem,
        model: Equations,
        likelihood: Likelihood,
        generator: torch.Generator,
        budget: Budget,
    ) -> "tuple[GaussNewton, Equations, Likelihood, str]":
        """Return the equations to fit: those of ``rewriting``, or else the gradient.

        ``model`` states the gradient as equations, and ``likelihood`` is the observed gradient with
        its noise. ``budget`` is the CPU time in which ``rewriting`` must find its equations.

        Returns:
            The attack with the settings for these equations; the equations; their observed numbers
            and noise; and a description of them.

        Raises:
            ValueError: ``both`` is set, and there are no equations but the gradient.
        """
        if self.rewriting is None:
            return self, model, likelihood, "the gradient"
        try:
            equations, known = self.rewriting(problem, likelihood, generator, budget)
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
        """Change one label after another as long as short runs of Gauss–Newton end at less energy.

        Energy is −2 log posterior up to a constant. ``model`` states the gradient as equations,
        under the inferred labels. ``likelihood`` is the observed gradient with its noise. Runs
        start at coordinates (B, C, H, W); ``None`` for grey.

        Returns:
            The equations under the best labels; the number of changes that were kept; and the
            numbers of products with Jacobians and of steps that the short runs took.
        """
        problem = model.problem
        if problem.num_samples == 1 or not problem.is_single_gradient:
            return model, 0, 0, 0
        bias = find_last_bias(problem)
        if bias is None:
            return model, 0, 0, 0
        short = replace(self, steps=self.trial_steps)
        # Short runs end far from convergence. Their residuals must count as errors of the model, so
        # that their energies can be compared.
        annealing = replace(self.annealings[0], model_error=1.0)
        best = short.run(model, likelihood, annealing, budget, start)
        products, steps, moved, trials = best.products, best.steps, 0, 0
        tried = {tuple(model.targets.tolist())}
        while not budget.is_spent:
            batch = Batch(best.inputs, model.targets)
            gradient = problem.gradient_map(problem.params, batch, problem.buffers)
            residual = (gradient[bias] - problem.gradient[bias]).flatten()
            # A wrong label leaves a residual in the gradient of the last bias, of up to one
            # sample's share of the mean. If the residual is below 0.03 of this share, no label is
            # changed.
            if float(residual.abs().max()) * problem.num_samples < 0.03:
                break
            # Up to three changes of a label are tried before the best is taken, as the residuals of
            # several classes may be nearly equal.
            moves = label_moves(model.targets, residual, 3 + len(tried))
            moves = [targets for targets in moves if tuple(targets.tolist()) not in tried]
            rivals = []
            for targets in moves[: min(3, self.label_trials - trials)]:
                tried.add(tuple(targets.tolist()))
                trials += 1
                other = replace(model, targets=targets)
                found = short.run(other, likelihood, annealing, budget, start)
                products, steps = products + found.products, steps + found.steps
                rivals.append((found.energy, other, found))
            # A changed label is kept only if it lowers the energy at the end of a short run by 0.01
            # for each entry of the update.
            least = best.energy - 0.01 * len(likelihood.observed)
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
    ) -> RunEnd:
        """Return the images at which one run of Gauss–Newton ends, with their fit to the equations.

        Args:
            model: the equations to fit.
            likelihood: their observed numbers and noise.
            annealing: the settings by which blur and the prior's weight fall.
            budget: the limit of CPU time.
            start: (B, C, H, W) coordinates to start from; ``None`` for grey.
        """
        limits = (budget, self.steps, self.products, self.iterations, self.tolerance)
        start = torch.zeros(model.shape) if start is None else start
        return Annealed(model, likelihood, annealing, *limits).run(start)

    def _start(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """Return random coordinates (B, C, H, W) around grey, or ``None`` to start at grey.

        It is ``None`` for a single sample, or if ``spread`` is 0.
        """
        if shape[0] == 1 or not self.spread:
            return None
        return self.spread * torch.randn(shape, generator=generator)


class Rewriting(Protocol):
    """A source of equations of the images that an attack fits in place of the gradient.

    Attributes:
        purpose: the name of the equations, for messages.
        annealings: settings of the runs of Gauss–Newton, each of which begins at grey images.
        products: approximate largest number of products with the equations' Jacobian or its
            transpose in a run.
        settling: the additional steps that follow the best runs.
    """

    purpose: ClassVar[str]
    annealings: Sequence[Annealing]
    products: int
    settling: Settling

    def __call__(
        self,
        problem: Problem,
        likelihood: Likelihood,
        generator: torch.Generator,
        budget: Budget = UNLIMITED,
    ) -> tuple[Equations, Likelihood]:
        """Return equations that are fitted in place of the gradient, and their likelihood.

        ``likelihood`` is the value, noise and pruning bound of every entry of the update; the
        result's holds the observed numbers of the equations in the same way. ``budget`` is the CPU
        time in which the equations must be found.

        Raises:
            ValueError: the update does not determine such equations. The message completes a
                sentence after the word "as".
        """


@dataclass(frozen=True)
class _Model:
    """The pseudo-gradient of all rounds, as a function of images and of the blur.

    Attributes:
        problem: the problem in float64.
        single: the same problem in float32.
        targets: the labels of the images.
        prior: the prior of each image.
        deviations: for each ReLU and max pooling, the width of the noise in its inputs at a blur of
            1.
        contrast: the contrasts of the images that the gradient does not determine.
    """

    problem: Problem
    single: Problem
    targets: Tensor
    prior: ImagePrior
    deviations: Sequence[Tensor]
    contrast: Contrast

    @classmethod
    def of(cls, problem: Problem, targets: Tensor, generator: torch.Generator) -> "_Model":
        single, prior = problem.to(torch.float32), ImagePrior.of(problem.spec).single()
        draws = torch.randn(DRAWS, *problem.spec.shape, generator=generator)
        images = problem.spec.clamp(prior.inputs(draws))
        deviations = measure(lambda: single.logits(images))
        contrast = Contrast.of(problem)
        return cls(problem, single, targets, prior, deviations, contrast)

    @property
    def passes(self) -> int:
        """The number of gradients that a replay of local training takes, over all rounds."""
        return sum(posed.schedule.num_steps for posed in self.problem.rounds)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.problem.num_samples, *self.problem.spec.shape)

    def gauged(self, coordinates: Tensor) -> Tensor:
        """Return coordinates (B, C, H, W) of the same images with an assumed contrast.

        Contrast is a factor of the network's input. If the gradient does not depend on it, the
        largest one is assumed at which pixels are valid. Otherwise the coordinates are returned as
        they are.
        """
        return self.contrast.gauged(self.prior, coordinates)

    @property
    def groups(self) -> Groups:
        """The groups of gradient entries with errors of similar size, such as a kernel's."""
        return Groups.of(self.problem)

    def linearize(self, inputs: Tensor, blur: float) -> Linearized:
        """Return the gradient at images (B, C, H, W), and products with its Jacobian, in float32.

        ``blur`` is β, the size of the noise over which ReLUs and max pooling are averaged.
        """
        return Linearization(partial(self._parts, blur=blur), inputs)

    def kinks(self, inputs: Tensor) -> list[Tensor]:
        """Return the inputs of every function with kinks, such as ReLU, in the order of calls.

        Max pooling is one, too. The images (B, C, H, W) pass the network at the parameters before
        local training.
        """
        posed = self.single
        return kink_inputs(lambda: posed.logits(inputs.float()))

    def blurred_by(self, widths: Sequence[Tensor]) -> "_Model":
        """Return the same equations with other widths of the blur of ReLUs and max pooling.

        The blur averages these functions over noise in their inputs. For each of them there is a
        tensor of widths, the standard deviation of the noise in its inputs at a blur of 1.
        """
        return replace(self, deviations=widths)

    def gradient(self, inputs: Tensor, blur: float, precise: bool = False) -> Tensor:
        """Return the pseudo-gradient g(x; β) (P,) of all rounds, one after another.

        It is what a round's local training on the images changes the parameters by, over −η.
        x are images (B, C, H, W), and β is the size of the noise over which ReLUs and max pooling
        are averaged. If ``precise``, the result is computed in float64, else in float32.
        """
        return torch.cat(self._parts(inputs, blur, precise))

    def _parts(self, inputs: Tensor, blur: float, precise: bool = False) -> list[Tensor]:
        """Return the pseudo-gradient g(x; β) as one flat tensor for each round and parameter.

        x are images (B, C, H, W), and β is the size of the noise over which ReLUs and max pooling
        are averaged. If ``precise``, the result is computed in float64, else in float32.
        """
        dtype = torch.float64 if precise else torch.float32
        targets = self.targets.to(dtype) if self.targets.is_floating_point() else self.targets
        batch = Batch(inputs.to(dtype), targets)
        found = []
        for posed in (self.problem if precise else self.single).rounds:
            with blurring(self.deviations, blur):
                gradient = posed.replay(batch)
            found += [gradient[name].reshape(-1) for name in posed.gradient]
        return found
