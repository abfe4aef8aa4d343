"""Linear operators for the Jacobian of the gradient map, with exact products both ways."""

from flwr_leakage.operators.angular import AngularJacobian
from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.operators.budget import Budget, BudgetExhausted, Meter
from flwr_leakage.operators.jacobian import (
    BatchJacobian,
    FunctionJacobian,
    SampleJacobian,
    UpdateJacobian,
    last_layer,
    sample_gradients,
)
from flwr_leakage.operators.lengths import row_norms

__all__ = [
    "AngularJacobian",
    "BatchJacobian",
    "Budget",
    "BudgetExhausted",
    "FunctionJacobian",
    "LinearOperator",
    "Meter",
    "SampleJacobian",
    "UpdateJacobian",
    "last_layer",
    "row_norms",
    "sample_gradients",
]
