import pytest
import torch

from flwr_leakage.spectral.cholesky import cholesky, cholesky_solve, gram


def test_a_matrix_that_rounding_made_indefinite_is_shifted_until_it_has_a_factor():
    matrix = torch.diag(torch.tensor([1.0, 1.0, -0.02]).double())
    factor, jitter = cholesky(matrix.clone(), 1e-5)
    assert jitter == pytest.approx(0.1)
    torch.testing.assert_close(factor @ factor.T, matrix + jitter * torch.eye(3).double())
    right = torch.arange(3).double()
    torch.testing.assert_close(factor @ factor.T @ cholesky_solve(factor, right), right)
    assert cholesky(torch.eye(2), 0.0)[1] == 0.0
    with pytest.raises(ArithmeticError, match="no Cholesky factor"):
        cholesky(torch.full((2, 2), torch.nan), 0.0)


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_half_a_gram_matrix_is_the_whole_one(rows):
    rows = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(gram(rows, panel=3), rows @ rows.T)
