from dataclasses import replace

import pytest
import torch
from attacked import observe
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flwr_leakage.attacks import FeatureMatching, pose
from flwr_leakage.attacks.exact import fading_prior
from flwr_leakage.attacks.exact.chain import trace_chain
from flwr_leakage.attacks.exact.fading_prior import Fading, Solver, fade
from flwr_leakage.attacks.exact.layer_equations import Knowledge, Whitened, gradient_equations
from flwr_leakage.attacks.exact.mask_equations import (
    MaskEquations,
    conjugate_gradients,
    gauss_newton,
    rectify,
)
from flwr_leakage.attacks.exact.masks import Masks, MaskSearch
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel
from flwr_leakage.spectral.image_prior import ImagePrior

SPEC = InputSpec((1, 12, 12), 4, (0.4,), (0.3,))


def generator():
    return torch.Generator().manual_seed(0)


def equations_of_case(certain=None, batch_norm=False, smooth=False):
    """The equations of a network's second layer with its true masks, and the true input."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1, stride=2)]
    if batch_norm:
        layers.append(nn.BatchNorm2d(12))
        nn.init.uniform_(layers[2].bias, -0.2, 0.2)
        nn.init.uniform_(layers[-1].running_mean, -0.2, 0.2)
        nn.init.uniform_(layers[-1].weight, -1.5, 1.5)
    layers += [nn.ReLU(), nn.Conv2d(12, 16, 3, padding=1, stride=1), nn.ReLU(), nn.Flatten()]
    gradient_map = GradientMap(nn.Sequential(*layers, nn.Linear(16 * 36, 4)))
    images = torch.rand(1, 1, 12, 12, generator=generator())
    if smooth:
        images = nn.functional.avg_pool2d(images, 5, 1, 2)
    observation = observe(gradient_map, Batch(images, torch.tensor([2])), LocalSchedule(1.0))
    problem = pose(gradient_map, SPEC, observation, ThreatModel()).to(torch.float64)
    first, second, third, last = trace_chain(problem)
    bias = problem.gradient[f"{last.name}bias"]
    features = mean_feature(problem.gradient[f"{last.name}weight"], bias).reshape(1, 16, 6, 6)
    errors = last.pull_back(bias[None]).reshape(features.shape) * (features > 0)
    errors_behind = errors
    known = gradient_equations(third, errors, problem.gradient[f"{third.name}weight"], 1e-4)
    truth = images.double()
    hidden = second.preactivation(first.preactivation(truth).clamp_min(0))
    scale = second.scale.reshape(-1, 1, 1)
    errors = third.pull_back(errors)
    active = (hidden > 0)[0].flatten(1)
    if certain is None:
        certain = torch.ones(12, dtype=torch.bool)
    masks = Masks(torch.zeros(active.shape, dtype=torch.float64), active, certain)
    assert second.bias_gradient is not None
    gradient = problem.gradient[f"{second.name}weight"]
    search = MaskSearch(
        known, (errors * scale)[0].flatten(1), second.bias_gradient, gradient.flatten(1), 1e-7
    )
    settled, determined = search.settle(masks)
    own = gradient_equations(
        second,
        errors * active.reshape(errors.shape) * scale,
        gradient,
        1e-6,
        certain,
    ).faded(1e-4)
    behind = Knowledge(third, features, errors_behind, known)
    masks = Masks(settled, active, certain)
    equations = MaskEquations.of([first], second, masks, determined, own, behind)
    return equations, truth, hidden[0].flatten(1)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("proven", [12, 5])
def test_the_truth_meets_the_equations_and_other_inputs_do_not(batch_norm, proven):
    equations, truth, _ = equations_of_case(torch.arange(12) < proven, batch_norm)
    assert float(equations.residual(truth)[0].square().sum()) < 1e-7
    other = truth + 0.01 * torch.randn(truth.shape, generator=generator(), dtype=torch.float64)
    assert float(equations.residual(other)[0].square().sum()) > 1e-3


def test_the_linear_map_and_the_normal_matrix_are_the_residuals_derivatives():
    equations, truth, _ = equations_of_case(torch.arange(12) < 7)
    step = torch.randn(truth.shape, generator=generator(), dtype=torch.float64)
    _, gates = equations.residual(truth)
    change = equations.linear(gates, step)
    _, expected = torch.func.jvp(lambda x: equations.residual(x)[0], (truth,), (step,))
    torch.testing.assert_close(change, expected)
    units = torch.eye(truth.numel(), dtype=torch.float64).reshape(-1, *truth.shape[1:])
    jacobian = equations.linear(gates, units)
    normal = equations.normal_matrix(gates, truth.shape).double()
    assert (normal - jacobian @ jacobian.T).norm() < 1e-5 * normal.norm()


@pytest.mark.parametrize("proven", [12, 9])
def test_gauss_newton_finds_the_input_exactly(proven):
    equations, truth, _ = equations_of_case(torch.arange(12) < proven)
    start = truth + 0.03 * torch.randn(truth.shape, generator=generator(), dtype=torch.float64)
    *_, found = gauss_newton(lambda _: equations, start, steps=20)
    assert float((found - truth).abs().max()) < 1e-4


def test_gauss_newton_ends_where_nothing_is_better():
    equations, truth, _ = equations_of_case()
    values = [
        float(equations.residual(x)[0].square().sum())
        for x in gauss_newton(lambda _: equations, torch.zeros_like(truth), steps=8)
    ]
    assert values == sorted(values, reverse=True)
    assert list(gauss_newton(lambda _: equations, truth, steps=0)) == []


def test_without_proven_masks_the_layer_behind_is_all_that_tells():
    equations, truth, hidden = equations_of_case()
    bare = MaskEquations.of(
        equations.before,
        equations.link,
        replace(equations.masks, certain=torch.zeros(12, dtype=torch.bool)),
        equations.determined,
        None,
        equations.behind,
    )
    residual, (_, bound, passes, _) = bare.residual(truth)
    assert float(residual.square().sum()) < 1e-7
    assert not bool(bound.any())
    assert torch.equal(passes.flatten(2)[0] > 0, hidden > 0)
    assert residual.shape[1] < equations.residual(truth)[0].shape[1]


@given(st.floats(-2, 2), st.floats(0.05, 1))
@settings(deadline=None)
def test_blurred_relus_are_means_over_noise(value, blur):
    link = equations_of_case()[0].before[0]
    z = torch.full((1, *link.output_shape), value, dtype=torch.float64)
    mean, slope = rectify(link, z, blur)
    deviation = blur * link.weight.flatten(1).norm(dim=1)
    quantiles = torch.special.ndtri((torch.arange(4000).double() + 0.5) / 4000)
    noisy = value + deviation[:, None] * quantiles
    torch.testing.assert_close(mean[0, :, 0, 0], noisy.clamp_min(0).mean(1), rtol=0, atol=1e-3)
    torch.testing.assert_close(slope[0, :, 0, 0], (noisy > 0).double().mean(1), rtol=0, atol=1e-3)
    assert torch.equal(rectify(link, z, 0.0)[0], z.clamp_min(0))


@pytest.mark.parametrize("proven", [12, 9])
def test_fading_leads_from_grey_to_where_gauss_newton_finds_the_input(proven):
    equations, truth, _ = equations_of_case(torch.arange(12) < proven, smooth=True)
    solver = Solver(ImagePrior.of(SPEC))
    fading = Fading(10.0, 1e-7, 0.5, 1.5, 60, sharpens=True)
    found, value = fade(equations, solver.prior.grey, fading, solver)
    assert value == pytest.approx(float(equations.residual(found)[0].square().sum()))
    assert float((found - truth).abs().max()) < 0.05
    *_, found = gauss_newton(lambda _: equations, found, steps=20)
    assert float((found - truth).abs().max()) < 1e-4


def test_fading_ends_where_it_is_enough():
    equations, *_ = equations_of_case()
    solver = Solver(ImagePrior.of(SPEC))
    grey = solver.prior.grey
    fading = Fading(10.0, 1e-7, 0.5, 1.5, 60, enough=1e9)
    _, value = fade(equations, grey, fading, solver)
    _, one_step = fade(equations, grey, fading._replace(last=9.0, enough=0.0), solver)
    assert value == one_step
    assert value > fade(equations, grey, fading._replace(enough=0.0), solver)[1]


def test_a_preconditioner_spares_iterations_of_the_same_step(monkeypatch):
    equations, truth, _ = equations_of_case(smooth=True)
    solver = Solver(ImagePrior.of(SPEC))
    residual, gates = equations.residual(solver.prior.grey)
    slope = solver.prior.pull(equations.pull_back(gates, truth.shape)(residual)[0])
    taken = []

    def counted(*args):
        step, iterations = conjugate_gradients(*args)
        taken.append(iterations)
        return step, iterations

    monkeypatch.setattr(fading_prior, "conjugate_gradients", counted)
    monkeypatch.setattr(fading_prior, "INEXACT", 1e-4)
    monkeypatch.setattr(fading_prior, "RANK", 60)
    monkeypatch.setattr(fading_prior, "MANY_ITERATIONS", 20)
    solver = Solver(solver.prior)
    steps = [solver.step(equations.single(), gates, slope, 1e-2, 1000) for _ in range(3)]
    assert taken[1] == taken[2] < taken[0] / 2
    torch.testing.assert_close(steps[1], steps[0], rtol=0, atol=1e-2 * float(steps[0].abs().max()))


def test_determined_outputs_are_exact_and_undetermined_ones_are_told():
    equations, _, hidden = equations_of_case()
    active, determined = equations.masks.active, equations.determined
    errors = (equations.masks.features - hidden).abs()[active & determined]
    assert float(errors.max()) < 1e-3 * float(hidden[active].square().mean().sqrt())


def test_supports_beyond_the_equations_rank_are_not_determined():
    rows = torch.linalg.qr(torch.randn(20, 6, generator=generator(), dtype=torch.float64))[0].T
    rows[:, 3] = 0  # no equation sees this position
    truth = torch.rand(2, 20, generator=generator(), dtype=torch.float64) + 0.1
    truth[1, 4:] = 0
    truth[1, 3] = 0
    whitened = Whitened(rows, rows @ truth.T, torch.linspace(1, 0.1, 6, dtype=torch.float64))
    zeros = torch.zeros(2, dtype=torch.float64)
    search = MaskSearch(whitened, torch.ones_like(truth), zeros, zeros[:, None], 1e-7)
    masks = Masks(torch.zeros_like(truth), truth > 0, torch.tensor([True, True]))
    settled, determined = search.settle(masks)
    assert not bool(determined[0].any())
    assert bool(determined[1, :3].all())
    torch.testing.assert_close(settled[1, :3], truth[1, :3])
    assert not bool(determined[:, 3].any())
    assert bool(determined[1, 4:].all())


def test_faded_equations_keep_strong_rows_and_lose_noisy_ones():
    rows = torch.eye(3, dtype=torch.float64)
    singular = torch.tensor([1.0, 1e-4, 1e-7], dtype=torch.float64)
    faded = Whitened(rows, torch.ones(3, 2, dtype=torch.float64), singular).faded(1e-4)
    expected = torch.tensor([1.0, 0.5**0.5, 1e-3], dtype=torch.float64)
    torch.testing.assert_close(faded.rows.diagonal(), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(faded.values[:, 1], faded.rows.diagonal())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("newton_steps", -1, "newton_steps must be at least 0, got -1"),
        ("rounds", 0, "rounds must be at least 1, got 0"),
        ("last_weight", 0.0, r"last_weight must lie in \(0, 0.0001\), got 0.0"),
        ("factor", 1.0, r"factor must lie in \(0, 1\), got 1.0"),
    ],
)
def test_options_out_of_range_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        FeatureMatching(**{name: value})
