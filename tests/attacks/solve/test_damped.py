import pytest
import torch

from flwr_leakage.attacks.solve.damped import LeastSquares, damped_gauss_newton
from flwr_leakage.attacks.solve.linearization import Linearized


class Problem:
    """Residuals (1, R) of inputs (1, D), which counts normal matrices."""

    def __init__(self, function):
        self.function, self.computed = function, 0

    def sum_of_squares(self, inputs):
        return float(self.function(inputs).square().sum())

    def at(self, inputs):
        jacobian = torch.func.jacfwd(lambda x: self.function(x[None])[0])(inputs[0])

        def normal_matrix():
            self.computed += 1
            return (jacobian.T @ jacobian).float()

        linear = Linearized(self.function(inputs), lambda v: v @ jacobian.T, lambda u: u @ jacobian)
        return LeastSquares(linear, self.sum_of_squares, normal_matrix)


ROSENBROCK = Problem(lambda x: torch.stack([10 * (x[:, 1] - x[:, 0] ** 2), 1 - x[:, 0]], 1))
START = torch.tensor([[-1.2, 1.0]], dtype=torch.float64)


def solve(problem, start, steps=8, **settings):
    return damped_gauss_newton(problem.at, start, steps, **settings)


def test_the_valley_of_rosenbrock_is_followed_to_its_end():
    found = solve(ROSENBROCK, START, steps=60, progress=1.0, solved=1e-20)
    torch.testing.assert_close(found[-1], torch.ones_like(START), rtol=0, atol=1e-6)
    values = [ROSENBROCK.sum_of_squares(x) for x in found]
    assert values == sorted(values, reverse=True)
    assert values[0] < ROSENBROCK.sum_of_squares(START)


def test_it_ends_where_it_is_solved_where_nothing_is_gained_and_where_no_problem_is_posed():
    assert len(solve(ROSENBROCK, START, solved=1e9)) == 1
    assert solve(ROSENBROCK, torch.ones_like(START)) == []
    assert damped_gauss_newton(lambda _: None, START, 8) == []


@pytest.mark.parametrize(("largest", "is_kept"), [(1.0, True), (6.0, False)])
def test_the_normal_matrix_is_computed_anew_only_if_conjugate_gradients_take_long(largest, is_kept):
    # Slopes at the solution are 1 / cosh of the wanted values, and 1 at the start.
    wanted = torch.linspace(0, largest, 200, dtype=torch.float64)
    bent = Problem(lambda x: torch.asinh(x) - wanted)
    found = solve(bent, torch.zeros(1, 200).double(), steps=9, progress=1.0, solved=1e-9)
    assert len(found) > 2
    assert (bent.computed == 1) is is_kept
