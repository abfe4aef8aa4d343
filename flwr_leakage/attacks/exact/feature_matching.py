"""Feature matching: recover a network's features layer by layer, then the input that has them.

For one sample, a network that is a chain of convolutions or linear layers gives its features
away from behind (:mod:`flwr_leakage.attacks.exact.walk_back`). Through invertible activations the
weight gradients are solved for them, as far as these have one solution; the input is then fitted
to the deepest features found. Of features that come from ReLUs it is enough to know where they are
zero; :mod:`flwr_leakage.attacks.exact.masks` finds the masks and proves most of them, and
:mod:`flwr_leakage.attacks.exact.relu_fit` seeks the input that meets what they tell.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.chain import Link, features_of, trace_chain
from flwr_leakage.attacks.exact.fading_prior import FadingPrior
from flwr_leakage.attacks.exact.hidden import OwnEquations
from flwr_leakage.attacks.exact.layer_equations import Knowledge
from flwr_leakage.attacks.exact.masks import MaskSearch
from flwr_leakage.attacks.exact.relu_fit import Candidate, fit_through_relus
from flwr_leakage.attacks.exact.walk_back import walk_back
from flwr_leakage.attacks.labels.assumed import answer, assume_targets
from flwr_leakage.attacks.labels.idlg import idlg_label
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.starts.base import Initialisation
from flwr_leakage.attacks.starts.grey import Grey
from flwr_leakage.records import Batch, Reconstruction
from flwr_leakage.spectral.gauss_newton import GaussNewton
from flwr_leakage.spectral.image_prior import ImagePrior


@dataclass(frozen=True)
class Judged:
    """A candidate as the attacker sees it.

    Attributes:
        stage: of the attack that found it.
        inputs: (1, *shape), valid pixels.
        distance: relative squared distance of its gradient from the observed one.
    """

    stage: str
    inputs: Tensor
    distance: float


@dataclass(frozen=True)
class FeatureMatching(OneByOne):
    """Layer by layer from behind, then a fit of the input; one sample, one plain step.

    Every reconstruction is judged by the attacker's own objective, the relative squared distance
    of the gradients: over the levels at which the walk back may stop, the ways to use masks that
    are not proven, and the successive fits.

    Attributes:
        rank_tolerance: singular values of a gradient's equations below this fraction of the
            largest are left out, in [0, 1); where the equations are noisy they fade below it.
        rank_fraction: the walk ends at a layer whose gradient determines less than this share of
            its input; solving it would cost much and rarely have one solution.
        negligible: singular values below this share of the largest are left out of noisy
            equations, too, in [0, 1).
        layer_iterations: of the convex problem of a layer behind invertible activations.
        solved: such a layer counts as found once its relative mean squared residual is at most
            this.
        masks: how masks of ReLUs are sought and proven.
        fit_iterations: of the input's fit to the features, where no ReLU is in the way.
        fading: of the prior and the blur in the fit through ReLUs.
        newton: damped Gauss–Newton without a prior after that.
        initialisation: of the fit where no ReLU is in the way.
    """

    purpose: ClassVar[str] = "feature matching"

    rank_tolerance: float = 1e-4
    rank_fraction: float = 0.5
    negligible: float = 1e-6
    layer_iterations: int = 700
    solved: float = 1e-9
    masks: MaskSearch = field(default_factory=MaskSearch)
    fit_iterations: int = 1000
    fading: FadingPrior = field(default_factory=FadingPrior)
    newton: GaussNewton = field(default_factory=GaussNewton)
    initialisation: Initialisation = field(default_factory=Grey)

    def __post_init__(self) -> None:
        for name in ("rank_tolerance", "negligible"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}.")
        for name in ("layer_iterations", "fit_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def solve(self, problem: Problem, generator: torch.Generator, restart: int) -> Reconstruction:
        """Attack one problem in float64.

        Raises:
            ValueError: the update stems from several samples or steps, or the model is no chain.
        """
        began = time.process_time()
        if problem.num_samples != 1 or not problem.is_single_gradient:
            raise ValueError(
                f"feature matching takes 1 sample in 1 plain step, got {problem.num_samples} "
                f"samples in {problem.schedule.num_steps} steps."
            )
        chain = trace_chain(problem)
        walk = walk_back(
            chain,
            self.masks,
            OwnEquations(self.negligible, self.rank_tolerance),
            rank_tolerance=self.rank_tolerance,
            rank_fraction=self.rank_fraction,
            layer_iterations=self.layer_iterations,
            solved=self.solved,
        )
        hidden = walk.hidden
        targets = assume_targets(problem, lambda *_: idlg_label(walk.logit_error), generator).values
        if hidden is not None:
            fit = fit_through_relus(hidden, ImagePrior.of(problem.spec), self.fading, self.newton)
            hidden, candidates = fit.hidden, fit.candidates
        else:
            start = self.initialisation(problem.spec, 1, restart, generator).double()
            candidates = self._fit_levels(chain, walk.levels, start)
        judged = [_judge(problem, targets, each) for each in candidates]
        judged = [each for each in judged if math.isfinite(each.distance)]
        if not judged:
            return failure("the objective was never finite.")
        best = min(judged, key=lambda each: each.distance)
        return Reconstruction(
            batch=answer(best.inputs, targets),
            objective=best.distance,
            stats={
                "cpu_seconds": time.process_time() - began,
                "ranks": [level.equations.num_equations for level in walk.levels],
                "positions": [level.equations.num_positions for level in walk.levels],
                "layer_residuals": walk.residuals,
                "proven_masks": hidden.num_proven if hidden else 0,
                "masks": len(hidden.masks.certain) if hidden else 0,
                "stage": best.stage,
            },
        )

    def _fit_levels(
        self, chain: Sequence[Link], levels: Sequence[Knowledge], start: Tensor
    ) -> list[Candidate]:
        """Inputs that explain the deepest level, and then the last one that is sure.

        A walk that went one layer too far has features that are roughly right and errors that
        are not; the fit to them is then a start for the level before.
        """
        position = len(chain) - 1 - len(levels)
        inputs = fit_level(chain[:position], levels[-1], start, self.fit_iterations)
        found = [Candidate("deepest", inputs)]
        if len(levels) > 1:
            inputs = fit_level(chain[: position + 1], levels[-2], inputs, self.fit_iterations)
            found.append(Candidate("sure", inputs))
        return found


def fit_level(before: Sequence[Link], level: Knowledge, start: Tensor, iterations: int) -> Tensor:
    """Fit the input to one layer's outputs and its weight's gradient, by L-BFGS.

    Args:
        before: the layers before that one.
        level: what is known of it.
        start: input (1, *shape).
        iterations: at most.
    """
    size = level.equations.values.square().sum().clamp_min(1e-30)

    def loss(flat: Tensor) -> Tensor:
        features = features_of(before, flat.reshape(start.shape))
        value = level.forward_residual(features).square().sum()
        return (value + level.gradient_residual(features).square().sum()) / size

    def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = torch.func.grad_and_value(loss)(points[0])
        return value[None], gradient[None]

    optimizer = LBFGS(iterations, tolerance=1e-18, relative_tolerance=1e-3)
    return optimizer(evaluate, start.reshape(1, -1)).points.reshape(start.shape)


def _judge(problem: Problem, targets: Tensor, candidate: Candidate) -> Judged:
    inputs = problem.spec.clamp(candidate.inputs)
    return Judged(candidate.stage, inputs, gradient_distance(problem, Batch(inputs, targets)))
