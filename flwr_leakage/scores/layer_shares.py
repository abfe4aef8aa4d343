"""Compute the share of every layer in JJᵀ, which shows the layers that leak most."""

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
    states_of,
)


def layer_slices(params: dict[str, Tensor]) -> dict[str, list[slice]]:
    """Return the slice of each layer in the flat gradient, with weight and bias together."""
    slices: dict[str, list[slice]] = {}
    start = 0
    for name, value in params.items():
        layer = name.rpartition(".")[0] or name
        slices.setdefault(layer, []).append(slice(start, start + value.numel()))
        start += value.numel()
    return slices


@dataclass(frozen=True)
class LayerShares(SampleScore):
    """‖J_l‖_F²/‖J‖_F² and ‖J_lᵀv₁‖²/λmax of every layer l, J_l its columns in J.

    JJᵀ = Σ_l J_lJ_lᵀ is a sum over layers, so that both shares add up to one over the layers. The
    first is a layer's share in all that the update tells about the input. It is estimated from
    random signs (Hutchinson 1990). The second is its share along v₁, the input direction that the
    update tells most about.

    Attributes:
        num_probes: random signs, one product each.
        tolerance: relative error to which λmax is computed.
        max_steps: most products of JJᵀ in the search for λmax.
    """

    num_probes: int = 20
    tolerance: float = 1e-2
    max_steps: int = 60

    def __post_init__(self) -> None:
        if self.num_probes < 1:
            raise ValueError(f"num_probes must be at least 1, got {self.num_probes}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return ``layer_share/…`` and ``layer_top_share/…`` for each layer."""
        slices = layer_slices(problem.samples.params)
        probes = []
        for _ in range(self.num_probes):
            signs = sign_rows(problem.inputs.shape, draws)
            probes.append(_squares(problem.operator.matvec(signs.to(problem.inputs)), slices))
        drawn = torch.stack(probes)
        totals = drawn.sum(1)
        shares = drawn.sum(0) / totals.sum(0)
        # To first order, a ratio of means errs as the mean of these residuals.
        residuals = (drawn - shares * totals[:, None]) / totals.mean(0)
        bars = mean_with_error(residuals.flatten(1))[1].view_as(shares) + 4 * problem.rounding
        top = problem.largest(self.tolerance, self.max_steps)
        along = _squares(problem.operator.matvec(top.vectors), slices)
        part = along / along.sum(0)
        # A unit vector that is off by an angle φ has squared entries that are off by 2φ√ + φ².
        slips = top.angle * (2 * part.sqrt() + top.angle) + 4 * problem.rounding
        flat = notes_where(along.sum(0) == 0, "J = 0: no layer tells about the input")
        return [
            Column(
                f"{kind}/{layer}",
                value,
                "1",
                "larger leaks more",
                flat,
                error,
                states_of(value, "within tolerance"),
            )
            for kind, values, errors in (
                ("layer_share", shares, bars),
                ("layer_top_share", part, slips),
            )
            for layer, value, error in zip(slices, values, errors, strict=True)
        ]


def _squares(image: Tensor, slices: dict[str, list[slice]]) -> Tensor:
    """Return the squared length of each layer's part, (L, S)."""
    squared = image.double() ** 2
    return torch.stack(
        [torch.cat([squared[:, s] for s in where], 1).sum(1) for where in slices.values()]
    )
