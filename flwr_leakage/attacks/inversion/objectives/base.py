"""The call shape of every objective."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from flwr_leakage.params import Params


@runtime_checkable
class Objective(Protocol):
    """A distance of a candidate's gradient from the observed one; both keyed alike."""

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """A differentiable scalar, smallest where both agree."""
        ...


@runtime_checkable
class ProductObjective(Objective, Protocol):
    """An objective that is a function of ⟨g, g*⟩, ‖g‖² and ‖g*‖² alone."""

    def of_products(self, inner: Tensor, squared: Tensor, observed_squared: Tensor) -> Tensor:
        """The objective of one or many candidates, from (A,) of each."""
        ...
