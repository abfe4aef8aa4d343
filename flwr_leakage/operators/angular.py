"""Define the Jacobian of a gradient's direction: the curvature of a cosine attack's loss."""

import copy

from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.operators.lengths import row_norms


class AngularJacobian(LinearOperator):
    """The Jacobian (I − ĝĝᵀ) A / ‖g‖ of the direction ĝ = g/‖g‖ of a gradient g by the input x.

    A = ∂g/∂x is the Jacobian of g. With J = Aᵀ, the method ``gram`` multiplies by (JJᵀ −
    (Jg)(Jg)ᵀ/‖g‖²)/‖g‖², the Hessian of the cosine loss of a gradient inversion at the true input
    (Hong et al. 2024, theorem 4).

    Args:
        jacobian: the operator of S maps A: R^N → R^P, each the Jacobian of g at a point x of its
            own.
        gradients: (S, P) the gradients g at these points.

    Raises:
        ValueError: a gradient is zero, so that it has no direction.
    """

    def __init__(self, jacobian: LinearOperator, gradients: Float[Tensor, "S P"]) -> None:
        norms = row_norms(gradients)[:, None]
        if bool((norms == 0).any()):
            raise ValueError("gradients must not be zero: a zero gradient has no direction.")
        super().__init__(
            jacobian.num_blocks,
            jacobian.num_inputs,
            jacobian.num_outputs,
            like=gradients,
            meter=jacobian.meter,
            rounding=jacobian.rounding,
        )
        self._jacobian = jacobian
        self._norms = norms
        self._directions = gradients / norms
        self.removed = row_norms(jacobian.rmatvec(self._directions)) / norms[:, 0]
        """(S,) the norm ‖Aᵀĝ‖/‖g‖ of the part of A/‖g‖ that the projection I − ĝĝᵀ removes, for
        each Jacobian A of a gradient g with the direction ĝ."""

    def narrow(self, rows: Int[Tensor, " R"]) -> LinearOperator:
        """Return the operator of those of the S maps with the indices ``rows``, ascending."""
        narrowed = copy.copy(self)
        narrowed.num_blocks = len(rows)
        narrowed._jacobian = self._jacobian.narrow(rows)
        for name in ("rounding", "removed", "_norms", "_directions"):
            setattr(narrowed, name, getattr(self, name)[rows])
        return narrowed

    def _project(self, vectors: Tensor) -> Tensor:
        along = (self._directions * vectors).sum(1, keepdim=True)
        return (vectors - along * self._directions) / self._norms

    def _matvec(self, vectors: Tensor) -> Tensor:
        return self._project(self._jacobian._matvec(vectors))

    def _rmatvec(self, vectors: Tensor) -> Tensor:
        return self._jacobian._rmatvec(self._project(vectors))
