import pytest
import torch

from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients

SIZE = 30


def system(condition):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
    vectors = torch.linalg.qr(vectors)[0]
    values = torch.logspace(0, torch.tensor(condition).log10().item(), SIZE, dtype=torch.float64)
    right = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return vectors @ values.diag() @ vectors.T, right


@pytest.mark.parametrize("condition", [1.5, 1e3])
def test_the_solution_is_that_of_a_direct_solver(condition):
    matrix, right = system(condition)
    found, iterations = conjugate_gradients(lambda v: matrix @ v, right, 1e-12, 200)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right))
    assert 0 < iterations < 200


def test_it_stops_at_the_tolerance_and_at_the_last_iteration():
    matrix, right = system(1e3)
    rough, few = conjugate_gradients(lambda v: matrix @ v, right, 1e-2, 200)
    _, many = conjugate_gradients(lambda v: matrix @ v, right, 1e-8, 200)
    assert few < many
    assert float((matrix @ rough - right).norm()) <= 1e-2 * float(right.norm())
    assert conjugate_gradients(lambda v: matrix @ v, right, 1e-8, 3)[1] == 3


def test_a_preconditioner_spares_iterations_and_zero_needs_none():
    matrix, right = system(1e3)
    inverse = torch.linalg.inv(matrix + 0.1 * torch.eye(SIZE))
    found, iterations = conjugate_gradients(
        lambda v: matrix @ v, right, 1e-10, 200, lambda v: inverse @ v
    )
    assert iterations < 10
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right))
    assert conjugate_gradients(lambda v: matrix @ v, 0 * right, 1e-10, 200)[1] == 0
