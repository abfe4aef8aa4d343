"""The interface of every prior."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.records import InputSpec


@dataclass(frozen=True)
class PriorContext:
    """The attacker's knowledge about a candidate batch.

    Attributes:
        gradient_map: the model, for priors on its features.
        spec: the public facts about the data.
        params: the parameters θ_t.
        buffers: the statistics that the attacker normalises with, if in running mode.
        statistics: BatchNorm statistics that the threat model grants, or empty.
        first_step: (b, C, H, W) the candidate's inputs of the first local step, which
            ``statistics`` are compared with; all inputs if ``None``.
    """

    gradient_map: GradientMap
    spec: InputSpec
    params: Params
    buffers: Params
    statistics: Params
    first_step: Tensor | None = None


@runtime_checkable
class Prior(Protocol):
    """A penalty of candidate inputs, added to the objective."""

    def __call__(self, inputs: Tensor, context: PriorContext) -> Tensor:
        """Return the penalty of inputs (B, C, H, W) in model space, a scalar."""
        ...
