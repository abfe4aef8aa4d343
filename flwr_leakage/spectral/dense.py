"""Compute all eigenvalues of AᵀA from the dense matrix, in float64."""

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.spectral.estimate import Estimate

_SAFETY = 10.0


def dense_bytes(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> int:
    """Return about how many bytes ``dense_spectrum`` takes for one matrix A (P, N): for A, a copy
    in float64, and its QR decomposition.
    """
    return num_outputs * num_inputs * (torch.finfo(dtype).bits // 8 + 16)


def gram_bytes(num_inputs: int) -> int:
    """Return about how many bytes ``gram_spectrum`` takes for one matrix A with N columns: for AᵀA
    (N, N) and its eigenvalue problem.
    """
    return 3 * 8 * num_inputs**2


def dense_spectrum(operator: LinearOperator) -> Float[Tensor, "S N"]:
    """Return the eigenvalues (S, N) of AᵀA, descending, as squared singular values of A in float64.

    By A = QR from N products, they resolve λmin/λmax down to ε², with ε the precision of the
    products; the eigenvalues of the matrix AᵀA would resolve it down to ε only.

    Args:
        operator: S matrices A.
    """
    spectra = []
    for matrix in operator.to_dense():
        triangle = torch.linalg.qr(matrix.double(), mode="r").R
        spectra.append(torch.linalg.svdvals(triangle) ** 2)
    stacked = torch.stack(spectra)
    missing = operator.num_inputs - stacked.shape[1]
    return torch.nn.functional.pad(stacked, (0, max(0, missing)))


def gram_spectrum(operator: LinearOperator) -> Float[Tensor, "S N"]:
    """Return the eigenvalues (S, N) of AᵀA, descending, from N products with AᵀA in float64, with
    memory for AᵀA (N, N) but not for A (P, N).

    Args:
        operator: S matrices A.

    Raises:
        ValueError: the operator works in float32, in which AᵀA is too inexact.
    """
    if operator.dtype != torch.float64:
        raise ValueError(f"a Gram matrix needs a float64 operator, got {operator.dtype}.")
    columns = [operator.gram(operator.unit(i)) for i in range(operator.num_inputs)]
    gram = torch.stack(columns, 2)
    return torch.linalg.eigvalsh((gram + gram.transpose(1, 2)) / 2).flip(1).clamp_min(0)


def estimate_of(
    eigenvalues: Float[Tensor, "S N"],
    index: int,
    tolerance: float,
    products: int,
    operator: LinearOperator,
    squared: bool,
) -> Estimate:
    """Return the eigenvalue with the given index among all of AᵀA, descending, with its error from
    rounding.

    A singular value has an absolute error of ρ σmax, with ρ the operator's rounding. If the
    eigenvalues are ``squared``, computed from the matrix AᵀA, there is a further error of ten units
    in the last place of λmax. If the relative error exceeds the tolerance, the value has not
    converged, and is an upper bound. ``products`` is the number of products to report.
    """
    value = eigenvalues[:, index]
    top = eigenvalues[:, 0]
    slip = _SAFETY * torch.finfo(torch.float64).eps * top if squared else 0.0
    bound = (value.sqrt() + operator.rounding.to(top) * top.sqrt()) ** 2 + slip
    relative = (bound - value) / value.clamp_min(torch.finfo(top.dtype).tiny)
    method = "dense Gram matrix in float64" if squared else "dense SVD in float64"
    resolved = (relative <= tolerance) & (value > 0)
    return Estimate(torch.where(resolved, value, bound), resolved, relative, products, method)


def inverse_sum(operator: LinearOperator) -> Estimate:
    """Return Σᵢ 1/λᵢ over all eigenvalues λᵢ of AᵀA, from the dense matrix A. Every singular value
    may have an error of ρ σmax, with ρ the operator's rounding. If that changes the sum by more
    than 1 %, it has not converged, and is a lower bound.

    Args:
        operator: S matrices A.
    """
    first = operator.products
    singular = dense_spectrum(operator).sqrt()
    slip = operator.rounding[:, None].to(singular) * singular[:, :1]
    least, most = (singular + slip) ** -2, (singular - slip).clamp_min(0) ** -2
    value = (singular**-2).sum(1)
    error = ((most - least).sum(1) / value).nan_to_num(torch.inf)
    resolved = error <= 1e-2
    spent = operator.products - first
    known = torch.where(resolved, value, least.sum(1))
    return Estimate(known, resolved, error, spent, "dense SVD in float64")
