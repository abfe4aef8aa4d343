"""I²F and its lower bound for many perturbations of the same samples' gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import SampleJacobian, row_norms
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch
from flwr_leakage.spectral import gradient_start, largest_eigenvalue, solve_damped

UNDAMPED = 1e-6
"""ε/λmax of what is called undamped: J of a LeNet is singular to float32's rounding."""


@dataclass(frozen=True)
class Influences:
    """Of S samples, each with a perturbation δ of its own; norms, not divided by √N.

    Attributes:
        nominal: (S,) I_nom = ‖Jδ‖.
        lower_bound: (S,) I_lb = ‖Jδ‖/λmax(JJᵀ) (Zhang et al. 2023, eq. 5).
        damped: (S, E) ‖(JJᵀ + εI)⁻¹Jδ‖ (section 4), ε absolute.
        undamped: (S,) the same with ε = ``UNDAMPED`` λmax; NaN where it was not asked for or did
            not converge.
    """

    nominal: Float[Tensor, " S"]
    lower_bound: Float[Tensor, " S"]
    damped: Float[Tensor, "S E"]
    undamped: Float[Tensor, " S"]


class Influence:
    """δ ↦ I²F of S samples of one network; λmax is computed once, to 1 %.

    Args:
        network: in eval mode.
        batch: S samples.
        dtype: of the products.
    """

    def __init__(
        self, network: nn.Module, batch: Batch, dtype: torch.dtype = torch.float64
    ) -> None:
        gradient_map = GradientMap(network, device=next(network.parameters()).device)
        params = {name: value.to(dtype) for name, value in gradient_map.params.items()}
        buffers = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in gradient_map.buffers.items()
        }
        samples = Batch(batch.inputs.to(dtype), batch.targets)
        self.operator = SampleJacobian(gradient_map, params, samples, buffers)
        start = gradient_start(self.operator, make_generator(0, purpose="lanczos"))
        found = largest_eigenvalue(self.operator, start, 1e-2, 200)
        self.largest: Tensor = found.estimate.value
        self.products = found.estimate.products

    @property
    def gradients(self) -> Float[Tensor, "S P"]:
        """Each sample's own."""
        return self.operator.value

    def __call__(
        self, deltas: Float[Tensor, "S P"], dampings: Sequence[float], undamped: bool
    ) -> Influences:
        """Of one perturbation a sample.

        Args:
            deltas: δ.
            dampings: ε, absolute, > 0; may be empty.
            undamped: whether to go on to ``UNDAMPED``, which takes hundreds of products.
        """
        nominal = row_norms(self.operator.rmatvec(deltas)).double()
        damped = nominal.new_zeros(len(nominal), 0)
        if dampings:
            # Relative to a λmax of 1, the dampings are absolute.
            ones = torch.ones(len(nominal), dtype=torch.float64)
            solved = solve_damped(self.operator, deltas, tuple(dampings), 1e-2, 500, ones)
            damped = torch.where(solved.converged, solved.norms, torch.nan)
        least = torch.full_like(nominal, torch.nan)
        if undamped:
            solved = solve_damped(self.operator, deltas, (UNDAMPED,), 1e-2, 600, self.largest)
            least = torch.where(solved.converged, solved.norms, torch.nan)[:, 0]
        return Influences(nominal, nominal / self.largest, damped, least)
