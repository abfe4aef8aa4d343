"""Solve for the features that convolutions take, if BatchNorm in train mode follows each of them.

BatchNorm in train mode computes ``y = γ x̂ + β`` with ``x̂ = (z − μ)/σ`` from a convolution's outputs
``z = W ∗ a``. The mean μ and variance of the batch are known if the client sends its buffers. With
d = ∂L/∂y and N positions of a channel, the error of the convolution's outputs is

    δ = (γ d − m₁ − m₂ x̂)/σ,   m₁ = γ ∂L/∂β / N,   m₂ = γ ∂L/∂γ / N,

where the update tells m₁ and m₂ (:func:`flwr_leakage.normalization.held_loss`). With the masks of
later ReLUs and their outputs, backpropagation gives d. So δ is affine in the features a, and the
weight gradient ``∂L/∂W = Σ_p δ[p] a[p + ·]`` is a quadratic function of them. Gauss–Newton solves
for a. Its linear systems are close to those of constant δ, which have the same matrix for each
input channel (:mod:`flwr_leakage.attacks.exact.weight_equations`). That matrix preconditions the
iterations of conjugate gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.exact.known import single
from flwr_leakage.attacks.exact.relu_walk import Use
from flwr_leakage.attacks.exact.weight_equations import weight_equations
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.normalization import StatelessBatchNorm
from flwr_leakage.spectral.cholesky import cholesky, cholesky_solve
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients

START = 0.4
"""The value of all features at which Gauss–Newton starts, the mean of the ReLU of a standard normal
number. BatchNorm with γ = 1 and β = 0 gives such features."""

STEPS, ITERATIONS = 25, 400
"""Largest numbers of steps of Gauss–Newton, and of iterations of conjugate gradients in a step.
Every layer of a ResNet-18 of width 32 (seed 13000) took five to seven steps."""

SHIFTS = (1e-2, 1e-5)
"""Damping of the first step, and the least damping, as shares of the mean eigenvalue of the matrix
for a constant error. The damping falls tenfold from each step to the next. With a least damping of
1e-9, the layer before a stride of 2 ended at a residual of 3e-4 in place of 4e-6 (ResNet-18 of
width 32, seed 13000)."""

MANY, WEAK = 100, 1e-4
"""If a step takes more than ``MANY`` iterations, later steps get the larger preconditioner. It
treats those directions apart whose eigenvalue is below the share ``WEAK`` of the mean; see
:func:`_step`."""

SETTLED = 0.9
"""Gauss–Newton ends if a step, except for the first three, does not lower the residual to this
share of the least residual before."""


@dataclass(frozen=True)
class Norm:
    """The BatchNorm layer that takes a convolution's outputs, with statistics held constant.

    Attributes:
        mean: μ (O, 1) of each of O channels.
        deviation: σ (O, 1), the root of the variance plus ε.
        first: γ ∂L/∂β (O, 1).
        second: γ ∂L/∂γ (O, 1).
    """

    mean: Tensor
    deviation: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, problem: Problem, name: str) -> "Norm":
        """Return the layer with a given name in a problem whose statistics are held."""
        layer = problem.gradient_map.model.get_submodule(name)
        assert isinstance(layer, StatelessBatchNorm)
        mean, variance = (
            problem.buffers[f"{name}.{each}"] for each in ("running_mean", "running_var")
        )
        first, second = problem.gradient_map.held[name]
        parts = mean, (variance + layer.eps).sqrt(), first, second
        return cls(*(each[:, None] for each in parts))


@dataclass(frozen=True)
class NormalisedUse:
    """A convolution before BatchNorm in train mode, whose error δ is affine in its input a.

    Attributes:
        use: the call of the convolution.
        weight: W (O, Q), for Q entries of a patch of the input.
        slope: (O, 1), −∂δ/∂z for the convolution's outputs z.
        offset: δ (O, P) at the input 0, for P positions of the output.
        gradient: ∂L/∂W (O, Q).
    """

    use: Use
    weight: Tensor
    slope: Tensor
    offset: Tensor
    gradient: Tensor

    @classmethod
    def of(
        cls, problem: Problem, use: Use, error: Tensor, features: Tensor
    ) -> "NormalisedUse | None":
        """Return a convolution with its error δ (1, O, H', W') at features (1, C, H, W).

        The result is ``None`` if no BatchNorm layer takes the convolution's outputs.
        """
        if use.norm is None:
            return None
        norm, positions = Norm.of(problem, use.norm), error[0, 0].numel()
        slope = norm.second / (positions * norm.deviation.square())
        weight = problem.params[use.name].flatten(1)
        offset = error[0].flatten(1) + slope * (weight @ use.geometry.patches(features)[0])
        return cls(use, weight, slope, offset, problem.gradient[use.name].flatten(1))

    def error(self, features: Tensor) -> Tensor:
        """Return the error δ (1, O, H', W') of the convolution's outputs for given features."""
        outputs = self.weight @ self.use.geometry.patches(features)[0]
        return (self.offset - self.slope * outputs).reshape(self.use.outputs.shape)


