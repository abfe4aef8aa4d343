import pytest
import torch

from flwr_leakage.attacks.exact.quadratic_lifting import fits, lifted_columns
from flwr_leakage.attacks.exact.sparse_columns import (
    extreme_ray,
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


def features_alike(samples=24, entries=240, seed=0):
    """ReLU outputs of samples that have most of their size in common, a third of them zero."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.rand(entries, 1, generator=generator, dtype=torch.float64)
    own = torch.randn(entries, samples, generator=generator, dtype=torch.float64)
    columns = (common + own).clamp_min(0)
    return columns, *torch.linalg.qr(columns)


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_rays_from_mixtures_of_a_few_are_samples_and_many_of_them(noise):
    columns, basis, triangle = features_alike()
    generator = torch.Generator().manual_seed(1)
    if noise:
        noisy = columns + noise * torch.randn(
            columns.shape, generator=generator, dtype=torch.float64
        )
        basis, triangle = torch.linalg.qr(noisy)
    directions = triangle / triangle.norm(dim=0)
    mixtures = torch.randn(24, 40, generator=generator, dtype=torch.float64)
    mixtures *= torch.rand(24, 40, generator=generator) < 0.3
    found = []
    for start in (triangle @ mixtures).T:
        ray = extreme_ray(basis, start)
        likeness = directions.T @ (ray / ray.norm())
        if likeness.max() > 1 - 100 * max(noise, 1e-6) ** 2:
            found.append(int(likeness.argmax()))
    assert len(found) >= 20
    assert len(set(found)) >= 10


def test_no_ray_where_nothing_is_nonnegative():
    basis, _ = torch.linalg.qr(torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]).double())
    assert extreme_ray(basis, torch.ones(2, dtype=torch.float64)) is None


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


def test_lifting_finds_all_columns_without_a_start():
    generator = torch.Generator().manual_seed(3)
    units, samples, directions = 100, 6, 3
    assert fits(units, samples, directions) and not fits(units, 12, directions)
    behind = torch.randn(units, directions, generator=generator, dtype=torch.float64)
    errors = torch.randn(directions, samples, generator=generator, dtype=torch.float64)
    masks = torch.rand(units, samples, generator=generator) < 0.5
    left, triangle = torch.linalg.qr((behind @ errors) * masks)
    found = lifted_columns(left, behind, generator)
    cosines = (found.T @ (triangle / triangle.norm(dim=0))).abs()
    assert sorted(cosines.argmax(0).tolist()) == list(range(samples))
    assert cosines.amax(0).min() > 1 - 1e-10
