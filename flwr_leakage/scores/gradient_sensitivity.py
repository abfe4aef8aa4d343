"""Measure how sensitive each layer's gradient is to the input, or to an attribute of the input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.special import stdtrit
from torch import Tensor

from flwr_leakage.operators import LinearOperator, row_norms
from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.scores.base import Column, SampleScore
from flwr_leakage.scores.layer_shares import layer_slices


def sensitivity_along(
    operator: LinearOperator,
    directions: Float[Tensor, "S N"],
    slices: Mapping[str, Sequence[slice]],
) -> dict[str, Float[Tensor, " S"]]:
    """Return ‖J_lᵀd‖/‖d‖ (S,) for each layer l, by its name: the norm of the change of the layer's
    gradient per unit step of the input along d, to first order.

    J_l is the Jacobian of layer l's gradient by the input. If d is the change of the input by an
    attribute, such as the mean of images with glasses less that of images without, the result is
    the sensitivity to this attribute. ``operator`` are the Jacobians Jᵀ of S samples,
    ``directions`` (S, N) are d ≠ 0, and ``slices`` locate each layer in the flat gradient; see
    ``layer_slices``.
    """
    image = operator.matvec(directions)
    lengths = row_norms(directions).double()
    return {
        layer: row_norms(torch.cat([image[:, part] for part in parts], 1)).double() / lengths
        for layer, parts in slices.items()
    }


@dataclass(frozen=True)
class GradientSensitivity(SampleScore):
    """A score: E‖g_l(x + n) − g_l(x)‖/‖n‖ for small random n, of each layer l and of all layers.

    It is computed as E‖J_lᵀn‖/‖n‖, with J_l the Jacobian of layer l's gradient g_l by the input x.

    By Mo et al. (2021), a layer whose gradient changes more with the input reveals more about it.
    ``LAVP`` takes the opposite view, that a larger ``lambda_max`` is safer.

    The quantity ``gradient_sensitivity`` is that of all layers, ``gradient_sensitivity/LAYER`` that
    of one layer. For the sensitivity to an attribute see ``sensitivity_along``.

    Attributes:
        num_draws: the number of random directions n, of one Jacobian product each, ≥ 2.
    """

    num_draws: int = 20

    def __post_init__(self) -> None:
        if self.num_draws < 2:
            raise ValueError(f"num_draws must be at least 2, got {self.num_draws}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the column ``gradient_sensitivity`` of all layers together, and a column
        ``gradient_sensitivity/LAYER`` for each layer.
        """
        layers = layer_slices(problem.samples.params)
        slices = {"": [slice(None)], **{f"/{layer}": parts for layer, parts in layers.items()}}
        found = []
        for _ in range(self.num_draws):
            noise = normal_rows(problem.inputs.shape, draws).to(problem.inputs)
            found.append(sensitivity_along(problem.operator, noise, slices))
        quantile = float(stdtrit(self.num_draws - 1, 0.995))
        columns = []
        for layer in slices:
            values = torch.stack([lengths[layer] for lengths in found])
            name, mean = f"gradient_sensitivity{layer}", values.mean(0)
            bars = quantile * values.std(0) / self.num_draws**0.5
            columns.append(
                Column(name, mean, "1", "larger leaks more", (), bars, "within tolerance")
            )
        return columns
