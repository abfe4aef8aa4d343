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

import torch
from torch import Tensor

from flwr_leakage.attacks.chain import Link
from flwr_leakage.attacks.layer_equations import Whitened
from flwr_leakage.attacks.masks import Masks

BLOCK = 128
"""Columns of the normal matrix that are computed at once."""

MOST_UNKNOWNS = 5000
"""Inputs may have so many entries: the normal matrix has their square."""

LEAST_SHIFT = 1e-5
"""Of the preconditioner: single precision's rounding must not make its matrix indefinite."""

INEXACT = 1e-2
"""Relative residual of the systems that are solved for a step."""

MANY_ITERATIONS, MOST_ITERATIONS = 40, 60
"""Of conjugate gradients: from there on the normal matrix is computed anew for the next step, or
for this one. It costs about as much as 60 of them."""

REJECTIONS = 6
"""Trials of a step, with more and more damping."""

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
        behind: ``M₂ a = T₂``, for the channels of a.
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
            before=[_single_link(link) for link in self.before],
            link=_single_link(self.link),
            own=_single(self.own),
            behind=_single(self.behind),
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
        unit = _root_mean_square(self.masks.features[known]).to(z.dtype)
        results = []
        for equations, inputs in ((self.own, features), (self.behind, passes * z)):
            rows = equations.rows
            products = inputs.reshape(len(inputs), -1, rows.shape[1]) @ rows.T
            if constant:
                products = products - equations.values.T
            results.append((products / _root_mean_square(equations.values)).flatten(1))
        return torch.cat([*results, (bound * gaps / unit).flatten(1)], dim=1)


def gauss_newton(
    equations_at: Callable[[Tensor], MaskEquations],
    start: Tensor,
    steps: int,
    progress: float = 0.75,
    solved: float = 1e-7,
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
    preconditioner: Preconditioner | None = None
    for _ in range(steps):
        system = Linearised(equations_at(inputs), inputs)
        value, trial, found = system.value, inputs, system.value
        for _ in range(REJECTIONS):
            step, preconditioner = system.solve(damping, preconditioner)
            trial = inputs + step
            found = system.value_at(trial)
            promised = -float((system.slope * step).sum())
            if found <= value - 0.25 * promised:
                damping /= 10 if found <= value - 0.75 * promised else 2
                break
            damping *= 8 if found >= value else 3
            if found < 0.9 * value:
                break
        if not found < value:
            return
        inputs = trial
        yield inputs
        slow = slow + 1 if found > progress * value else 0
        if found <= solved or slow >= 2:
            return


@dataclass(frozen=True)
class Preconditioner:
    """The Cholesky factor of ``JᵀJ + shift d̄ I`` at some inputs.

    Attributes:
        matrix: JᵀJ, in single precision.
        inputs: where J was taken.
        shift: at least the one that was asked for, and enough for a factor to exist.
        factor: in single precision.
        is_worn: whether conjugate gradients took long with it.
    """

    matrix: Tensor
    inputs: Tensor
    shift: float
    factor: Tensor
    is_worn: bool = False

    @classmethod
    def of(cls, matrix: Tensor, inputs: Tensor, shift: float) -> "Preconditioner":
        """Factor a matrix that was taken at some inputs."""
        shift = max(shift, LEAST_SHIFT)
        mean = max(float(matrix.diagonal().mean()), 1e-30)
        while True:
            shifted = matrix.clone()
            shifted.diagonal().add_(shift * mean)
            factor, failed = torch.linalg.cholesky_ex(shifted)
            if not failed or shift > 1:
                return cls(matrix, inputs, shift, factor)
            shift *= 10

    def __call__(self, vector: Tensor) -> Tensor:
        """Solve for one right-hand side."""
        solution = torch.cholesky_solve(vector[:, None].to(self.factor.dtype), self.factor)
        return solution[:, 0].to(vector.dtype)


class Linearised:
    """Equations to first order about an input."""

    def __init__(self, equations: MaskEquations, inputs: Tensor) -> None:
        """Evaluate the residual r at the inputs, its sum of squares and its slope Jᵀr."""
        self.equations, self.inputs = equations, inputs
        residual, self.gates = equations.residual(inputs)
        self.value = float(residual.square().sum())
        self._pull = torch.func.vjp(self._push, torch.zeros_like(inputs))[1]
        self.slope = self._pull(residual)[0]

    def value_at(self, inputs: Tensor) -> float:
        """The sum of squares at other inputs."""
        return float(self.equations.residual(inputs)[0].square().sum())

    def solve(self, damping: float, old: Preconditioner | None) -> tuple[Tensor, Preconditioner]:
        """The damped step, and the preconditioner for the next one."""
        if old is None or (old.is_worn and old.inputs is not self.inputs):
            old = self._preconditioner(damping)
        elif not old.shift / 30 <= max(damping, LEAST_SHIFT) <= old.shift * 30:
            old = Preconditioner.of(old.matrix, old.inputs, damping)
        shift = damping * float(old.matrix.diagonal().mean())

        def product(vector: Tensor) -> Tensor:
            image = self._pull(self._push(vector.reshape(self.inputs.shape)))[0]
            return image.flatten() + shift * vector

        step, iterations = _conjugate_gradients(product, old, -self.slope.flatten())
        if iterations >= MOST_ITERATIONS and old.inputs is not self.inputs:
            return self.solve(damping, self._preconditioner(damping))
        old = replace(old, is_worn=iterations > MANY_ITERATIONS)
        return step.reshape(self.inputs.shape), old

    def _push(self, steps: Tensor) -> Tensor:
        return self.equations.linear(self.gates, steps)

    def _preconditioner(self, damping: float) -> Preconditioner:
        matrix = self.equations.normal_matrix(self.gates, self.inputs.shape)
        return Preconditioner.of(matrix, self.inputs, damping)


def _conjugate_gradients(
    product: Callable[[Tensor], Tensor], precondition: Callable[[Tensor], Tensor], right: Tensor
) -> tuple[Tensor, int]:
    """Solution of a positive definite system, and the number of iterations."""
    solution, residual = torch.zeros_like(right), right
    direction = preconditioned = precondition(residual)
    size = first = residual @ preconditioned
    iterations = 0
    while iterations < MOST_ITERATIONS and size > INEXACT**2 * first:
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


def _single_link(link: Link) -> Link:
    return replace(link, weight=link.weight.float(), scale=link.scale.float())


def _single(equations: Whitened) -> Whitened:
    return Whitened(equations.rows.float(), equations.values.float(), equations.singular.float())


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean().sqrt().clamp_min(1e-30) if values.numel() else values.new_ones(())
