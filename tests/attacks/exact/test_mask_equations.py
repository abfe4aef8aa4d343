import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import equations_of_case, masked_case

from flwr_leakage.attacks.exact.known import Known, single
from flwr_leakage.attacks.exact.mask_equations import MaskEquations, rectify
from flwr_leakage.attacks.exact.relu_fit import least_squares, normal_products
from flwr_leakage.attacks.solve.damped import damped_gauss_newton


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("proven", [12, 5])
def test_the_truth_meets_the_equations_and_other_inputs_do_not(batch_norm, proven):
    equations, truth, _ = equations_of_case(torch.arange(12) < proven, batch_norm)
    assert float(equations.residual(truth).square().sum()) < 1e-7
    other = truth + 0.01 * torch.randn(truth.shape, generator=generator(), dtype=torch.float64)
    assert float(equations.residual(other).square().sum()) > 1e-3


def test_the_linear_map_and_the_normal_matrix_are_the_residuals_derivatives():
    equations, truth, _ = equations_of_case(torch.arange(12) < 7)
    step = torch.randn(truth.shape, generator=generator(), dtype=torch.float64)
    linear = equations.linearise(truth)
    change = linear.push(step)
    _, expected = torch.func.jvp(equations.residual, (truth,), (step,))
    torch.testing.assert_close(change, expected)
    units = torch.eye(truth.numel(), dtype=torch.float64).reshape(-1, *truth.shape[1:])
    jacobian = linear.push(units)
    normal = normal_products(single(equations), truth, units.float(), block=100).flatten(1).double()
    assert (normal - jacobian @ jacobian.T).norm() < 1e-5 * normal.norm()
    there = torch.randn(change.shape, generator=generator(), dtype=torch.float64)
    back = linear.pull(there)
    assert float((back * step).sum()) == pytest.approx(float((there * change).sum()))


@pytest.mark.parametrize("proven", [12, 9])
def test_gauss_newton_finds_the_input_exactly(proven):
    equations, truth, _ = equations_of_case(torch.arange(12) < proven)
    start = truth + 0.03 * torch.randn(truth.shape, generator=generator(), dtype=torch.float64)
    *_, found = damped_gauss_newton(lambda x: least_squares(equations, x), start, 20)
    assert float((found - truth).abs().max()) < 1e-4


def test_gauss_newton_ends_where_nothing_is_better():
    equations, truth, _ = equations_of_case()
    values = [
        float(equations.residual(x).square().sum())
        for x in damped_gauss_newton(
            lambda x: least_squares(equations, x), torch.zeros_like(truth), 8
        )
    ]
    assert values == sorted(values, reverse=True)
    assert damped_gauss_newton(lambda x: least_squares(equations, x), truth, 0) == []


def test_without_proven_masks_the_layer_behind_is_all_that_tells():
    equations, truth, _ = equations_of_case()
    bare = MaskEquations.of(
        equations.before,
        equations.link,
        Known.nothing(equations.known.values),
        None,
        equations.behind,
    )
    residual = bare.residual(truth)
    assert float(residual.square().sum()) < 1e-7
    assert residual.shape[1] < equations.residual(truth).shape[1]


LINK = masked_case().chain[0]


@given(st.floats(-2, 2), st.floats(0.05, 1))
@settings(deadline=None)
def test_blurred_relus_are_means_over_noise(value, blur):
    z = torch.full((1, *LINK.output_shape), value, dtype=torch.float64)
    mean, slope = rectify(LINK, z, blur)
    deviation = blur * LINK.weight.flatten(1).norm(dim=1)
    quantiles = torch.special.ndtri((torch.arange(4000).double() + 0.5) / 4000)
    noisy = value + deviation[:, None] * quantiles
    torch.testing.assert_close(mean[0, :, 0, 0], noisy.clamp_min(0).mean(1), rtol=0, atol=1e-3)
    torch.testing.assert_close(slope[0, :, 0, 0], (noisy > 0).double().mean(1), rtol=0, atol=1e-3)
    assert torch.equal(rectify(LINK, z, 0.0)[0], z.clamp_min(0))


def test_told_outputs_are_exact():
    equations, _, hidden = equations_of_case()
    known = equations.known.map(lambda each: each.reshape(hidden.shape))
    errors = (known.values - hidden).abs()[known.mask.on & known.told]
    assert float(errors.max()) < 1e-3 * float(hidden[hidden > 0].square().mean().sqrt())
