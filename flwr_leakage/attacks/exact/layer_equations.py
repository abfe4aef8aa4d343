"""The input of a layer, solved from its outputs and its weight gradient as a convex problem."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.chain import Link, per_channel
from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS


@dataclass(frozen=True)
class Level:
    """The facts about one layer, whose outputs are φ(z(a)) for an input a.

    Attributes:
        link: the layer.
        known: the facts about its outputs, of the shape (1, *output_shape).
        errors: ∂L/∂(W ∗ a), (1, *output_shape).
        equations: the equations about a that the layer's weight gradient states.
    """

    link: Link
    known: Known
    errors: Tensor
    equations: Whitened

    @classmethod
    def of(cls, link: Link, known: Known, output_errors: Tensor, rank_tolerance: float) -> "Level":
        """Return the level of a layer whose outputs and their errors are known.

        Args:
            link: the layer, which holds its weight gradient.
            known: the facts about its outputs, of any shape with the right number of entries.
            output_errors: ∂L/∂outputs, of any shape with the right number of entries.
            rank_tolerance: see :meth:`Whitened.by_svd`.
        """
        shape = (1, *link.output_shape)
        known = known.map(lambda each: each.reshape(shape))
        assert link.activation.slope is not None
        errors = output_errors.reshape(shape)
        if link.activation.is_relu:
            errors = torch.where(known.mask.on, errors, 0.0)
        else:
            errors = errors * link.activation.slope(known.values)
        errors = errors * per_channel(link.scale, errors)
        equations = Whitened.by_svd(*link.equations(errors), rank_tolerance)
        return cls(link, known, errors, equations)

    @property
    def input_errors(self) -> Tensor:
        """∂L/∂a, (1, *input_shape)."""
        return self.link.pull_back(self.errors)

    def forward_residual(self, inputs: Tensor) -> Tensor:
        """Return the distance of each entry of ``z(a)`` from the told outputs, in the units of a.

        If an output gives only a bound on z, as a ReLU's zero does, only the excess of ``z(a)``
        over the bound counts.
        """
        link, outputs, activation = self.link, self.known.values, self.link.activation
        z = link.preactivation(inputs)
        assert activation.slope is not None
        binds, target = activation.binds(z, outputs), activation.target(outputs)
        slope = activation.slope(outputs)
        invertible = activation.invertible(outputs)
        weight = torch.where(invertible, slope / slope.max().clamp_min(1e-30), 1.0)
        residual = torch.where(binds & self.known.told, z - target, 0.0)
        return weight * residual / link.gain.mean().clamp_min(1e-30)


def solve_layer(
    level: Level, low: Tensor | float, high: Tensor | float, iterations: int
) -> tuple[Tensor, float]:
    """Return the input a of a layer behind an invertible activation, by a convex problem.

    The gradient's equations ``M(δ) a = ∂L/∂W`` hold exactly: a is one solution of them plus a
    vector of their null space. The vector meets the forward equations ``z(a) = φ⁻¹(outputs)`` and
    the range [low, high] of a in least squares.

    Args:
        level: the known outputs and equations of the layer.
        low: least value that a can have, as an output of the layer before.
        high: greatest value that a can have.
        iterations: largest number of iterations of L-BFGS.

    Returns:
        a (1, *input_shape), and the mean squared residual divided by a's mean square.
    """
    equations = level.equations
    null = equations.null_space()
    channels, freedom = equations.values.shape[1], null.shape[1]
    start = torch.zeros(1, freedom * channels, dtype=equations.rows.dtype)

    def to_inputs(flat: Tensor) -> Tensor:
        solution = equations.rows.T @ equations.values + null @ flat.reshape(freedom, channels)
        return solution.T.reshape(1, *level.link.input_shape)

    def residuals(flat: Tensor) -> Tensor:
        inputs = to_inputs(flat)
        outside = (low - inputs).clamp_min(0) + (inputs - high).clamp_min(0)
        forward = level.forward_residual(inputs)
        return torch.cat([forward.flatten(), outside.flatten()])

    if freedom:
        unit = float(residuals(start[0]).square().mean().clamp_min(1e-30))

        def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            gradient, value = torch.func.grad_and_value(
                lambda flat: residuals(flat).square().mean() / unit
            )(points[0])
            return value[None], gradient[None]

        start = LBFGS(iterations=iterations, tolerance=1e-20, relative_tolerance=1e-3)(
            evaluate, start
        ).points
    solution = to_inputs(start)
    error = residuals(start[0]).square().mean() / solution.square().mean().clamp_min(1e-30)
    return solution, float(error)
