"""Read a ReLU network's features from its gradients, layer by layer, then fit the input to them.

Networks whose channels grow as their maps shrink have far more equations than unknowns in all but
the first layers. So :func:`recover_features` reaches shallow layers, those near the input, also
through BatchNorm with given statistics and skip connections. Pooling at the end of the network
hides the last mask, which says which units of the last ReLU are on. But several positions then have
the same derivative of the loss, which is enough to find the mask
(:mod:`flwr_leakage.attacks.exact.last_mask`):

- behind global average pooling, all positions share one derivative;
- behind max pooling over windows that do not overlap, flattened into the last layer, all positions
  of a window share one derivative.

Max pooling in earlier layers hides the position of each maximum in its window. If windows do not
overlap, and the convolution before has more channels than positions, its gradient gives the mask of
the maxima as at the end of the network. Otherwise the recursion ends with the pooled features, as
in the stem of a ResNet, where windows overlap.

Finally the input is fitted to the shallowest features found, by a residual that is continuous in
the input. The fit starts from grey. Its first stage fits the shallowest known layer alone, with few
convolutions before it, so that it rarely gets stuck. If the layer's equations do not, or barely,
determine its features, the equations themselves are fitted. The second stage fits all known layers,
each weighted by its noise: deeper layers have a hundred times less noise. If the fit does not meet
the features, a fit with a falling prior and blur starts from grey
(:mod:`flwr_leakage.attacks.exact.feature_fade`), and then fits to other choices of layers.

For pooled features, the fit starts from an input that a regression on synthetic images predicts
from the features, and first prefers smooth images. If the windows of the pooling overlap, the
gradient of the stem's convolution is fitted, too (:mod:`flwr_leakage.attacks.exact.pooled_stem`).
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.feature_fade import fade_features
from flwr_leakage.attacks.exact.feature_fit import (
    Fit,
    fit_features,
    read_input,
    settle_signs,
)
from flwr_leakage.attacks.exact.known import MARGIN, single
from flwr_leakage.attacks.exact.pooled_stem import fit_stem
from flwr_leakage.attacks.exact.recover_features import Features, recover_features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.labels.assumed import SignOfGradient, answer, assume_targets
from flwr_leakage.attacks.one_by_one import Applicability, ExactAttack
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.starts import Grey, Initialisation
from flwr_leakage.records import Batch, Reconstruction
from flwr_leakage.values import require

MET = 1e-8
"""Relative squared distance up to which features count as the known ones, or a gradient as the
observed one. Its root is 1e-4, ten times the relative error 1e-5 of a pass in single precision. A
larger distance of features is accepted, too, if their noise explains it."""

FITTED = 3
"""Number of ReLUs with known outputs, besides the one nearest to the input, to whose outputs the
input is fitted. More of them make each step of a fit slower. No comparison of numbers is kept."""

FADED = 2
"""Number of ReLUs with known outputs, those nearest to the input, to which the fit with a falling
blur fits. Other numbers were not tried."""

SMOOTHING, SHAKING = (0.3, 0.1, 0.03, 0.01, 0.0), 0.2
"""Weights of the total variation in successive fits of the first round to pooled features; and the
standard deviation of the noise that is added at the start of a further round, in units of the
network's normalised input. They were chosen on training images of CIFAR-10; no results are kept."""

SIGN_DRAWS = 24
"""Largest number of inputs that are drawn near the found input if its features meet the known ones,
but its gradient does not meet the observed gradient. Each draw costs one gradient. More draws find
right signs more often; no comparison of numbers is kept."""


