"""Recover a network's features layer by layer, and then the input that has these features.

If a network is a chain of convolutions or linear layers, the gradient of one sample reveals its
features layer by layer, from the last layer on (:func:`walk_back`). The weight gradient of the last
layer is ``e hᵀ``. Here e, the derivative of the loss by the logits, is known as the gradient of the
layer's bias, so that the layer's input h is known too. The input h gives the slope of the last
activation, so that the derivative δ of the loss by the outputs of the layer before is exact. That
layer's weight gradient is then *linear* in the layer's input a: ``M(δ) a = ∂L/∂W``.

- Through invertible activations the weight gradients are solved for the features, as long as there
  is one solution. The input is then fitted to the found features that are nearest to it.
- Through ReLUs it is enough to know the mask, that is, where the features are zero.
  :mod:`flwr_leakage.attacks.exact.masks` finds the masks and proves most of them, and
  :mod:`flwr_leakage.attacks.exact.relu_fit` seeks the input that meets the masks' equations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.chain import Level, Link, features_of, solve_layer, trace_chain
from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.exact.mask_equations import Hidden
from flwr_leakage.attacks.exact.masks import PROOF
from flwr_leakage.attacks.exact.relu_fit import Candidate, fit_through_relus
from flwr_leakage.attacks.labels.assumed import answer, assume_targets, idlg_label
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.one_by_one import Applicability, ExactAttack, require_single_gradient
from flwr_leakage.attacks.optimizers.base import of_one
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.starts import Grey, Initialisation
from flwr_leakage.records import Batch, Reconstruction
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.values import require

SOLVED = 1e-9
"""Mean squared residual, divided by the mean square of the solution, up to which the convex problem
for a layer's input counts as solved. With a larger limit, a wrong input may pass for the layer's,
and all layers before it are then read wrongly."""


@dataclass(frozen=True)
class FeatureMatching(ExactAttack):
    """Solve for one sample layer by layer, from the last layer on, then fit the input.

    The model must be a chain of convolutions or linear layers with activations between. The attack
    takes an update of one sample in one plain step. Of the inputs that it fits, it returns the one
    whose gradient is nearest to the observed one.

    Attributes:
        layer_iterations: largest number of iterations for the convex problem of a layer behind an
            invertible activation, ≥ 1.
        proof: tolerance of the proof of a ReLU mask, ≥ 0; see
            :data:`~flwr_leakage.attacks.exact.masks.PROOF`.
        fit_iterations: largest number of iterations of a fit of the input without ReLUs, ≥ 1.
        rounds: largest number of fadings in a fit through ReLUs, ≥ 1. A fading is a series of steps
            in which the weight of the prior falls; see
            :func:`~flwr_leakage.attacks.exact.relu_fit.fit_through_relus`.
        newton_steps: largest number of steps of Gauss–Newton without a prior after a fit through
            ReLUs, ≥ 0.
        initialisation: the start of a fit without ReLUs.
    """

    purpose: ClassVar[str] = "feature matching"

    layer_iterations: int = 700
    proof: float = PROOF
    fit_iterations: int = 1000
    rounds: int = 12
    newton_steps: int = 8
    initialisation: Initialisation = field(default_factory=Grey)

    def __post_init__(self) -> None:
        require(self, "be at least 0", "proof", "newton_steps")
        require(self, "be at least 1", "layer_iterations", "fit_iterations", "rounds")

    def check(self, problem: Problem, generator: torch.Generator) -> Applicability:
        """Return a statement that the attack applies, with the layers whose equations are enough.

        Args:
            problem: the network and the observed update of one sample in one step.
            generator: a random stream, which this attack does not use.

        Raises:
            ValueError: the update stems from several samples or steps, or the model is no chain of
                layers with a bias of the last one.
        """
        chain = _chain(problem)
        kinks = sum(link.activation.is_relu for link in chain)
        stated = [(link, _counts(link)) for link in chain[:-1]]
        enough = [link.name.rstrip(".") for link, (given, asked) in stated if given >= asked]
        text = (
            f"a chain of {len(chain)} layers, {kinks} with ReLU; gradients state at least as many "
        )
        text += f"equations as there are features at {', '.join(enough) or 'no layer'}."
        return Applicability(True, text)

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the fitted input, with its label, that explains the update of one problem.

        Args:
            problem: the network and the observed update of one sample in one step, in float64.
            generator: the random stream for the start of a fit without ReLUs.
            restart: number of the restart, which may change that start.
            budget: the CPU time, after which the fits end early.

        Raises:
            ValueError: the update stems from several samples or steps, or the model is no chain of
                layers with a bias of the last one.
        """
        chain = _chain(problem)
        walk = walk_back(chain, self.proof, self.layer_iterations)
        hidden = walk.hidden
        targets = assume_targets(problem, lambda *_: idlg_label(walk.logit_error), generator).values
        if hidden is not None:
            prior = ImagePrior.of(problem.spec)
            candidates, hidden, stopped = fit_through_relus(
                hidden, prior, self.rounds, self.newton_steps, budget
            )
        else:
            start = self.initialisation(problem.spec, 1, restart, generator).double()
            candidates, stopped = self._fit_levels(chain, walk.levels, start, budget)
        judged = []
        for stage, inputs in candidates:
            batch = Batch(problem.spec.clamp(inputs), targets)
            judged.append((gradient_distance(problem, batch), stage, batch))
        judged = [each for each in judged if math.isfinite(each[0])]
        if not judged:
            return failure("the objective was never finite.")
        distance, stage, batch = min(judged, key=itemgetter(0))
        return Reconstruction(
            batch=answer(batch.inputs, targets),
            objective=distance,
            stats={
                "ranks": [level.equations.num_equations for level in walk.levels],
                "positions": [level.equations.num_positions for level in walk.levels],
                "layer_residuals": walk.residuals,
                "proven_masks": hidden.num_proven if hidden else 0,
                "masks": hidden.num_channels if hidden else 0,
                "stage": stage,
                **stop_mark(stopped),
            },
        )

    def _fit_levels(
        self, chain: Sequence[Link], levels: Sequence[Level], start: Tensor, budget: Budget
    ) -> tuple[list[Candidate], bool]:
        """Return inputs fitted to the two layers nearest to the input whose outputs are known.

        The outputs of the layer nearest to the input may be only roughly right, and the derivatives
        of the loss by them wrong. A fit to this layer is still a good start for the fit to the
        layer behind it.

        ``chain`` holds all layers in the order of a pass, ``levels`` those with known outputs, from
        the last but one towards the input. The fits begin at ``start`` (1, C, H, W).

        Returns:
            One or two candidates, each with the name of its stage, "deepest" for the first fit and
            "sure" for the second; and whether the budget ended the final fit.
        """
        position = len(chain) - 1 - len(levels)
        before, iterations = chain[:position], self.fit_iterations
        inputs, stopped = fit_level(before, levels[-1], start, iterations, budget)
        found = [("deepest", inputs)]
        if len(levels) > 1:
            before = chain[: position + 1]
            inputs, stopped = fit_level(before, levels[-2], inputs, iterations, budget)
            found.append(("sure", inputs))
        return found, stopped


