"""The call shape of every objective."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from flwr_leakage.params import Params


@runtime_checkable
class Objective(Protocol):
    """A distance of a candidate's gradient from the observed one."""

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """A scalar, differentiable in the candidate, and smallest where both agree.

        Args:
            candidate: g, by parameter name.
            observed: g*, by the same names.
        """
        ...


@runtime_checkable
class ProductObjective(Objective, Protocol):
    """An objective that is a function of ⟨g, g*⟩, ‖g‖² and ‖g*‖² alone."""

    def of_products(self, inner: Tensor, squared: Tensor, observed_squared: Tensor) -> Tensor:
        """The objectives (A,) of A candidates.

        Args:
            inner: ⟨g, g*⟩, (A,).
            squared: ‖g‖², (A,).
            observed_squared: ‖g*‖², (A,).
        """
        ...
