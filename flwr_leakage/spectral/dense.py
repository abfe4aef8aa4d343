"""The whole spectrum from the dense matrix, in float64."""

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.spectral.estimate import Estimate

_SAFETY = 10.0


def dense_bytes(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> int:
    """Return the approximate bytes of ``dense_spectrum`` for one map: A, a float64 copy, its QR."""
    return num_outputs * num_inputs * (torch.finfo(dtype).bits // 8 + 16)


def gram_bytes(num_inputs: int) -> int:
    """Return the approximate bytes of ``gram_spectrum`` for one map: AᵀA and its eigenvectors."""
    return 3 * 8 * num_inputs**2


def dense_spectrum(operator: LinearOperator) -> Float[Tensor, "S N"]:
    """Return the eigenvalues of AᵀA, descending, as squared singular values of A in float64.

    A is formed from N products and factored as QR; the singular values are those of R. They
    resolve λmin/λmax down to ε², with ε the precision of the products. The eigenvalues of a Gram
    matrix would resolve it down to ε only.
    """
    spectra = []
    for matrix in operator.to_dense():
        triangle = torch.linalg.qr(matrix.double(), mode="r").R
        spectra.append(torch.linalg.svdvals(triangle) ** 2)
    stacked = torch.stack(spectra)
    missing = operator.num_inputs - stacked.shape[1]
    return torch.nn.functional.pad(stacked, (0, max(0, missing)))


def gram_spectrum(operator: LinearOperator) -> Float[Tensor, "S N"]:
    """Return the eigenvalues of AᵀA, descending, from N Gram products in float64.

    The method needs no N×P memory.

    Raises:
        ValueError: the operator works in float32, in which a Gram matrix is useless.
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
    """Return one eigenvalue of a dense spectrum, not converged if it may be only rounding.

    A singular value has an absolute error of ρ σmax, with ρ the operator's rounding. An eigenvalue
    of a Gram matrix has a further error of ten units in the last place of λmax.
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
    """Return Σ1/λᵢ of AᵀA from the dense matrix, a sum that the smallest eigenvalues dominate.

    Every singular value may have an error of ρ σmax, with ρ the operator's rounding. If that
    changes the sum by more than 1 %, the sum has not converged, and its value is a lower bound.

    Args:
        operator: the operators A, of S blocks.
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
