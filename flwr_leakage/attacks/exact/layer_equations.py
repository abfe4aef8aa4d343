"""The input of a layer, solved from its outputs and its weight gradient as a convex problem."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.chain import Link, per_channel
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS


@dataclass(frozen=True)
class Knowledge:
    """The known outputs and equations of one layer, whose outputs are φ(z(a)) for an input a.

    Attributes:
        link: the layer.
        outputs: the layer's known outputs, (1, *output_shape).
        errors: ∂L/∂(W ∗ a), (1, *output_shape).
        equations: the equations about a that the layer's weight gradient states.
        trust: factor of the outputs' residuals, which broadcasts to their shape; 0 for unknown
            outputs.
    """

    link: Link
    outputs: Tensor
    errors: Tensor
    equations: Whitened
    trust: Tensor | float = 1.0

    @classmethod
    def of(
        cls,
        link: Link,
        outputs: Tensor,
        output_errors: Tensor,
        rank_tolerance: float,
        trust: Tensor | float = 1.0,
    ) -> "Knowledge":
        """Return the knowledge that a layer's outputs and their errors give.

        Args:
            link: the layer, which holds its weight gradient.
            outputs: its outputs, of any shape with the right number of entries.
            output_errors: ∂L/∂outputs, of any shape with the right number of entries.
            rank_tolerance: see :meth:`Whitened.by_svd`.
            trust: factor of the outputs' residuals, one for all or one for each.
        """
        shape = (1, *link.output_shape)
        outputs = outputs.reshape(shape)
        assert link.activation.slope is not None
        errors = output_errors.reshape(shape) * link.activation.slope(outputs)
        errors = errors * per_channel(link.scale, errors)
        equations = Whitened.by_svd(*link.equations(errors), rank_tolerance)
        if isinstance(trust, Tensor):
            trust = trust.reshape(shape).to(outputs.dtype)
        return cls(link, outputs, errors, equations, trust)

    @property
    def input_errors(self) -> Tensor:
        """∂L/∂a, (1, *input_shape)."""
        return self.link.pull_back(self.errors)

    def forward_residual(self, inputs: Tensor) -> Tensor:
        """Return the distance of each entry of ``z(a)`` from the known outputs, in the units of a.

        If an output gives only a bound on z, as a ReLU's zero does, only the excess of ``z(a)``
        over the bound counts.
        """
        link = self.link
        z = link.preactivation(inputs)
        activation = link.activation
        assert activation.slope is not None
        binds, target = activation.binds(z, self.outputs), activation.target(self.outputs)
        slope = activation.slope(self.outputs)
        known = activation.invertible(self.outputs)
        weight = torch.where(known, slope / slope.max().clamp_min(1e-30), 1.0)
        residual = torch.where(binds, z - target, 0.0)
        return self.trust * weight * residual / link.gain.mean().clamp_min(1e-30)


def solve_layer(
    knowledge: Knowledge, low: Tensor | float, high: Tensor | float, iterations: int
) -> tuple[Tensor, float]:
    """Return the input a of a layer behind an invertible activation, by a convex problem.

    The gradient's equations ``M(δ) a = ∂L/∂W`` hold exactly: a is one solution of them plus a
    vector of their null space. The vector meets the forward equations ``z(a) = φ⁻¹(outputs)`` and
    the range [low, high] of a in least squares.

    Args:
        knowledge: the known outputs and equations of the layer.
        low: least value that a can have, as an output of the layer before.
        high: greatest value that a can have.
        iterations: largest number of iterations of L-BFGS.

    Returns:
        a (1, *input_shape), and the mean squared residual divided by a's mean square.
    """
    equations = knowledge.equations
    null = equations.null_space()
    channels, freedom = equations.values.shape[1], null.shape[1]
    start = torch.zeros(1, freedom * channels, dtype=equations.rows.dtype)

    def to_inputs(flat: Tensor) -> Tensor:
        solution = equations.rows.T @ equations.values + null @ flat.reshape(freedom, channels)
        return solution.T.reshape(1, *knowledge.link.input_shape)

    def residuals(flat: Tensor) -> Tensor:
        inputs = to_inputs(flat)
        outside = (low - inputs).clamp_min(0) + (inputs - high).clamp_min(0)
        forward = knowledge.forward_residual(inputs)
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
