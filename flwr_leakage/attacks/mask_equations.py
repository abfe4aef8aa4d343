"""What proven masks of a ReLU layer tell exactly about the input, and damped Gauss–Newton for it.

Let z(x) be the preactivations of a ReLU layer, h(x) the input of that layer, and let the masks
m of some of its channels be proven. Then three sets of equations hold to rounding:

    M₁ h(x) = T₁              the weight gradient of the layer, of proven channels;
    z(x) = a, z(x) ≤ 0        where the mask's values are determined, and where it is zero;
    M₂ (m z(x)) = T₂          the weight gradient of the layer behind, with relu(z) for m z in
                              channels that are not proven.

As m is given, only the ReLUs before the layer are left in the way, and x is mostly overdetermined:
close to the solution Newton's method for this piecewise linear system ends there in a few steps.
Its residual is the attacker's to see, so it is known when the solution is exact.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from flwr_leakage.attacks.chain import Link
from flwr_leakage.attacks.layer_equations import Knowledge, Whitened
from flwr_leakage.attacks.masks import Masks

BLOCK = 128
"""Columns of the normal matrix that are computed at once."""

LEAST_PIVOT = 1e-5
"""Least damping of the preconditioner: single precision's rounding must not make it indefinite."""

Gates = tuple[Tensor, ...]


@dataclass(frozen=True)
class MaskEquations:
    """The equations of the module's docstring, each set in units of its right-hand side.

    Attributes:
        before: the layers before the masked one.
        link: the layer whose ReLUs have the masks.
        masks: of that layer; the proven ones are used.
        determined: entries (C, P) of proven masks that are known: the value of an active one,
            and of an inactive one that it is inactive. Of other active ones the sign is known.
        own: ``M₁ h = T₁``.
        behind: ``M₂ a = T₂``.
    """

    before: Sequence[Link]
    link: Link
    masks: Masks
    determined: Tensor
    own: Whitened
    behind: Whitened

    def __post_init__(self) -> None:
        if not self.masks.certain.any():
            raise ValueError("masks must be proven in at least one channel, got none.")

    def residual(self, inputs: Tensor) -> tuple[Tensor, Gates]:
        """All residuals at inputs (1, *shape), (1, R), and where the piecewise linear map is."""
        masks, shape = self.masks, (1, *self.link.output_shape)
        features, gates = inputs, []
        for link in self.before:
            z = link.preactivation(features)
            gates.append((z > 0).to(z.dtype))
            features = z.clamp_min(0)
        z = self.link.preactivation(features)
        positive = z.reshape(masks.active.shape) > 0
        bound = torch.where(self.determined, masks.active | positive, masks.active & ~positive)
        bound &= masks.certain[:, None]
        passes = torch.where(masks.certain[:, None], masks.active, positive)
        target = torch.where(bound & masks.active & self.determined, masks.features, 0.0)
        gates += [bound.to(z.dtype).reshape(shape), passes.to(z.dtype).reshape(shape)]
        parts = (features, z - target.reshape(shape), z)
        return self._collect(parts, gates, constant=True), tuple(gates)

    def linear(self, gates: Gates, steps: Tensor) -> Tensor:
        """Change (B, R) of the residuals with steps (B, *shape) of the inputs, to first order."""
        for link, gate in zip(self.before, gates, strict=False):
            steps = gate * _scaled(link, steps)
        z = _scaled(self.link, steps)
        return self._collect((steps, z, z), gates, constant=False)

    def normal_matrix(self, gates: Gates, shape: torch.Size) -> Tensor:
        """JᵀJ (D, D) in single precision, for inputs of a shape (1, *shape)."""
        single = replace(
            self,
            before=[_to_single(link) for link in self.before],
            link=_to_single(self.link),
            own=_to_single(self.own),
            behind=_to_single(self.behind),
        )
        gates = tuple(gate.float() for gate in gates)
        size = shape.numel()
        units = torch.eye(size, dtype=torch.float32).reshape(size, *shape[1:])
        width = min(BLOCK, size)
        pull = torch.func.vjp(lambda d: single.linear(gates, d), torch.zeros_like(units[:width]))[1]
        matrix = torch.empty(size, size)
        for first in [*range(0, size - width, width), size - width]:
            block = slice(first, first + width)
            matrix[block] = pull(single.linear(gates, units[block]))[0].reshape(width, size)
        return matrix

    def _collect(
        self, parts: tuple[Tensor, Tensor, Tensor], gates: Sequence[Tensor], constant: bool
    ) -> Tensor:
        """Residuals of the three sets, from h, from z less its target, and from z."""
        features, gaps, z = parts
        bound, passes = gates[-2:]
        known = self.masks.active & self.determined & self.masks.certain[:, None]
        unit = _root_mean_square(self.masks.features[known])
        results = []
        for equations, inputs in ((self.own, features), (self.behind, passes * z)):
            rows = equations.rows
            products = inputs.reshape(len(inputs), -1, rows.shape[1]) @ rows.T
            if constant:
                products = products - equations.values.T
            results.append((products / _root_mean_square(equations.values)).flatten(1))
        return torch.cat([*results, (bound * gaps / unit).flatten(1)], dim=1)


