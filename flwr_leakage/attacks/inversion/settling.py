"""The end of a run: each unit is blurred by its own posterior deviation, weights follow residuals.

Where a run ends, masks of units near zero are mere guesses, and a wrong one moves the gradient as
much as a right one. The equations, solved to first order, leave a normal posterior of the images.
Draws of it tell how far each unit may still move. Units whose sign is settled keep their kink,
doubtful ones are averages over both masks. What masks get wrong is no noise, so variances are read
from the residual, kernel by kernel and feature by feature: a wrong mask spoils those equations that
its unit has a part in, and others stay as sure as they were. Both fade by themselves, as equations
are met. What they leave open is the prior's: at first the run's own, then, as there is an image to
tell kinds of patches by, :class:`flwr_leakage.spectral.patch_prior.PatchPrior`.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.inversion.annealing import Candidate, Equations, shortened
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.inversion.linearization import Linearized
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.patch_prior import PatchCost, PatchPrior

WIDENING = 40.0
"""First blur over the relative distance of the equations, between its limits."""

TOLERANCE = 3e-2
"""Relative, of a step's linear system."""

TIGHT = 1e-3
"""… of a draw's: its right side is mostly what the equations tell, the draw what they do not."""

POOLED = 2.0
"""Draws' worth of a channel's mean square in that of each unit: a few draws tell it badly."""

TINIEST = 1e-9
"""Blur at least: one of zero has no width to divide by."""


