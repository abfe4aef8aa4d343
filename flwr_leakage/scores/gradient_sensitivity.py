"""Measure how sensitive each layer's gradient is to the input, or to a latent attribute."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.special import stdtrit
from torch import Tensor

from flwr_leakage.operators import LinearOperator, row_norms
from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.records import State
from flwr_leakage.scores.base import Column, SampleScore
from flwr_leakage.scores.layer_shares import layer_slices


def sensitivity_along(
    operator: LinearOperator,
    directions: Float[Tensor, "S N"],
    slices: Mapping[str, Sequence[slice]],
) -> dict[str, Float[Tensor, " S"]]:
    """Return ‖J_lᵀd‖/‖d‖, how far each layer l's gradient moves along an input's direction.

    With d the change of the input that a latent attribute makes (say, the mean of images that have
    it less the mean of those that have it not), it is the sensitivity to that attribute.

    Args:
        operator: Jᵀ of S samples.
        directions: d, not zero.
        slices: the places of the entries of each layer in the gradient, see ``layer_slices``.
    """
    image = operator.matvec(directions)
    lengths = row_norms(directions).double()
    return {
        layer: row_norms(torch.cat([image[:, part] for part in parts], 1)).double() / lengths
        for layer, parts in slices.items()
    }


@dataclass(frozen=True)
class GradientSensitivity(SampleScore):
    """E‖g_l(x + n) − g_l(x)‖/‖n‖ for small random n, of every layer l and of all, as E‖J_lᵀn‖/‖n‖.

    The sensitivity of gradients to the original information (Mo et al. 2021): a layer whose
    gradient moves more with the input tells more about it, in that paper's reading. LAVP reads it
    the other way round (``lambda_max``). It is a mean over directions, of which ‖J‖ is the maximum.

    ``gradient_sensitivity`` is of all layers, ``gradient_sensitivity/LAYER`` of one. For a latent
    attribute there is ``sensitivity_along``.

    Attributes:
        num_draws: random directions, of one product each, ≥ 2.
    """

    num_draws: int = 20

    def __post_init__(self) -> None:
        if self.num_draws < 2:
            raise ValueError(f"num_draws must be at least 2, got {self.num_draws}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return one quantity for all layers together, and one for each."""
        layers = layer_slices(problem.samples.params)
        slices = {"": [slice(None)], **{f"/{layer}": parts for layer, parts in layers.items()}}
        found = []
        for _ in range(self.num_draws):
            noise = normal_rows(problem.inputs.shape, draws).to(problem.inputs)
            found.append(sensitivity_along(problem.operator, noise, slices))
        quantile = float(stdtrit(self.num_draws - 1, 0.995))
        states: list[State] = ["within tolerance"] * len(problem)
        columns = []
        for layer in slices:
            values = torch.stack([lengths[layer] for lengths in found])
            columns.append(
                Column(
                    f"gradient_sensitivity{layer}",
                    values.mean(0),
                    "1",
                    "larger leaks more",
                    (),
                    quantile * values.std(0) / self.num_draws**0.5,
                    states,
                )
            )
        return columns
