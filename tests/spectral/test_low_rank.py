import pytest
import torch

from flwr_leakage.spectral.low_rank import LowRank

SIZE = 40


def falling(rank=SIZE):
    """A matrix with eigenvalues 1, ½, ¼ … and its eigenvectors, in double precision."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    vectors = torch.linalg.qr(vectors)[0]
    values = 0.5 ** torch.arange(SIZE).double() * (torch.arange(SIZE) < rank)
    return vectors @ values.diag() @ vectors.T, vectors


def test_a_matrix_of_low_rank_is_found_from_as_many_columns():
    matrix, _ = falling(rank=5)
    chosen = torch.tensor([3, 7, 11, 20, 31])
    found = LowRank.from_columns(matrix[chosen], chosen)
    torch.testing.assert_close(found.vectors.T @ found.values.diag() @ found.vectors, matrix)
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(5).double())


def test_values_fall_and_do_not_exceed_the_eigenvalues():
    matrix, _ = falling()
    found = LowRank.from_columns(matrix[:12], torch.arange(12)).values
    assert bool((found.diff() <= 0).all())
    assert bool((found <= torch.linalg.eigvalsh(matrix).flip(0)[:12] + 1e-12).all())


@pytest.mark.parametrize("shift", [1e-1, 1e-3])
def test_the_preconditioner_lowers_the_condition(shift):
    matrix, _ = falling()
    shifted = matrix + shift * torch.eye(SIZE)
    precondition = LowRank.from_columns(matrix[:20], torch.arange(20)).preconditioner(shift)
    inverse = torch.stack([precondition(unit) for unit in torch.eye(SIZE).double()])
    torch.testing.assert_close(inverse, inverse.T)
    values = torch.linalg.eigvals(inverse @ shifted).real
    assert float(values.min()) > 0
    assert float(values.max() / values.min()) < 2
    assert float(torch.linalg.cond(shifted)) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_and_zero_are_no_obstacle(dtype):
    matrix = falling(rank=2)[0].to(dtype)
    for columns in (matrix[:30], torch.zeros(30, SIZE, dtype=dtype)):
        found = LowRank.from_columns(columns, torch.arange(30))
        vector = torch.ones(SIZE, dtype=dtype)
        assert bool(found.preconditioner(1e-2)(vector).isfinite().all())