@dataclass(frozen=True)
class FeatureRecursion(ExactAttack):
    """Read features from the last ReLU on, as far as gradients determine them, and fit the input.

    The attack takes one sample and one plain gradient of a ReLU network. The last layer must be
    linear, and the first linear layer that alone passes the image on must have a bias. The inputs
    of this layer must be features that were averaged over few positions, or pooled to maxima and
    flattened. BatchNorm must use given statistics. In train mode, the client must send its buffers,
    which tell the statistics; then features must be averaged, and a BatchNorm layer must stand
    directly behind each convolution.

    Attributes:
        iterations: largest number of iterations of the final fit, ≥ 1.
        initialisation: the start of the fit if the features nearest to the input are not pooled.
        synthetic: number of noise images from which a start is learned if features are pooled, ≥ 1.
        smoothed_iterations: largest number of iterations of each fit to pooled features with a
            preference for smooth images, ≥ 1.
        rounds: largest number of rounds of fits to pooled features, ≥ 1. Only the first one prefers
            smooth images. A further one starts from the best result so far, to which noise is added
            where it misses the features. The rounds end once a fit meets the features.
    """

    purpose: ClassVar[str] = "feature recursion"

    iterations: int = 300
    initialisation: Initialisation = field(default_factory=Grey)
    synthetic: int = 300
    smoothed_iterations: int = 100
    rounds: int = 10

    def __post_init__(self) -> None:
        names = ("iterations", "synthetic", "smoothed_iterations", "rounds")
        require(self, "be at least 1", *names)

    def check(self, problem: Problem, generator: torch.Generator) -> Applicability:
        """Return a statement that the attack applies, with the shape of the features that it reads.

        The check already reads the features, which takes a part of the attack's time.

        Args:
            problem: the network and the observed update of one sample in one step.
            generator: a random stream, which this attack does not use.

        Raises:
            ValueError: no features can be read.
        """
        known = recover_features(problem)
        shape = tuple(known.outputs[known.shallowest].shape[1:])
        pooled = ", pooled" if known.is_pooled else ""
        text = f"the outputs of {len(known.outputs)} ReLUs are determined, "
        return Applicability(True, f"{text}of shape {shape}{pooled} at the shallowest.")

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the fitted input, with its label, that explains the update of one problem.

        Args:
            problem: the network and the observed update of one sample in one step, in float64.
            generator: the random stream for starts and synthetic images.
            restart: number of the restart, which may change the start.
            budget: the CPU time, after which the fits end early.

        Raises:
            ValueError: no features could be read.
        """
        start = self.initialisation(problem.spec, 1, restart, generator).double()
        known = recover_features(problem)
        targets = assume_targets(problem, SignOfGradient(), generator).values
        if known.is_pooled:
            chosen = known.first(1)
            # Far from a solution, rounding does no harm, and single precision takes half of the
            # time of double precision.
            narrow = problem.to(torch.float32)
            stem = None if chosen.table is None else fit_stem(narrow, chosen, budget)
            if stem is not None:
                fit = self._nearer(problem, chosen, stem, targets, budget)
            else:
                fit = self._search(narrow, single(chosen), generator, budget)
                fit = self._finish(problem, chosen, fit, budget)
        else:
            fit = self._fit(problem.held, known, Fit(start, float("inf")), budget)
        is_met = _is_met(fit, known)
        # An input fitted to features has 20 to 30 times their relative error. So 10 and 100 times
        # the features' error are tried.
        errors = [10 * known.least_noise, 100 * known.least_noise]
        draws = SIGN_DRAWS if is_met and known.least_noise > 0 else 0
        batch, distance = settle_signs(
            problem, Batch(fit.inputs, targets), errors, MET, draws, generator, budget
        )
        stats = {
            "iterations": fit.iterations,
            "gradients": fit.evaluations,
            "layers": len(known.outputs),
            "repaired": known.repaired,
            "features": fit.value,
            "stage": f"{known}{'' if is_met else ', not met by the image'}",
            **stop_mark(budget.is_spent and not is_met),
        }
        found = answer(batch.inputs, batch.targets)
        return Reconstruction(found, distance, stats)

    def _fit(self, problem: Problem, known: Features, start: Fit, budget: Budget) -> Fit:
        """Return the best fit of an input to features that are not pooled.

        For each of several parts of the ``known`` features (:meth:`Features.beginnings`), an input
        is fitted to this part from ``start``, and then to all features, until an input meets them.
        """
        chosen = known.first(FITTED + 1)
        narrow = problem.to(torch.float32)
        optimizer = LBFGS(self.iterations, relative_tolerance=1e-3, tolerance=1e-12)
        best = start

        def further(fit: Fit) -> bool:
            nonlocal best
            fit = self._finish(problem, chosen, fit, budget)
            best = min(fit, best, key=lambda each: each.value)
            best = replace(best, iterations=fit.iterations, evaluations=fit.evaluations)
            return not (_is_met(best, chosen) or budget.is_spent)

        for number, beginning in enumerate(known.beginnings(FITTED + 1)):
            fit = replace(best, inputs=start.inputs.float(), value=float("inf"))
            fit = fit_features(narrow, single(beginning), fit, 0.0, optimizer, budget)
            if not further(fit):
                break
            if not number and not known.windows:
                faded = fade_features(problem, known.first(FADED), MET, budget)
                if not further(replace(best, inputs=faded, value=float("inf"))):
                    break
        return best

    def _finish(self, problem: Problem, chosen: Features, fit: Fit, budget: Budget) -> Fit:
        last = LBFGS(self.iterations, relative_tolerance=1e-3, tolerance=1e-16)
        fit = replace(fit, inputs=fit.inputs.double())
        return fit_features(problem, chosen, fit, 0.0, last, budget)

    def _nearer(
        self, problem: Problem, chosen: Features, fit: Fit, targets: Tensor, budget: Budget
    ) -> Fit:
        """Return the better of a fit and its continuation, judged by the gradient.

        The continuation fits only the ``chosen`` known features. Pooled features do not determine
        the whole input, so that the continuation may also lead away from the truth. ``targets``
        holds the label of the sample.
        """
        fit = replace(fit, inputs=fit.inputs.double())
        distance = gradient_distance(problem, Batch(fit.inputs, targets))
        if distance <= MET or budget.is_spent:
            return fit
        end = self._finish(problem, chosen, fit, budget)
        if gradient_distance(problem, Batch(end.inputs, targets)) < distance:
            return end
        return replace(fit, iterations=end.iterations, evaluations=end.evaluations)

    def _search(
        self, problem: Problem, known: Features, generator: torch.Generator, budget: Budget
    ) -> Fit:
        """Return the best fit of an input to known pooled features, starting from a regression.

        The fit runs in rounds. In the first one, the preference for smooth images falls in steps to
        none. A further round adds noise to the best input so far, where its features are farther
        from the known ones than in the mean. ``known`` is in single precision.
        """
        number = known.shallowest

        def features(inputs: Tensor) -> Tensor:
            walk = ReluWalk(problem, inputs, last=number, pooled=known.windows)
            return walk.compared(number).clamp_min(0)

        outputs = known.outputs[number]
        start = read_input(features, outputs, problem.spec, self.synthetic, generator)
        fit = best = Fit(start, float("inf"))
        optimizer = LBFGS(self.smoothed_iterations, relative_tolerance=1e-4, tolerance=1e-16)
        for index in range(self.rounds):
            for weight in SMOOTHING if not index else SMOOTHING[-1:]:
                fit = fit_features(problem, known, fit, weight, optimizer, budget)
            best = min(fit, best, key=lambda each: each.value)
            best = replace(best, iterations=fit.iterations, evaluations=fit.evaluations)
            if best.value <= MET or budget.is_spent:
                break
            with torch.no_grad():
                missed = (features(best.inputs) - outputs).square().mean(1, keepdim=True)
            where = F.interpolate((missed > missed.mean()).to(start), start.shape[2:])
            noise = torch.randn(start.shape, generator=generator)
            fit = replace(best, inputs=best.inputs + SHAKING * where * noise)
        return best


def _is_met(fit: Fit, known: Features) -> bool:
    """Return whether noise explains the distance of a fitted input's features from the known ones.

    The distance is a sum over the known outputs, weighted by :meth:`Features.weight`. At the true
    input, each output contributes about the square of the least noise of all.
    """
    chosen = known.first(FITTED + 1)
    explained = len(chosen.outputs) * (MARGIN * chosen.least_noise) ** 2
    return fit.value <= max(MET, explained)
