"""Feature recursion: read a ReLU network's features from its gradients, then fit the input.

Networks whose channels grow as their maps shrink have far more equations than unknowns in all but
the first layers, so that :func:`recover_features` gets far, through pooling, BatchNorm with given
statistics and skip connections. After global average pooling the last mask is not known from the
features, but all positions share one error; after max pooling over windows that do not overlap,
flattened into the last layer, all positions of a window do
(:mod:`flwr_leakage.attacks.exact.last_mask`). Pooling further in front ends the recursion: the
pooled features are still determined, the maxima behind them are not.

The input is at last fitted to the shallowest features found, a residual continuous in x: from
grey; or, through pooling, from what a regression on synthetic images reads from the features,
with a preference for smooth images that fades.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

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
    """What was made of one target with one threshold of zero.

    Attributes:
        found: the reconstruction.
        is_sure: only the truth has these features: they outnumber the pixels, and they are met.
            Rounding on the client's side may still have chosen other maxima, so that the gradient
            differs.
    """

    found: Reconstruction
    is_sure: bool


@dataclass(frozen=True)
class FeatureRecursion(OneByOne):
    """Reads features from behind as far as they are determined, and fits the input to them.

    For one sample and one plain gradient, ReLU networks whose last layer is linear with a bias,
    on features that were averaged over few positions, or pooled to maxima and flattened;
    BatchNorm by given statistics.

    Attributes:
        rank_tolerance: equations whose singular values fall below this fraction of the largest
            do not determine features.
        trims: solutions of one layer's equations; after each, channels that contradict it are left
            out.
        contradiction: a channel contradicts a solution by a residual above this multiple of the
            median one.
        zeros: features below this fraction of their layer's largest are zeros. No one value suits
            all networks, so that each is tried, until one reconstruction's gradient is within
            ``solved`` of the observed one; else the one whose gradient is nearest is kept.
        solved: relative squared distance of gradients.
        fitted: how many of the shallowest known layers the input is fitted to, ≥ 1.
        iterations: of the fit.
        initialisation: of the fit, where no pooling is in its way.
        synthetic: images of noise from whose features a start is learned where pooling is; each
            of ``zeros`` draws its own.
        smoothing: weights of the total variation in the successive fits from there to the
            shallowest layer known, before the last one without.
        smoothed_iterations: of each of those.
        rounds: of all those fits, each from where the last ended, until the features' relative
            squared distance is within ``solved``.
        shaking: standard deviation of the noise that a round adds to where the last ended, in
            units of the model's input.
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

    def solve(self, problem: Problem, generator: torch.Generator, restart: int) -> Reconstruction:
        """Attack one problem.

        Raises:
            ValueError: with no threshold could features be read.
        """
        began = time.process_time()
        start = self.initialisation(problem.spec, 1, restart, generator).double()
        best: Reconstruction | None = None
        reason: ValueError | RuntimeError | None = None
        for zero in self.zeros:
            try:
                attempt = self._attempt(problem, start, zero, generator)
            except (ValueError, RuntimeError) as error:
                reason = reason or error
                continue
            found = attempt.found
            if attempt.is_sure or best is None or not found.objective >= best.objective:
                best = found
            if attempt.is_sure or best.objective <= self.solved:
                break
        if best is None:
            assert reason is not None
            raise reason
        return replace(best, stats={**best.stats, "cpu_seconds": time.process_time() - began})

    def _attempt(
        self, problem: Problem, start: Tensor, zero: float, generator: torch.Generator
    ) -> Attempt:
        """The input whose features are those recovered with one threshold of zero."""
        known = recover_features(problem, self.rank_tolerance, zero, self.trims, self.contradiction)
        fit = Fit(start, float("inf"))
        chosen = known.first(self.fitted)
        if known.is_pooled:
            # Far from a solution rounding does not count, and single precision is twice as fast.
            chosen = known.first(1)
            fit = self._search(problem.to(torch.float32), chosen.single(), generator)
            fit = replace(fit, inputs=fit.inputs.double())
        last = LBFGS(self.iterations, relative_tolerance=1e-3, tolerance=1e-16)
        fit = fit_features(problem, chosen, fit, 0.0, last)
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

    def _search(self, problem: Problem, known: Features, generator: torch.Generator) -> Fit:
        """The input behind pooled features: read from them, then fitted in rounds."""
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
                fit = fit_features(problem, known, fit, weight, optimizer)
            if fit.value <= self.solved:
                break
        return fit