def _chain(problem: Problem) -> list[Link]:
    """Return the layers of a model that is a chain, of which the last layer has a bias.

    Raises:
        ValueError: the update stems from several samples or steps, or the model is no such chain.
    """
    require_single_gradient(problem, "feature matching")
    chain = trace_chain(problem)
    if chain[-1].bias_gradient is None:
        raise ValueError("feature matching needs the last layer's bias, the model has none.")
    return chain


def _counts(link: Link) -> tuple[int, int]:
    """Return how many equations and unknowns a layer has for one channel of its input.

    The layer's weight gradient gives the equations; the channel's entries are the unknowns.
    """
    if link.geometry is None:
        return link.num_channels, 1
    return link.weight[:, 0].numel(), torch.Size(link.input_shape[1:]).numel()


def fit_level(
    before: Sequence[Link], level: Level, start: Tensor, iterations: int, budget: Budget
) -> tuple[Tensor, bool]:
    """Return the input (1, C, H, W) that L-BFGS fits to a layer's known outputs and gradient.

    The gradient is that of the layer's weight. ``before`` holds all layers before this layer. The
    fit begins at ``start`` (1, C, H, W), and ends after at most ``iterations``. The second result
    tells whether the budget ended the fit.
    """
    size = level.equations.values.square().sum().clamp_min(1e-30)

    def loss(flat: Tensor) -> Tensor:
        features = features_of(before, flat.reshape(start.shape))
        value = level.forward_residual(features).square().sum()
        return (
            value + (level.equations.products(features) - level.equations.values.T).square().sum()
        ) / size

    optimizer = LBFGS(iterations, tolerance=1e-18, relative_tolerance=1e-3)
    found = optimizer(of_one(loss), start.reshape(1, -1), budget=budget)
    return found.points.reshape(start.shape), found.stopped


@dataclass(frozen=True)
class Walk:
    """The known outputs of a chain's layers, from the last layer towards the input.

    Attributes:
        logit_error: ∂L/∂logits (K,).
        levels: the layers with known outputs, from the last layer but one towards the input.
        residuals: relative mean squared residuals of the convex problems that were solved, one for
            each layer with an invertible activation; see :func:`solve_layer`.
        hidden: the ReLUs nearest to the input that were reached, with the masks that say which
            units are on. It is ``None`` if the nearest activation that was reached is no ReLU.
    """

    logit_error: Tensor
    levels: list[Level]
    residuals: list[float]
    hidden: Hidden | None


def walk_back(chain: Sequence[Link], proof: float, layer_iterations: int) -> Walk:
    """Return the known outputs of a chain's layers, from its logits as far as the gradients lead.

    The last layer has a bias. ``proof`` is the tolerance of a mask's proof; see
    :data:`~flwr_leakage.attacks.exact.masks.PROOF`. A layer behind an invertible activation takes
    at most ``layer_iterations`` of L-BFGS.
    """
    last = chain[-1]
    assert last.bias_gradient is not None
    known = Known.exactly(mean_feature(last.weight_gradient, last.bias_gradient))
    errors = last.pull_back(last.bias_gradient[None])
    levels: list[Level] = []
    residuals: list[float] = []
    hidden: Hidden | None = None
    for position in range(len(chain) - 2, -1, -1):
        level = Level.of(chain[position], known, errors)
        levels.append(level)
        if position == 0:
            break
        before, link = chain[: position - 1], chain[position - 1]
        # A layer whose gradient determines less than half of its input would cost much to solve,
        # and its equations would rarely have a single solution. So no layer before it is read.
        if level.equations.num_equations < 0.5 * level.equations.num_positions:
            if hidden is None and link.activation.is_relu:
                hidden = Hidden.begin(before, link, level, is_sought=False)
            break
        errors = level.input_errors
        if link.activation.is_relu:
            hidden = Hidden.begin(before, link, level, proof)
            if not hidden.is_proven:
                break
            known = hidden.known
            continue
        hidden = None
        low, high = link.activation.low, link.activation.high
        inputs, residual = solve_layer(level, low, high, layer_iterations)
        residuals.append(residual)
        if residual > SOLVED:
            break
        known = Known.exactly(inputs.clamp(low, high))
    return Walk(last.bias_gradient / last.scale, levels, residuals, hidden)
