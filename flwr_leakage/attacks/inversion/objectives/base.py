"""The interface of every objective."""

from typing import Protocol, runtime_checkable

from torch import Tensor

from flwr_leakage.params import Params


@runtime_checkable
class Objective(Protocol):
    """A distance of a candidate's gradient from the observed one."""

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return a scalar, differentiable in the candidate's gradient, and smallest if both agree.

        Args:
            candidate: the candidate's gradient g, by parameter name.
            observed: the observed gradient g*, by the same names.
        """
        ...


@runtime_checkable
class ProductObjective(Objective, Protocol):
    """An objective that is a function of ⟨g, g*⟩, ‖g‖² and ‖g*‖² alone.

    g is the candidate's gradient, and g* the observed one.
    """

    def of_products(self, inner: Tensor, squared: Tensor, observed_squared: Tensor) -> Tensor:
        """Return the objectives (A,) of A candidates.

        Args:
            inner: (A,) ⟨g, g*⟩.
            squared: (A,) ‖g‖².
            observed_squared: (A,) ‖g*‖².
        """
        ...
