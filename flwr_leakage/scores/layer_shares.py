"""Compute each layer's share in a sample's Jacobian, which shows the layers that leak most."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws, sign_rows
from flwr_leakage.scores.base import (
    Column,
    SampleScore,
    mean_with_error,
    notes_where,
)


def layer_slices(params: dict[str, Tensor]) -> dict[str, list[slice]]:
    """Return the slices of each layer's weight and bias in the flat gradient, by the layer's name.
    ``params`` are in the order of the flat gradient.
    """
    slices: dict[str, list[slice]] = {}
    start = 0
    for name, value in params.items():
        layer = name.rpartition(".")[0] or name
        slices.setdefault(layer, []).append(slice(start, start + value.numel()))
        start += value.numel()
    return slices


@dataclass(frozen=True)
class LayerShares(SampleScore):
    """A score: each layer's share of ‖J‖_F² and of λmax, for a sample's Jacobian J.

    The shares of layer l are ‖J_l‖_F²/‖J‖_F² and ‖J_lᵀv₁‖²/λmax, with J_l the layer's columns of J,
    and λmax and v₁ the largest eigenvalue of JJᵀ and its eigenvector.

    As JJᵀ = Σ_l J_lJ_lᵀ, both shares sum to one over the layers. The first is a layer's share of
    the update's sensitivity to all input directions, estimated by vectors of random signs
    (Hutchinson 1990). The second is its share along v₁ alone, the input direction that the update
    reveals best.

    Attributes:
        num_probes: the number of vectors of random signs, of one Jacobian product each.
        tolerance: the relative error to which λmax is computed.
        max_steps: the largest number of products with JJᵀ in the search for λmax.
    """

    num_probes: int = 20
    tolerance: float = 1e-2
    max_steps: int = 60

    def __post_init__(self) -> None:
        if self.num_probes < 1:
            raise ValueError(f"num_probes must be at least 1, got {self.num_probes}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return for each layer the columns ``layer_share/…``, its share of ‖J‖_F², and
        ``layer_top_share/…``, its share of the largest eigenvalue of JJᵀ. J is a sample's Jacobian.
        """
        slices = layer_slices(problem.samples.params)
        probes = []
        for _ in range(self.num_probes):
            signs = sign_rows(problem.inputs.shape, draws)
            probes.append(_squares(problem.operator.matvec(signs.to(problem.inputs)), slices))
        drawn = torch.stack(probes)
        totals = drawn.sum(1)
        shares = drawn.sum(0) / totals.sum(0)
        # To first order, the error of a ratio of means is the mean of these residuals, whose spread
        # gives the error bar.
        residuals = (drawn - shares * totals[:, None]) / totals.mean(0)
        bars = mean_with_error(residuals.flatten(1))[1].view_as(shares) + 4 * problem.rounding
        top = problem.largest(self.tolerance, self.max_steps)
        along = _squares(problem.operator.matvec(top.vectors), slices)
        part = along / along.sum(0)
        # If a unit vector is off by an angle φ, the squared length p of a part of it is off by at
        # most 2φ√p + φ².
        slips = top.angle * (2 * part.sqrt() + top.angle) + 4 * problem.rounding
        flat = notes_where(along.sum(0) == 0, "J = 0: no layer tells about the input")
        return [
            Column(
                f"{kind}/{layer}", value, "1", "larger leaks more", flat, error, "within tolerance"
            )
            for kind, values, errors in (
                ("layer_share", shares, bars),
                ("layer_top_share", part, slips),
            )
            for layer, value, error in zip(slices, values, errors, strict=True)
        ]


def _squares(image: Tensor, slices: dict[str, list[slice]]) -> Tensor:
    """Return the squared norm (L, S) of each layer's entries in ``image``, S flat gradients (S, P).

    ``slices`` are the slices of the entries of the L layers, by the layer's name.
    """
    squared = image.double() ** 2
    return torch.stack(
        [torch.cat([squared[:, s] for s in where], 1).sum(1) for where in slices.values()]
    )