def solve_normalised(
    parts: Sequence[NormalisedUse], kept: Sequence[Tensor], start: Tensor | None = None
) -> tuple[Tensor, float]:
    """Return the features (1, C, H, W) that convolutions before BatchNorm take, by Gauss–Newton.

    Args:
        parts: the convolutions that take the features, at least one.
        kept: booleans (O,) for each convolution, true for output channels whose equations are used.
        start: the features at which Gauss–Newton starts; ``START`` everywhere by default.

    Returns:
        The features, and the relative residual of the equations that are used.
    """
    shape = parts[0].use.input_shape
    like = parts[0].weight
    features = like.new_full((1, *shape), START) if start is None else start
    rows = [each[:, None].to(like) for each in kept]
    size = torch.stack([(k * p.gradient).square().sum() for k, p in zip(rows, parts, strict=True)])
    before, best, deflates = float("inf"), features, False
    for step in range(STEPS):
        linear = [_Linear.of(part, row, features) for part, row in zip(parts, rows, strict=True)]
        value = torch.stack([each.residual.square().sum() for each in linear]).sum()
        residual = float((value / size.sum()).sqrt())
        is_settled = step > 2 and not residual <= SETTLED * before
        if residual < before:
            before, best = residual, features
        if is_settled:
            break
        shift = max(SHIFTS[0] * 0.1**step, SHIFTS[1])
        change, iterations = _step(linear, shape, shift, deflates)
        deflates = deflates or iterations > MANY
        features = features + change
    return best, before


@dataclass(frozen=True)
class _Linear:
    """The weight gradient of one convolution, linearised in the features that it takes.

    Output channels whose equations are not used have zeros in place of δ, the residual and the
    slope.

    Attributes:
        use: the call of the convolution.
        error: δ (O, P).
        patches: the features' patches (Q, P).
        residual: the predicted less the observed weight gradient (O, Q).
        weight: W (O, Q).
        slope: (O, 1), −∂δ/∂z for the convolution's outputs z.
    """

    use: Use
    error: Tensor
    patches: Tensor
    residual: Tensor
    weight: Tensor
    slope: Tensor

    @classmethod
    def of(cls, part: NormalisedUse, row: Tensor, features: Tensor) -> "_Linear":
        """Return the linearisation at features (1, C, H, W).

        ``row`` (O, 1) is 1 for output channels whose equations are used, else 0.
        """
        patches = part.use.geometry.patches(features)[0]
        error = row * part.error(features)[0].flatten(1)
        residual = error @ patches.T - row * part.gradient
        return cls(part.use, error, patches, residual, part.weight, row * part.slope)

    def push(self, direction: Tensor) -> Tensor:
        """Return the derivative (O, Q) of the weight gradient along features (1, C, H, W)."""
        patches = self.use.geometry.patches(direction)[0]
        return self.error @ patches.T - (self.slope * (self.weight @ patches)) @ self.patches.T

    def pull(self, dual: Tensor) -> Tensor:
        """Return the features (1, C, H, W) that the transposed derivative gives for (O, Q)."""
        patches = dual.T @ self.error - self.weight.T @ (self.slope * (dual @ self.patches))
        return F.fold(patches[None], self.use.input_shape[1:], *self.use.geometry)


def _step(
    linear: Sequence[_Linear], shape: torch.Size, shift: float, deflates: bool
) -> tuple[Tensor, int]:
    """Return a damped step of Gauss–Newton (1, C, H, W), and its iterations.

    The linear system is solved by conjugate gradients. With a constant error δ its matrix would be
    the same G (P, P) for each input channel, P = H·W, so that the inverse of ``G + damping``
    preconditions it. As BatchNorm makes errors sum to zero, G barely sees some directions, such as
    that of a constant map, and the dependence of δ on the features decides there. If ``deflates``,
    the exact matrix of these directions, in all channels, stands in the preconditioner.
    """
    matrices = []
    for each in linear:
        use = each.use
        gradient = each.residual.reshape(len(each.residual), -1, *use.geometry.kernel_size)
        errors = each.error.reshape(use.outputs.shape)
        matrix, _ = weight_equations(errors, gradient, use.input_shape, use.geometry)
        matrices.append(matrix.flatten(0, 1))
    together = torch.cat(matrices)
    squares, vectors = torch.linalg.eigh(together.T @ together)
    damping = shift * float(squares.mean())
    narrow = [single(each) for each in linear]
    slope = torch.stack([each.pull(each.residual) for each in linear]).sum(0)

    def product(flat: Tensor) -> Tensor:
        direction = flat.reshape(1, *shape)
        found = damping * direction
        for each in narrow:
            found = found + each.pull(each.push(direction))
        return found.flatten()

    is_weak = squares < WEAK * squares.mean() if deflates else squares < 0
    strong, weak = vectors[:, ~is_weak], vectors[:, is_weak].float()
    inverse = (strong / (squares[~is_weak] + damping) @ strong.T).float()
    coarse = torch.zeros(0, 0)
    if bool(is_weak.any()):
        units = torch.eye(shape[0] * weak.shape[1]).reshape(-1, shape[0], weak.shape[1])
        columns = [
            product((each @ weak.T).flatten()).reshape(shape[0], -1) @ weak for each in units
        ]
        coarse, _ = cholesky(torch.stack([each.flatten() for each in columns]), 0.0)

    def precondition(flat: Tensor) -> Tensor:
        residual = flat.reshape(shape[0], -1)
        found = residual @ inverse
        if len(coarse):
            solved = cholesky_solve(coarse, (residual @ weak).flatten())
            found = found + solved.reshape(shape[0], -1) @ weak.T
        return found.flatten()

    found, iterations = conjugate_gradients(
        product, -slope.flatten().float(), 1e-2, ITERATIONS, precondition
    )
    return found.reshape(1, *shape).to(slope), iterations