def equations_of_masks(
    before: Sequence[Link],
    link: Link,
    masks: Masks,
    determined: Tensor,
    own: Whitened,
    behind: Knowledge,
) -> MaskEquations:
    """The equations, those of the layer behind for its input's channels."""
    return MaskEquations(
        before, link, masks, determined, own, behind.equations.of_channels(len(masks.certain))
    )


def gauss_newton(
    equations_at: Callable[[Tensor], MaskEquations],
    start: Tensor,
    steps: int,
    progress: float = 0.8,
    solved: float = 1e-8,
) -> Iterator[Tensor]:
    """Successive inputs of damped Gauss–Newton (Levenberg 1944, Marquardt 1963).

    ``(JᵀJ + μ d̄ I) Δ = −Jᵀr``, with d̄ the mean of JᵀJ's diagonal, is solved by conjugate
    gradients. Their preconditioner is the Cholesky factor of a step before, while that does.

    Args:
        equations_at: the equations, that may become more from input to input.
        start: input (1, *shape).
        steps: at most.
        progress: the end is reached if two steps in a row lower the sum of squares less than to
            this share.
        solved: … or if it is at most this.
    """
    inputs, damping, slow = start, 1e-3, 0
    matrix: Tensor | None = None
    factor = start.new_zeros(())
    factored = 0.0
    for _ in range(steps):
        equations = equations_at(inputs)
        residual, gates = equations.residual(inputs)
        value = float(residual.square().sum())
        pull = torch.func.vjp(lambda d: equations.linear(gates, d), torch.zeros_like(inputs))[1]
        slope = pull(residual)[0].flatten()
        fresh = matrix is None
        if matrix is None:
            matrix = equations.normal_matrix(gates, inputs.shape)
            factored = 0.0
        mean = float(matrix.diagonal().mean())
        found, trial = value, inputs
        for _ in range(6):
            if not factored / 30 <= max(damping, LEAST_PIVOT) <= factored * 30:
                factored = max(damping, LEAST_PIVOT)
                shifted = matrix.double()
                shifted.diagonal().add_(factored * mean)
                factor = torch.linalg.cholesky(shifted)

            def product(d: Tensor, mu: float = damping * mean) -> Tensor:
                return pull(equations.linear(gates, d.reshape(inputs.shape)))[0].flatten() + mu * d

            step, iterations = _conjugate_gradients(product, factor, -slope)
            if iterations >= MOST_ITERATIONS and not fresh:
                matrix, fresh = equations.normal_matrix(gates, inputs.shape), True
                mean, factored = float(matrix.diagonal().mean()), 0.0
                continue
            trial = inputs + step.reshape(inputs.shape)
            found = float(equations.residual(trial)[0].square().sum())
            promised = float(-(slope @ step))
            if found <= value - 0.25 * promised:
                damping = damping / 10 if found <= value - 0.75 * promised else damping / 2
                break
            damping *= 8 if found >= value else 3
            if found < 0.9 * value:
                break
        if iterations > MANY_ITERATIONS:
            matrix = None
        if not found < value:
            return
        inputs = trial
        yield inputs
        slow = slow + 1 if found > progress * value else 0
        if found <= solved or slow >= 2:
            return


MANY_ITERATIONS, MOST_ITERATIONS = 40, 80
"""Of conjugate gradients: from there on the normal matrix is computed anew for the next step, or
for this one."""


def _conjugate_gradients(
    product: Callable[[Tensor], Tensor], factor: Tensor, right: Tensor
) -> tuple[Tensor, int]:
    """Solution of a positive definite system, preconditioned by a Cholesky factor."""

    def precondition(vector: Tensor) -> Tensor:
        return torch.cholesky_solve(vector[:, None], factor)[:, 0]

    solution, residual = torch.zeros_like(right), right
    direction = preconditioned = precondition(residual)
    size = first = residual @ preconditioned
    iterations = 0
    while iterations < MOST_ITERATIONS and size > 1e-8 * first:
        iterations += 1
        image = product(direction)
        length = size / (direction @ image)
        solution = solution + length * direction
        residual = residual - length * image
        preconditioned = precondition(residual)
        previous, size = size, residual @ preconditioned
        direction = preconditioned + size / previous * direction
    return solution, iterations


def _scaled(link: Link, inputs: Tensor) -> Tensor:
    outputs = link.linear(inputs)
    return link.scale.reshape((-1,) + (1,) * (outputs.ndim - 2)) * outputs


Record = TypeVar("Record", Link, Whitened)


def _to_single(record: Record) -> Record:
    tensors = {k: v.float() for k, v in vars(record).items() if isinstance(v, Tensor)}
    return replace(record, **tensors)


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean().sqrt().clamp_min(1e-30) if values.numel() else values.new_ones(())