@dataclass(frozen=True)
class Settling:
    """How long the end of one image is worked at.

    Attributes:
        steps: ≥ 0; at 0 there is no such end.
        products: with the Jacobian of one gradient, or its transpose, at most, about, ≥ 1; one
            with that of n local steps counts n times. A quarter is for one draw of the posterior
            in each step. What that leaves unsolved counts as unknown.
        before: share in (0, 1] of a run's own products that the run before this end takes.
        least: blur of the first draw at least, in posterior deviations, > 0. It is the wider, the
            worse equations are met.
        most: … at most.
        last: … of the last draw, > 0.
        patches_from: share of the steps, ≥ 0, after which the prior is of patches; above 1 it
            never is.
        candidates: of several runs, so many are gone on from, the most likely ones, ≥ 1.

    Where a budget does not allow for all products, each step takes fewer.
    """

    steps: int = 12
    products: int = 3800
    before: float = 1.0
    least: float = 0.6
    most: float = 2.0
    last: float = 0.08
    patches_from: float = 0.3
    candidates: int = 1

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps must be at least 0, got {self.steps}.")
        for name in ("products", "candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.before <= 1:
            raise ValueError(f"before must lie in (0, 1], got {self.before}.")
        if not 0 < self.last <= self.least <= self.most:
            raise ValueError(
                "last, least and most must be positive and ascend, "
                f"got {self.last}, {self.least} and {self.most}."
            )
        if not self.patches_from >= 0:
            raise ValueError(f"patches_from must be at least 0, got {self.patches_from}.")

    def __call__(
        self, model: Equations, likelihood: Likelihood, start: Candidate, budget: Budget
    ) -> Candidate:
        """From a run's candidate to the end.

        Args:
            model: what is computed of a candidate, of one image.
            likelihood: what was observed of it.
            start: where a run ended.
            budget: looked at between steps.
        """
        if not self.steps:
            return start
        prior, generator = model.prior, torch.Generator().manual_seed(0)
        point = torch.stack([prior.coordinates(image[None]) for image in start.inputs.float()])
        products, step, is_short = 0, 0, False
        each = max(4, self.products // (2 * self.steps * model.passes))
        first = min(max(WIDENING * math.sqrt(start.distance), self.least), self.most)
        blurred: Equations | None = None
        groups = model.groups
        patches = PatchPrior.of(prior)
        # The first pass takes no step: the candidate's own draw comes first.
        while step <= self.steps and not budget.is_spent:
            began = time.process_time()
            current, blur = (model, 0.0) if blurred is None else (blurred, 1.0)
            inputs = model.inputs(point)
            here = current.linearize(inputs, blur)
            residual = likelihood.residual(current.gradient(inputs, blur, precise=True))
            weights = 1 / likelihood.variances(residual, 1.0, groups)
            kinds = patches.at(inputs) if step >= self.patches_from * self.steps else None
            posterior = Posterior(here, prior, weights.float(), kinds)

            def solution(right: Tensor, tolerance: float, most: int, posterior=posterior):
                def product(flat: Tensor) -> Tensor:
                    return posterior(flat.reshape(model.shape)).flatten()

                found, _ = conjugate_gradients(product, right.flatten(), tolerance, most)
                return found.reshape(model.shape)

            if blurred is not None:
                right = posterior.pull_back((weights * residual).float()) + posterior.cost(point)
                change = -solution(right, TOLERANCE, each - each // 4)
                point, _ = shortened(
                    *(current, likelihood, blur, weights, 1.0),
                    *(point, change, True, posterior.cost, residual),
                )
            if step < self.steps:
                # Randomise, then optimise: the solution is a draw of the linearised posterior.
                # What is not solved stays a draw of the run's prior.
                own = torch.randn(model.shape, generator=generator)
                noise = torch.randn(len(weights), generator=generator)
                right = posterior.pull_back(weights.sqrt().float() * noise)
                rest = right + posterior.noise(own, generator) - posterior(own)
                draw = own + solution(rest, TIGHT, each // 4)
                blur = first * (self.last / first) ** (step / self.steps)
                found = spreads(model, model.inputs(point), [model.inputs(point + draw)])
                blurred = model.blurred_by([(blur * unit).clamp_min(TINIEST) for unit in found])
            products += here.products
            step += 1
            iterations = max(1, here.products // 2)
            seconds = (time.process_time() - began) / iterations
            left = budget.affordable((self.steps + 1 - step) * each, seconds)
            if left < (self.steps + 1 - step) * each:
                each, is_short = max(4, left // (self.steps + 1 - step)), True
        end = replace(
            start,
            inputs=model.inputs(point).double(),
            prior_mean_square=float(point.double().square().mean()),
            steps=step,
            products=products,
            stage=f"{start.stage}, settled in {step} steps",
            stopped=is_short or budget.is_spent,
        )
        return end.judged(model, likelihood)


class Posterior:
    """The precision LᵀJᵀWJL + Q of the linearised posterior, with sᵀ Q s the prior's cost.

    Q is the identity, or that of patches.
    """

    def __init__(
        self, here: Linearized, prior: ImagePrior, weights: Tensor, patches: PatchCost | None
    ) -> None:
        self.here, self.prior, self.weights, self.patches = here, prior, weights, patches

    def __call__(self, direction: Tensor) -> Tensor:
        """Its product with a direction (1, C, H, W)."""
        image = self.prior.push(direction)
        dual = self.here.pull(self.weights * self.here.push(image))
        if self.patches is None:
            return self.prior.pull(dual) + direction
        return self.prior.pull(dual + self.patches.product(image))

    def pull_back(self, dual: Tensor) -> Tensor:
        """LᵀJᵀ u."""
        return self.prior.pull(self.here.pull(dual))

    def cost(self, direction: Tensor) -> Tensor:
        """Q d."""
        if self.patches is None:
            return direction
        return self.prior.pull(self.patches.product(self.prior.push(direction)))

    def noise(self, own: Tensor, generator: torch.Generator) -> Tensor:
        """A draw of N(0, Q); ``own`` is one of N(0, I)."""
        return own if self.patches is None else self.prior.pull(self.patches.noise(generator))


def spreads(model: Equations, centre: Tensor, draws: Sequence[Tensor]) -> list[Tensor]:
    """Posterior deviations of the inputs of every ReLU and pooling, each of its own shape.

    Args:
        model: whose units they are.
        centre: images.
        draws: the same images, drawn from the posterior.
    """
    middle = model.kinks(centre)
    sums = [torch.zeros_like(each) for each in middle]
    for draw in draws:
        for total, there, back in zip(sums, model.kinks(draw), middle, strict=True):
            total += (there - back).square()
    found = []
    for total in sums:
        axes = [axis for axis in range(total.ndim) if axis > 1]
        shared = total.mean(axes, keepdim=True) / len(draws)
        squares = (total + POOLED * shared) / (len(draws) + POOLED)
        found.append(squares.sqrt())
    return found
