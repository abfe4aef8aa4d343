"""The end of a batch's solution where the equations determine the images: no blur, few errors left.

With the masks that a candidate has, the equations are linear, and their solution has fewer wrong
masks. Each step's system is solved by conjugate gradients in double precision. Their
preconditioner is the system itself, dense and in single precision, as it was some steps ago.
Weights follow the residual of each tensor: what masks get wrong is no noise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.inversion.gauss_newton import SHORTENINGS
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.inversion.linearization import Linearization
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior

BLOCK = 64
"""Columns of J that are computed at once."""

RIDGE = 1e-3
"""Of the preconditioner, in units of its mean diagonal: single precision sees no less."""

TOLERANCE = 1e-5
"""Relative, of a step's linear system."""

MET = 1e-13
"""Relative squared distance of the equations at which nothing is left but rounding."""


@dataclass(frozen=True)
class Sharpening:
    """How long the end is worked at.

    Attributes:
        unknowns: of a batch at most, ≥ 0: time grows with their third power. At 0 there is no
            such end.
        max_bytes: of the Jacobian in single precision, twice: memory grows with the unknowns times
            the gradient's entries.
        steps: at most, ≥ 1.
        rebuild: steps after which the preconditioner is built anew, ≥ 1.
        iterations: of conjugate gradients in a step, at most, ≥ 1.
    """

    unknowns: int = 0
    max_bytes: int = 4 * 2**30
    steps: int = 10
    rebuild: int = 4
    iterations: int = 60

    def __post_init__(self) -> None:
        if self.unknowns < 0:
            raise ValueError(f"unknowns must be at least 0, got {self.unknowns}.")
        for name in ("steps", "rebuild", "iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def fits(self, model: KnownErrors) -> bool:
        """Whether a batch is small enough, and has equations enough.

        Many of them depend on each other, where pooling narrows what they tell: twice as many as
        unknowns are asked for.
        """
        unknowns = torch.Size(model.shape).numel()
        return (
            unknowns <= self.unknowns
            and 2 * unknowns <= model.num_equations
            and 2 * 4 * unknowns * model.num_equations <= self.max_bytes
        )

    def __call__(
        self, model: KnownErrors, likelihood: Likelihood, inputs: Tensor, budget: Budget
    ) -> tuple[Tensor, int]:
        """Better images (B, C, H, W) in double precision, and the steps taken.

        Args:
            model: the equations.
            likelihood: what was observed.
            inputs: where to begin.
            budget: looked at between steps.
        """
        prior = ImagePrior.of(model.problem.spec)
        point = torch.stack([prior.coordinates(image[None]) for image in inputs.double()])
        precondition: Callable[[Tensor], Tensor] | None = None
        age = 0
        for step in range(self.steps):
            here = Linearization(
                partial(model.gradient, blur=0.0, precise=True), prior.grey + prior.push(point)
            )
            residual = likelihood.residual(here.value)
            if budget.is_spent or likelihood.distance(residual) <= MET:
                return prior.grey + prior.push(point), step
            weights = 1 / likelihood.variances(residual, 1.0)
            weights = weights / weights.max()
            ridge = float((weights * residual.square()).sum()) / len(residual)
            if precondition is None or age == self.rebuild:
                precondition, age = _preconditioner(model, prior, point, weights, ridge), 0
            right = prior.pull(here.pull(weights * residual)) + ridge * point

            def product(flat: Tensor, here=here, weights=weights, ridge=ridge) -> Tensor:
                image = here.push(prior.push(flat.reshape(model.shape)))
                return prior.pull(here.pull(weights * image)).flatten() + ridge * flat

            change, _ = conjugate_gradients(
                product, -right.flatten(), TOLERANCE, self.iterations, precondition
            )
            length, start = 1.0, float((weights * residual.square()).sum())
            for _ in range(SHORTENINGS):
                trial = point + length * change.reshape(point.shape)
                value = model.gradient(prior.grey + prior.push(trial), 0.0, precise=True)
                if float((weights * likelihood.residual(value).square()).sum()) < start:
                    break
                length *= 0.4
            else:
                if not age:
                    return prior.grey + prior.push(point), step
                age = self.rebuild - 1
                trial = point
            point, age = trial, age + 1
        return prior.grey + prior.push(point), self.steps


def _preconditioner(
    model: KnownErrors, prior: ImagePrior, point: Tensor, weights: Tensor, ridge: float
) -> Callable[[Tensor], Tensor]:
    """The map v ↦ (LᵀJᵀWJL + ridge)⁻¹ v, by Cholesky in single precision.

    The gradients are sums over samples, and features are of one sample each: so J is built sample
    by sample.
    """
    narrow, (count, *shape) = prior.single(), point.shape
    size, features = point[0].numel(), model.known.shape[1]
    shared = len(weights) - count * features
    roots = weights.sqrt().float()
    blocks, diagonal = [], []
    for index in range(count):
        alone = replace(
            model,
            known=model.known[[index]],
            errors=model.errors[[index]],
            bounds=model.bounds[[index]],
            doubtful=model.doubtful[[index]],
        )
        image = (prior.grey + prior.push(point[[index]])).float()
        here = Linearization(partial(alone.gradient, blur=0.0), image)
        rows = torch.cat(
            [
                here.columns(narrow.push(part.reshape(-1, 1, *shape)))
                for part in torch.eye(size).split(BLOCK)
            ]
        )
        own = roots[shared + index * features : shared + (index + 1) * features]
        blocks.append(rows[:, :shared] * roots[:shared])
        inner = rows[:, shared:] * own
        diagonal.append(inner @ inner.T)
    matrix = torch.empty(count * size, count * size)
    for i in range(count):
        for j in range(i, count):
            part = blocks[i] @ blocks[j].T
            if i == j:
                part += diagonal[i]
            matrix[i * size : (i + 1) * size, j * size : (j + 1) * size] = part
            matrix[j * size : (j + 1) * size, i * size : (i + 1) * size] = part.T
    del blocks, diagonal
    matrix.diagonal().add_(ridge + RIDGE * float(matrix.diagonal().mean()))
    factor = torch.linalg.cholesky(matrix)

    def solve(vector: Tensor) -> Tensor:
        return torch.cholesky_solve(vector.float()[:, None], factor)[:, 0].double()

    return solve
