import pytest
import torch

from flwr_leakage.members.row_space import RowSpace, noise_of_spectrum


def test_residual_equals_a_least_squares_fit():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(7, 20, generator=generator, dtype=torch.float64)
    rows = torch.randn(5, 20, generator=generator, dtype=torch.float64)
    coefficients = torch.linalg.lstsq(matrix.T, rows.T).solution
    expected = (rows.T - matrix.T @ coefficients).square().sum(0)
    found = RowSpace.of(matrix).leftover(rows, torch.zeros(1))[:, 0]
    torch.testing.assert_close(found, expected)


def test_damped_leftover_equals_ridge_regression():
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    row = torch.randn(9, generator=generator, dtype=torch.float64)
    level = 0.03
    damping = level * torch.linalg.matrix_norm(matrix, 2) ** 2
    # min_c ‖h − Gᵀc‖² + λ‖c‖² = λ hᵀ(GᵀG + λI)⁻¹h
    inverse = torch.linalg.inv(matrix.T @ matrix + damping * torch.eye(9))
    expected = damping * row @ inverse @ row
    found = RowSpace.of(matrix).leftover(row[None], torch.tensor([level]))
    torch.testing.assert_close(found[0, 0], expected)


def test_agreement_equals_a_match_that_is_whitened_on_both_sides():
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def power(matrix):  # (A + λI)^(−1/2)
        values, vectors = torch.linalg.eigh(matrix + damping * torch.eye(len(matrix)))
        return vectors * values.rsqrt() @ vectors.T

    for shape in ((6, 9), (9, 6)):
        matrix, e, h = normal(*shape), normal(shape[0]), normal(shape[1])
        damping = 0.03 * torch.linalg.matrix_norm(matrix, 2) ** 2
        left, right = power(matrix @ matrix.T) @ e, power(matrix.T @ matrix) @ h
        expected = left @ matrix @ right / left.norm() / right.norm()
        found = RowSpace.of(matrix).agreement(e[None], h[None], torch.tensor([0.03]))
        torch.testing.assert_close(found[0, 0], expected)


def test_outer_products_tell_members_where_rows_do_not():
    """Of 40 samples behind 20 outputs and 30 inputs no residual is left."""
    generator = torch.Generator().manual_seed(4)
    e, h = torch.randn(80, 20, generator=generator), torch.randn(80, 25, generator=generator)
    space = RowSpace.of(e[:40].T @ h[:40])
    found = space.agreement(e, h, torch.tensor([1e-3]))[:, 0]
    assert found[:40].mean() > found[40:].mean() + 2 * found[40:].std()


def test_noise_is_read_from_the_spectrum_also_where_there_is_little_else():
    generator = torch.Generator().manual_seed(2)
    signal = torch.randn(60, 5, generator=generator) @ torch.randn(5, 200, generator=generator)
    noisy = signal + 0.03 * torch.randn(60, 200, generator=generator)
    assert noise_of_spectrum(RowSpace.of(noisy), 5) == pytest.approx(0.03, rel=0.05)
    assert RowSpace.of(noisy, 0.03).rank == 5
    alone = RowSpace.of(torch.randn(60, 200, generator=generator))
    assert noise_of_spectrum(alone, 30) == pytest.approx(1, rel=0.03)
    with pytest.raises(ValueError, match="rows must be below 60"):
        noise_of_spectrum(RowSpace.of(noisy), 60)


def test_the_smallest_singular_values_of_samples_are_no_noise():
    # A trained network's samples: the gradients of three are below 1e-6 of the largest one.
    generator = torch.Generator().manual_seed(4)
    left = torch.linalg.qr(torch.randn(10, 8, generator=generator).double()).Q
    right = torch.linalg.qr(torch.randn(2048, 8, generator=generator).double()).Q
    values = torch.tensor([7.8, 7.2, 4.8, 4.2, 2.2, 4.4e-5, 6e-6, 2.8e-6]).double()
    noise = 1.6e-8 * torch.randn(10, 2048, generator=generator).double()
    space = RowSpace.of(((left * values) @ right.T + noise).float())
    assert noise_of_spectrum(space, 8) == pytest.approx(1.6e-8, rel=0.2)


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 1), (torch.float64, 2)])
def test_what_counts_as_rounding_depends_on_the_precision(dtype, rank):
    assert RowSpace.of(torch.diag(torch.tensor([1.0, 1e-9], dtype=dtype))).rank == rank
