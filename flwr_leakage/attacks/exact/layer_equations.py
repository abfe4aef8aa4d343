"""What a layer's outputs and its weight's gradient tell about its input: a convex problem."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.chain import Link, per_channel
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS


@dataclass(frozen=True)
class Knowledge:
    """What is known of the input a of one layer, ``outputs = φ(z(a))``, to be used in a fit.

    Attributes:
        link: the layer that takes a.
        outputs: the layer's known activations, (1, *output_shape).
        errors: ∂L/∂(W ∗ a), (1, *output_shape).
        equations: those of its weight gradient.
        trust: in the outputs, a factor of their residuals that has or broadcasts to their shape.
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
        """From a layer's outputs and their errors ∂L/∂outputs, of as many entries each.

        Args:
            link: the layer.
            outputs: its activations.
            output_errors: ∂L/∂outputs.
            rank_tolerance: see :meth:`Whitened.by_svd`.
            trust: in the outputs, one or an entry for each.
        """
        shape = (1, *link.output_shape)
        outputs = outputs.reshape(shape)
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
        """How far ``z(a)`` is from what the outputs tell, per entry, in units of typical a."""
        link = self.link
        z = link.preactivation(inputs)
        known = link.activation.invertible(self.outputs)
        residual = torch.where(known, z - link.activation.inverse(self.outputs), z.clamp_min(0))
        slope = link.activation.slope(self.outputs)
        weight = torch.where(known, slope / slope.max().clamp_min(1e-30), 1.0)
        return self.trust * weight * residual / link.gain.mean().clamp_min(1e-30)

    def gradient_residual(self, inputs: Tensor) -> Tensor:
        """How far a is from the weight gradient's equations, whitened (r, C)."""
        return self.equations.residual(inputs)


def solve_layer(
    knowledge: Knowledge, low: Tensor | float, high: Tensor | float, iterations: int
) -> tuple[Tensor, float]:
    """Find the input a of a layer behind an invertible activation, a convex problem.

    The gradient's equations ``M(δ) a = ∂L/∂W`` hold exactly, as a is sought in coordinates of
    their null space; the forward equations ``z(a) = φ⁻¹(outputs)`` and the range [low, high] of a
    are met in least squares.

    Args:
        knowledge: of the layer.
        low: least value that a can have, as an output of the layer before.
        high: greatest one.
        iterations: of L-BFGS.

    Returns:
        a (1, *input_shape) and the mean squared residual, relative to a's mean square.
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
