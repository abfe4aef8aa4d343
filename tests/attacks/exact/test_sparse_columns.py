import pytest
import torch

from flwr_leakage.attacks.exact.batch_masks import (
    null_vector,
    sparsest,
    zero_entries,
)


def planted(units=120, samples=5, seed=0):
    """Sparse columns, an orthonormal basis of their span, and the columns in it."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(units, samples, generator=generator, dtype=torch.float64)
    columns *= torch.rand(units, samples, generator=generator) < 0.5
    basis, triangle = torch.linalg.qr(columns)
    return columns, basis, triangle


def test_the_sparsest_vector_of_a_span_is_one_of_its_sparse_columns():
    _, basis, triangle = planted()
    directions = triangle / triangle.norm(dim=0)
    found = {int((directions.T @ sparsest(basis, row)).abs().argmax()) for row in basis[:20]}
    best = [(directions.T @ sparsest(basis, row)).abs().max() for row in basis[:20]]
    assert len(found) >= 4
    assert sum(value > 1 - 1e-8 for value in best) >= 15


def test_nonnegative_vectors_are_found_with_their_sign():
    columns, _, _ = planted(seed=1)
    columns = columns.abs()
    basis, triangle = torch.linalg.qr(columns)
    values = basis @ sparsest(basis, triangle[:, 2] + 0.1, nonnegative=True)
    assert values.sum() > 0
    assert values.min() > -1e-3 * values.max()


def test_zeros_are_the_smaller_of_two_sizes():
    values = torch.tensor([1.0, 1e-8, -2.0, 3e-8, 0.5, -2e-8], dtype=torch.float64)
    zeros = zero_entries(values, 2)
    assert zeros.tolist() == [False, True, False, True, False, True]
    assert zero_entries(torch.linspace(1, 2, 6), 2) is None
    assert zero_entries(values, 6) is None


@pytest.mark.parametrize("noise", [1e-2, 1e-3, 1e-4])
def test_zeros_are_told_where_noise_leaves_no_gap(noise):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, generator=generator, dtype=torch.float64)
    values[:90] = 0
    values += noise * torch.randn(200, generator=generator, dtype=torch.float64)
    zeros = zero_entries(values, 24)
    assert zeros[:90].sum() >= 88
    assert zeros[90:].sum() <= 3


def test_a_null_vector_says_how_unique_it_is():
    matrix = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1e-6]], dtype=torch.float64)
    vector, ratio = null_vector(matrix)
    assert vector.abs().tolist() == [0, 0, 1]
    assert abs(ratio - 1e-6) < 1e-12
    assert null_vector(matrix[:2])[1] == 0
    assert null_vector(matrix[:1])[1] == 1  # two directions are left
