"""Feature recursion: read a ReLU network's features from its gradients, then fit the input.

Networks whose channels grow as their maps shrink have far more equations than unknowns in all but
the first layers. So :func:`recover_features` gets far, through BatchNorm with given statistics and
skip connections. The end of the network may pool, where the features do not tell the last mask:

- behind global average pooling, all positions share one error;
- behind max pooling over windows that do not overlap, flattened into the last layer, all positions
  of a window do.

Either is enough to find the mask (:mod:`flwr_leakage.attacks.exact.last_mask`). Max pooling further
in front ends the recursion: the pooled features are still determined, but not where in its window
each maximum was.

Finally the input is fitted to the shallowest features found, by a residual that is continuous in x.
The fit starts from grey. Where those features are pooled it starts from what a regression on
synthetic images reads from them, and prefers smooth images at first.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.feature_fit import Fit, fit_features
from flwr_leakage.attacks.exact.recover_features import Features, recover_features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.exact.synthetic_start import read_input
from flwr_leakage.attacks.labels.assumed import answer, assume_targets
from flwr_leakage.attacks.labels.idlg import SignOfGradient
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.starts.base import Initialisation
from flwr_leakage.attacks.starts.grey import Grey
from flwr_leakage.records import Batch, Reconstruction


@dataclass(frozen=True)
class Attempt:
    """The result of one target with one threshold below which features count as zero.

    Attributes:
        found: the reconstruction.
        is_sure: whether the fit meets pooled features that outnumber the pixels: only the truth
            does. Its gradient may differ from the observed one all the same, as rounding on the
            client's side may have chosen other maxima.
    """

    found: Reconstruction
    is_sure: bool


@dataclass(frozen=True)
class FeatureRecursion(OneByOne):
    """Read features from the last ReLU on as far as they are determined, and fit the input to them.

    Takes one sample and one plain gradient of a ReLU network. Its last layer must be linear with a
    bias, and take in features that were averaged over few positions, or pooled to maxima and
    flattened. BatchNorm must use given statistics.

    Attributes:
        rank_tolerance: equations do not determine features if their least singular value is below
            this fraction of the largest.
        trims: how often the equations of one layer are solved, ≥ 1. After each solution, channels
            that contradict it are left out.
        contradiction: a channel contradicts a solution if its residual is above this multiple of
            the median residual, ≥ 1.
        zeros: features below this fraction of their layer's largest count as zero. No one value
            suits all networks, so they are tried in turn until one reconstruction's gradient is
            within ``solved`` of the observed one. If none is, the nearest one is kept.
        solved: relative squared distance at which gradients, or features, count as met.
        fitted: how many of the shallowest known layers the input is fitted to, ≥ 1.
        iterations: most iterations of the last fit, ≥ 1.
        initialisation: where the fit starts if the shallowest features are not pooled.
        synthetic: images of noise from which a start is learned if they are pooled, ≥ 1. Each of
            ``zeros`` draws its own.
        smoothing: weights of the total variation in successive fits to pooled features. One more
            fit follows without it.
        smoothed_iterations: most iterations of each of these fits, ≥ 1.
        rounds: most rounds of these fits, ≥ 1. A round starts where the last one ended. They end
            once the features' relative squared distance is within ``solved``.
        shaking: standard deviation of the noise added to the start of each further round, in units
            of the model's input.
    """

    purpose: ClassVar[str] = "feature recursion"

    rank_tolerance: float = 1e-5
    trims: int = 3
    contradiction: float = 5.0
    zeros: Sequence[float] = (1e-6, 1e-5, 1e-4)
    solved: float = 1e-8
    fitted: int = 3
    iterations: int = 300
    initialisation: Initialisation = field(default_factory=Grey)
    synthetic: int = 300
    smoothing: Sequence[float] = (0.3, 0.1, 0.03, 0.01)
    smoothed_iterations: int = 100
    rounds: int = 4
    shaking: float = 0.2

    def __post_init__(self) -> None:
        for name in (
            "trims",
            "fitted",
            "iterations",
            "synthetic",
            "smoothed_iterations",
            "rounds",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.contradiction >= 1:
            raise ValueError(f"contradiction must be at least 1, got {self.contradiction}.")
        if not self.zeros or min(self.zeros) < 0:
            raise ValueError(f"zeros must hold fractions of at least 0, got {self.zeros}.")

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Attack one problem.

        Raises:
            ValueError: features could be read with none of the thresholds ``zeros``.
        """
        began = time.process_time()
        start = self.initialisation(problem.spec, 1, restart, generator).double()
        best: Reconstruction | None = None
        reason: ValueError | RuntimeError | None = None
        stopped = False
        for zero in self.zeros:
            try:
                attempt = self._attempt(problem, start, zero, generator, budget)
            except (ValueError, RuntimeError) as error:
                reason = reason or error
                continue
            found = attempt.found
            if attempt.is_sure or best is None or not found.objective >= best.objective:
                best = found
            if attempt.is_sure or best.objective <= self.solved:
                break
            if budget.is_spent:
                stopped = True
                break
        if best is None:
            assert reason is not None
            raise reason
        stats = {**best.stats, "cpu_seconds": time.process_time() - began, **stop_mark(stopped)}
        return replace(best, stats=stats)

    def _attempt(
        self,
        problem: Problem,
        start: Tensor,
        zero: float,
        generator: torch.Generator,
        budget: Budget,
    ) -> Attempt:
        """Recover the features with one threshold of ``zeros``, and the input that has them."""
        known = recover_features(problem, self.rank_tolerance, zero, self.trims, self.contradiction)
        fit = Fit(start, float("inf"))
        chosen = known.first(self.fitted)
        if known.is_pooled:
            # Far from a solution rounding does no harm, and single precision is twice as fast.
            chosen = known.first(1)
            fit = self._search(problem.to(torch.float32), chosen.single(), generator, budget)
            fit = replace(fit, inputs=fit.inputs.double())
        last = LBFGS(self.iterations, relative_tolerance=1e-3, tolerance=1e-16)
        fit = fit_features(problem, chosen, fit, 0.0, last, budget)
        targets = assume_targets(problem, SignOfGradient(), generator).values
        batch = Batch(fit.inputs, targets)
        found = Reconstruction(
            answer(batch.inputs, batch.targets),
            gradient_distance(problem, batch),
            {
                "iterations": fit.iterations,
                "gradients": fit.evaluations,
                "layers": len(known.outputs),
                "zero": zero,
            },
        )
        outnumbered = chosen.outputs[chosen.shallowest].numel() > start.numel()
        return Attempt(found, known.is_pooled and outnumbered and fit.value <= self.solved)

    def _search(
        self, problem: Problem, known: Features, generator: torch.Generator, budget: Budget
    ) -> Fit:
        """The input behind pooled features: read from them by regression, then fitted in rounds."""
        number = known.shallowest

        def features(inputs: Tensor) -> Tensor:
            walk = ReluWalk({}, last=number, pooled=known.windows)
            walk.run(problem, inputs)
            return walk.compared(number).clamp_min(0)

        outputs = known.outputs[number]
        start = read_input(features, outputs, problem.spec, self.synthetic, generator)
        fit = Fit(start, float("inf"))
        optimizer = LBFGS(self.smoothed_iterations, relative_tolerance=1e-4, tolerance=1e-16)
        for index in range(self.rounds):
            if index:
                noise = torch.randn(start.shape, generator=generator)
                fit = replace(fit, inputs=fit.inputs + self.shaking * noise)
            for weight in (*self.smoothing, 0.0):
                fit = fit_features(problem, known, fit, weight, optimizer, budget)
            if fit.value <= self.solved or budget.is_spent:
                break
        return fit
