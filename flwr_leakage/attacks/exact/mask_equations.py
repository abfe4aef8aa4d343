"""What proven masks of a ReLU layer tell exactly about the input, and damped Gauss–Newton for it.

Let z(x) be the preactivations of a ReLU layer, h(x) the input of that layer, and let the masks
m of some of its channels be proven. Then three sets of equations hold to rounding:

    M₁ h(x) = T₁              the weight gradient of the layer, of proven channels;
    z(x) = a, z(x) ≤ 0        where the mask's values are determined, and where it is zero;
    M₂ (m z(x)) = T₂          the weight gradient of the layer behind, with relu(z) for m z in
                              channels that are not proven; and that layer's own outputs.

As m is given, only the ReLUs before the layer are left in the way, and x is mostly overdetermined:
close to the solution Newton's method for this piecewise linear system ends there in a few steps.
Its residual is the attacker's to see, so it is known when the solution is exact. From far away
:mod:`flwr_leakage.attacks.exact.fading_prior` comes close.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.chain import Link
from flwr_leakage.attacks.exact.layer_equations import Knowledge, Whitened, root_mean_square
from flwr_leakage.attacks.exact.masks import Masks

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
        own: ``M₁ h = T₁``, in units; ``None`` if no mask is proven.
        behind: what is known of the layer behind: its gradient's equations and its outputs.
        gradient: ``M₂ a = T₂``, in units, for the channels of a.
    """

    before: Sequence[Link]
    link: Link
    masks: Masks
    determined: Tensor
    own: Whitened | None
    behind: Knowledge
    gradient: Whitened

    @classmethod
    def of(
        cls,
        before: Sequence[Link],
        link: Link,
        masks: Masks,
        determined: Tensor,
        own: Whitened | None,
        behind: Knowledge,
    ) -> "MaskEquations":
        """Set equations in units."""
        gradient = behind.equations.of_channels(len(masks.certain)).in_units()
        own = None if own is None else own.in_units()
        return cls(before, link, masks, determined, own, behind, gradient)

    def residual(self, inputs: Tensor, blur: float = 0.0) -> tuple[Tensor, Gates]:
        """All residuals at inputs (1, *shape), (1, R), and where the piecewise linear map is.

        Args:
            inputs: x.
            blur: standard deviation of noise in the input of each layer over which its ReLUs are
                averaged; half of it for ReLUs whose masks are sought.
        """
        masks, shape = self.masks, (1, *self.link.output_shape)
        features, gates = inputs, []
        for link in self.before:
            features, slope = rectify(link, link.preactivation(features), blur)
            gates.append(slope)
        z = self.link.preactivation(features)
        certain = masks.certain[:, None]
        positive = z.reshape(masks.active.shape) > 0
        bound = torch.where(self.determined, masks.active | positive, masks.active & ~positive)
        bound = (bound & certain).to(z.dtype).reshape(shape)
        free, slope = rectify(self.link, z, blur / 2)
        active = masks.active.to(z.dtype)
        passes = torch.where(certain, active, slope.reshape(active.shape)).reshape(shape)
        open_ = (~certain).expand(active.shape).reshape(shape)
        outputs = torch.where(open_, free, passes * z)
        target = torch.where(self._valued, masks.features, 0.0).reshape(shape)
        behind = self.behind.link.preactivation(outputs)
        reached = self._known_behind | (behind > 0)
        gates += [bound, passes, reached.to(z.dtype) * self.behind.trust]
        parts = (features, z - target, outputs, behind - self._behind_target)
        return self._collect(parts, gates, constant=True), tuple(gates)

    def sum_of_squares(self, inputs: Tensor, blur: float = 0.0) -> float:
        """‖r‖², see ``residual``."""
        return float(self.residual(inputs, blur)[0].square().sum())

    def linear(self, gates: Gates, steps: Tensor) -> Tensor:
        """Change (B, R) of the residuals with steps (B, *shape) of the inputs, to first order."""
        for link, gate in zip(self.before, gates, strict=False):
            steps = gate * _scaled(link, steps)
        z = _scaled(self.link, steps)
        outputs = gates[-2] * z
        parts = (steps, z, outputs, _scaled(self.behind.link, outputs))
        return self._collect(parts, gates, constant=False)

    def pull_back(self, gates: Gates, shape: torch.Size) -> Callable[[Tensor], Tensor]:
        """The transpose of ``linear``: (B, R) ↦ (B, *shape), for inputs of a shape (B, …)."""
        zeros = torch.zeros(shape, dtype=gates[-1].dtype)
        pull = torch.func.vjp(lambda steps: self.linear(gates, steps), zeros)[1]
        return lambda residual: pull(residual)[0]

    def normal_matrix(self, gates: Gates, shape: torch.Size) -> Tensor:
        """JᵀJ (D, D) in single precision, for inputs of a shape (1, *shape)."""
        single, gates = self.single(), tuple(gate.float() for gate in gates)
        size = shape.numel()
        units = torch.eye(size, dtype=torch.float32).reshape(size, *shape[1:])
        width = min(BLOCK, size)
        pull = single.pull_back(gates, units[:width].shape)
        matrix = torch.empty(size, size)
        for first in [*range(0, size - width, width), size - width]:
            block = slice(first, first + width)
            matrix[block] = pull(single.linear(gates, units[block])).reshape(width, size)
        return matrix

    def single(self) -> "MaskEquations":
        """The same in single precision, for ``linear``."""
        return replace(
            self,
            before=[_single_link(link) for link in self.before],
            link=_single_link(self.link),
            own=None if self.own is None else _single(self.own),
            behind=replace(self.behind, link=_single_link(self.behind.link)),
            gradient=_single(self.gradient),
        )

    @cached_property
    def _valued(self) -> Tensor:
        return self.masks.active & self.determined & self.masks.certain[:, None]

    @cached_property
    def _unit(self) -> float:
        return float(root_mean_square(self.masks.features[self._valued]))

    @cached_property
    def _known_behind(self) -> Tensor:
        assert self.behind.link.activation is not None
        return self.behind.link.activation.invertible(self.behind.outputs)

    @cached_property
    def _behind_target(self) -> Tensor:
        """Preactivations where the outputs tell them, else the bound 0."""
        assert self.behind.link.activation is not None
        values = self.behind.link.activation.inverse(self.behind.outputs)
        return torch.where(self._known_behind, values, 0.0)

    @cached_property
    def _unit_behind(self) -> float:
        return float(root_mean_square(self._behind_target[self._known_behind]))

    def _collect(
        self, parts: tuple[Tensor, Tensor, Tensor, Tensor], gates: Sequence[Tensor], constant: bool
    ) -> Tensor:
        """Residuals: from h; from a; from z less its target; and likewise one layer on."""
        features, gaps, outputs, gaps_behind = parts
        bound, _, reached = gates[-3:]
        results = []
        for equations, inputs in ((self.own, features), (self.gradient, outputs)):
            if equations is not None:
                rows = equations.rows
                products = inputs.reshape(len(inputs), -1, rows.shape[1]) @ rows.T
                results.append((products - equations.values.T if constant else products).flatten(1))
        if self.own is not None:
            results.append((bound * gaps / self._unit).flatten(1))
        results.append((reached * gaps_behind / self._unit_behind).flatten(1))
        return torch.cat(results, dim=1)


