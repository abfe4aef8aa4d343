import pytest
import torch
from torch.nn import functional as F

from flwr_leakage.attacks.exact.weight_equations import (
    Whitened,
    root_mean_square,
    weight_equations,
)
from flwr_leakage.attacks.network.calls import Geometry


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
def test_the_input_of_a_convolution_solves_the_equations_of_its_weights_gradient(stride, dilation):
    geometry = Geometry.of((3, 2), dilation, (1, 2), stride)
    inputs, weight = draw(1, 3, 7, 6), draw(5, 3, 3, 2).requires_grad_()
    outputs = F.conv2d(inputs, weight, None, stride, (1, 2), dilation)
    errors = draw(*outputs.shape, seed=1)
    gradient = torch.autograd.grad(outputs, weight, errors)[0]
    matrix, right = weight_equations(errors, gradient, inputs.shape[1:], geometry)
    assert matrix.shape == (5, 6, 42)
    assert right.shape == (5, 6, 3)
    torch.testing.assert_close(matrix @ inputs[0].flatten(1).T, right)


def test_the_input_of_a_linear_layer_does_too():
    inputs, errors = draw(1, 4), draw(1, 6, seed=1)
    matrix, right = weight_equations(errors, errors.T @ inputs, torch.Size([4]), None)
    torch.testing.assert_close(matrix @ inputs, right)


def test_whitened_equations_have_the_same_solutions_and_orthonormal_rows():
    matrix, inputs = draw(3, 4, 20), draw(20, 2, seed=1)
    matrix[2] = matrix[0] - matrix[1]  # rank 8
    found = Whitened.by_svd(matrix, matrix @ inputs, 1e-6)
    assert (found.num_equations, found.num_positions) == (8, 20)
    torch.testing.assert_close(found.rows @ found.rows.T, torch.eye(8, dtype=torch.float64))
    assert float(found.residual(inputs.T[None]).abs().max()) < 1e-10
    assert float(found.singular[0]) == pytest.approx(
        float(torch.linalg.matrix_norm(matrix.flatten(0, 1), 2))
    )


def test_faded_equations_keep_strong_rows_and_lose_noisy_ones():
    rows = torch.eye(3, dtype=torch.float64)
    singular = torch.tensor([1.0, 1e-4, 1e-7], dtype=torch.float64)
    faded = Whitened(rows, torch.ones(3, 2, dtype=torch.float64), singular).faded(1e-4)
    expected = torch.tensor([1.0, 0.5**0.5, 1e-3], dtype=torch.float64)
    torch.testing.assert_close(faded.rows.diagonal(), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(faded.values[:, 1], faded.rows.diagonal())


def test_the_root_mean_square_can_be_divided_by():
    assert float(root_mean_square(torch.tensor([3.0, 4.0]))) == pytest.approx(12.5**0.5)
    assert float(root_mean_square(torch.zeros(3))) > 0
    assert float(root_mean_square(torch.zeros(0))) == 1
