"""Compute the inversion influence of perturbations along any singular vector of a Jacobian."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from flwr_leakage.per_sample import Precision, SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.records import State
from flwr_leakage.scores.base import FLAT, Column, Numbers, first_notes, notes_where
from flwr_leakage.scores.eigenvalue_mean import DenseScore
from flwr_leakage.spectral.dense import dense_spectrum


@dataclass(frozen=True)
class SingularSpectrum(DenseScore):
    """A score: the inversion influence 1/√λ_k of a unit perturbation along a singular vector of J.

    J ∈ R^{N×P} is the Jacobian of a sample's gradient, and λ_k the k-th largest eigenvalue of JJᵀ,
    which belongs to the k-th right singular vector of J.

    ``singular_influence_0.5`` is the influence at the median λ, ``…_0`` at the largest and ``…_1``
    at the smallest (Zhang et al. 2023, section 5.1 and figure 5). All are computed from the dense
    Jacobian, if N and the memory allow. ``SingularInfluence`` computes the two extremes alone,
    which is cheaper.

    Attributes:
        positions: the positions (k − 1)/(N − 1) in the spectrum, in [0, 1], rounded to the nearest
            k.
        max_dense_inputs: the largest N for which J is formed.
    """

    positions: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    max_dense_inputs: int = 1024
    precision: Precision = field(default="float64", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(self.positions))
        if not self.positions or min(self.positions) < 0 or max(self.positions) > 1:
            raise ValueError(f"positions must lie in [0, 1], got {self.positions}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return a column for each of the ``positions``.

        Raises:
            ValueError: the samples have too many inputs, or too little memory is allowed, to form
                the Jacobian.
        """
        size = (problem.operator.num_inputs, problem.operator.num_outputs)
        if not self.is_dense(problem.operator):
            raise ValueError(
                f"singular directions need the dense Jacobian: at most {self.max_dense_inputs} "
                f"inputs (max_dense_inputs) that fit into {self.memory_bytes:,} bytes, got "
                f"{size[0]} inputs and {size[1]} parameters."
            )
        singular = dense_spectrum(problem.operator).sqrt()
        top = singular[:, 0]
        slack = problem.rounding.to(top) * top
        columns = []
        for position in self.positions:
            own = singular[:, round(position * (size[0] - 1))]
            told = own > slack
            flat = notes_where(top == 0, FLAT)
            lost = [
                "" if sure else f"unresolved: at least {1 / limit:.3g}, as σ is within rounding"
                for sure, limit in zip(told.tolist(), slack.clamp_min(1e-300).tolist(), strict=True)
            ]
            values = torch.where(told, 1 / own, torch.nan)
            bars = 1 / (own - slack).clamp_min(1e-300) - values
            states: list[State] = [
                "exact" if sure else "lower bound" if some else "unresolved"
                for sure, some in zip(told.tolist(), (top > 0).tolist(), strict=True)
            ]
            name, unit = f"singular_influence_{position:g}", "model input per unit of gradient"
            found = Numbers(values, first_notes(flat, lost), bars, states)
            columns.append(found.column(name, unit, "larger is safer"))
        return columns