def rectify(link: Link, z: Tensor, blur: float) -> tuple[Tensor, Tensor]:
    """The activation of z and its slope; with a blur, those of a ReLU are means over noise.

    E max(z + n, 0) = z Φ(z/σ) + σ φ(z/σ), with the slope Φ(z/σ), where n is normal with the
    standard deviation σ that noise of standard deviation ``blur`` in the layer's input makes.
    """
    assert link.activation is not None
    if not blur or not link.activation.has_kink:
        outputs = link.activation.function(z)
        return outputs, link.activation.slope(outputs)
    gain = link.scale.abs() * link.weight.flatten(1).norm(dim=1)
    deviation = (blur * gain).clamp_min(1e-12).reshape((-1,) + (1,) * (z.ndim - 2))
    ratio = z / deviation
    density = (-ratio.square() / 2).exp() / math.sqrt(2 * math.pi)
    slope = torch.special.ndtr(ratio)
    return z * slope + deviation * density, slope


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
            found = system.equations.sum_of_squares(trial)
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
        self._pull = equations.pull_back(self.gates, inputs.shape)
        self.slope = self._pull(residual)

    def solve(self, damping: float, old: Preconditioner | None) -> tuple[Tensor, Preconditioner]:
        """The damped step, and the preconditioner for the next one."""
        if old is None or (old.is_worn and old.inputs is not self.inputs):
            old = self._preconditioner(damping)
        elif not old.shift / 30 <= max(damping, LEAST_SHIFT) <= old.shift * 30:
            old = Preconditioner.of(old.matrix, old.inputs, damping)
        shift = damping * float(old.matrix.diagonal().mean())

        def product(vector: Tensor) -> Tensor:
            image = self._pull(self._push(vector.reshape(self.inputs.shape)))
            return image.flatten() + shift * vector

        step, iterations = conjugate_gradients(
            product, -self.slope.flatten(), INEXACT, MOST_ITERATIONS, old
        )
        if iterations >= MOST_ITERATIONS and old.inputs is not self.inputs:
            return self.solve(damping, self._preconditioner(damping))
        old = replace(old, is_worn=iterations > MANY_ITERATIONS)
        return step.reshape(self.inputs.shape), old

    def _push(self, steps: Tensor) -> Tensor:
        return self.equations.linear(self.gates, steps)

    def _preconditioner(self, damping: float) -> Preconditioner:
        matrix = self.equations.normal_matrix(self.gates, self.inputs.shape)
        return Preconditioner.of(matrix, self.inputs, damping)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    tolerance: float,
    most: int,
    precondition: Callable[[Tensor], Tensor] = lambda vector: vector,
) -> tuple[Tensor, int]:
    """Solution of a positive definite system, from zero, and the number of iterations.

    Hestenes and Stiefel 1952.

    Args:
        product: by the matrix.
        right: of the system, flat.
        tolerance: relative, of the residual in the preconditioner's norm.
        most: iterations.
        precondition: approximate solution for one right-hand side.
    """
    solution, residual = torch.zeros_like(right), right
    direction = preconditioned = precondition(residual)
    size = first = residual @ preconditioned
    iterations = 0
    while iterations < most and size > tolerance**2 * first:
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
