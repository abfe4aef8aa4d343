"""What the papers' scores need beyond the first set, against dense float64 formulas."""

import math

import pytest
import torch
from dense_jacobian import dense_jacobian
from scored import make_exposure, measure, measure_all, small_network
from torch import nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import BatchJacobian, Budget, UpdateJacobian
from flwr_leakage.params import ravel, subtract
from flwr_leakage.records import Batch, LocalSchedule
from flwr_leakage.scores import (
    AbsoluteInfluence,
    BatchLipschitz,
    CramerRaoBound,
    GradientSensitivity,
    JointInfluence,
    NonlinearBound,
    OneStepBounds,
    PoisoningBound,
    SingularInfluence,
    SingularSpectrum,
    UndampedInfluence,
)
from flwr_leakage.scores.gradient_sensitivity import sensitivity_along

NOISE = 1e-2


def by_name(measurements) -> dict:
    return {found.name: found for found in measurements}


def close(found, expected, rtol=1e-6) -> None:
    assert None not in found.values, found.notes
    shown = torch.tensor(found.values, dtype=torch.float64)
    torch.testing.assert_close(shown, expected.double(), rtol=rtol, atol=0)


def perturbation(exposure) -> torch.Tensor:
    difference = subtract(exposure.released.pseudo_gradient(), exposure.raw.pseudo_gradient())
    return ravel(difference).double()


def test_absolute_influence_equals_a_dense_solve(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    score = AbsoluteInfluence((1.0, 1e-4), tolerance=1e-5, precision="float64")
    found = measure(score, gradient_map, exposure)
    J, _ = dense_jacobian(gradient_map, batch)
    for damping, measured in zip((1.0, 1e-4), found, strict=True):
        gram = J @ J.transpose(1, 2) + damping * torch.eye(36)
        exact = torch.linalg.solve(gram, J @ (4 * perturbation(exposure))).norm(dim=1) / 6
        close(measured, exact, 1e-3)
    assert [m.name[-5:] for m in found] == ["1e+00", "1e-04"]
    for measured in measure(score, gradient_map, make_exposure(gradient_map, batch)):
        assert measured.values == (0.0,) * 4 and "δ = 0" in measured.notes[0]


def test_undamped_influence_is_the_pseudo_inverse(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    J, _ = dense_jacobian(gradient_map, batch)
    exact = (torch.linalg.pinv(J.transpose(1, 2)) @ (4 * perturbation(exposure))).norm(dim=1) / 6
    (direct,) = measure(UndampedInfluence(), gradient_map, exposure)
    close(direct, exact, 1e-6)
    assert direct.states == ("exact",) * 4
    (iterated,) = measure(UndampedInfluence(max_dense_inputs=0), gradient_map, exposure)
    close(iterated, exact, 1e-2)
    stopped = UndampedInfluence(max_dense_inputs=0, max_steps=4)
    (early,) = measure(stopped, gradient_map, exposure)
    assert early.states == ("lower bound",) * 4 and early.values == (None,) * 4
    assert "at least" in early.notes[0]


def test_undamped_influence_where_the_jacobian_lacks_rank(batch):
    torch.manual_seed(0)
    narrow = GradientMap(nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(9, 4)))
    exposure = make_exposure(narrow, batch, noise_std=NOISE)
    J, _ = dense_jacobian(narrow, batch)
    shortest = torch.linalg.pinv(J.transpose(1, 2), rtol=1e-9) @ (4 * perturbation(exposure))
    (found,) = measure(UndampedInfluence(), narrow, exposure)
    close(found, shortest.norm(dim=1) / 6, 1e-6)
    assert found.states == ("lower bound",) * 4 and "rank 9 of 36" in found.notes[0]


def test_singular_spectrum_and_its_ends(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch)
    found = by_name(measure(SingularSpectrum((0.0, 0.4, 1.0)), gradient_map, exposure))
    J, _ = dense_jacobian(gradient_map, batch)
    singular = torch.linalg.svdvals(J)
    for name, index in (("0", 0), ("0.4", 14), ("1", 35)):
        close(found[f"singular_influence_{name}"], 1 / singular[:, index], 1e-6)
    ends = by_name(measure(SingularInfluence(), gradient_map, exposure))
    for a, b in (("0", "first_singular_influence"), ("1", "last_singular_influence")):
        assert found[f"singular_influence_{a}"].values == pytest.approx(ends[b].values, rel=2e-2)
    # A unit δ along the middle singular vector moves the reconstruction by what is said.
    right = torch.linalg.svd(J[0], full_matrices=False).Vh[14]
    moved = torch.linalg.lstsq(J[0].T, right).solution.norm()
    assert found["singular_influence_0.4"].values[0] == pytest.approx(float(moved))
    with pytest.raises(ValueError, match="36 inputs"):
        measure(SingularSpectrum(max_dense_inputs=10), gradient_map, exposure)


@pytest.mark.parametrize("steps", [1, 3])
def test_joint_influence_of_a_whole_update(steps, gradient_map):
    draw = torch.Generator().manual_seed(2)
    batch = Batch(torch.rand(2, 1, 6, 6, generator=draw), torch.tensor([0, 3]))
    schedule = LocalSchedule(0.1, steps, 2)
    exposure = make_exposure(gradient_map, batch, schedule, NOISE)
    found = by_name(measure(JointInfluence(), gradient_map, exposure))
    params = {name: value.double() for name, value in gradient_map.params.items()}
    wide = Batch(batch.inputs.double(), batch.targets)
    A = UpdateJacobian(gradient_map, params, wide, schedule).to_dense()[0]
    solution = torch.linalg.lstsq(A, perturbation(exposure), driver="gelsd").solution
    close(found["joint_influence_rmse"], solution.reshape(2, 36).norm(dim=1) / 6, 1e-5)
    variances = torch.linalg.inv(A.T @ A).diagonal().reshape(2, 36).mean(1)
    close(found["joint_unit_noise_rmse"], variances.sqrt(), 1e-4)
    assert found["joint_influence_rmse"].states == ("exact",) * 2


def test_not_knowing_the_other_samples_never_helps(gradient_map):
    draw = torch.Generator().manual_seed(2)
    batch = Batch(torch.rand(2, 1, 6, 6, generator=draw), torch.tensor([0, 3]))
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    joint = by_name(measure(JointInfluence(), gradient_map, exposure))["joint_unit_noise_rmse"]
    (alone,) = measure(CramerRaoBound(1.0), gradient_map, exposure)
    assert all(a >= b for a, b in zip(joint.values, alone.values, strict=True))


def test_joint_influence_where_the_update_does_not_determine_the_batch(gradient_map, batch):
    # 144 inputs, 142 parameters.
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    (found,) = measure(JointInfluence(), gradient_map, exposure)
    assert found.states == ("lower bound",) * 4 and "of 144" in found.notes[0]
    (iterated,) = measure(JointInfluence(max_dense_inputs=0), gradient_map, exposure)
    assert "damped" in iterated.notes[0] and iterated.states == ("lower bound",) * 4
    late = make_exposure(gradient_map, batch, LocalSchedule(0.1, 1, 2), NOISE)
    (unused,) = measure(JointInfluence(), gradient_map, late)
    assert unused.values[2:] == (None, None) and "never uses" in unused.notes[3]
    spared = measure_all([JointInfluence()], gradient_map, exposure, budget=Budget(products=40))
    assert "40 products" in spared[0].notes[0] and spared[0].products <= 40


def test_batch_lipschitz_with_batch_norm_in_train_mode(batch):
    gradient_map = GradientMap(small_network(batch_norm=True).train(), batch_norm="batch")
    exposure = make_exposure(gradient_map, batch, noise_std=NOISE)
    found = by_name(measure(BatchLipschitz(num_draws=40), gradient_map, exposure))
    params = {name: value.double() for name, value in gradient_map.params.items()}
    wide = Batch(batch.inputs.double(), batch.targets)
    A = BatchJacobian(gradient_map, params, wide).to_dense()[0]
    plain = found["batch_lipschitz"]
    assert len(set(plain.values)) == 1 and plain.states == ("lower bound",) * 4
    # A maximum over random directions lies between the root mean square of σ and the largest.
    assert float(A.norm()) / 12 < plain.values[0] < float(torch.linalg.matrix_norm(A, 2))
    assert found["batch_angular_lipschitz"].values[0] > 0
    eval_mode = gradient_map.with_batch_norm("running")
    (other, _) = measure(BatchLipschitz(num_draws=40), eval_mode, exposure)
    assert other.values[0] != pytest.approx(plain.values[0], rel=0.05)


def test_gradient_sensitivity_is_a_mean_over_directions(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch)
    found = by_name(measure(GradientSensitivity(400), gradient_map, exposure))
    J, _ = dense_jacobian(gradient_map, batch)
    noise = torch.randn(36, 20_000, generator=torch.Generator().manual_seed(7)).double()
    for name, rows in (("", slice(None)), ("/0", slice(30)), ("/3", slice(30, None))):
        image = J[:, :, rows].transpose(1, 2) @ noise
        mean = (image.norm(dim=1) / noise.norm(dim=0)).mean(1)
        measured = found[f"gradient_sensitivity{name}"]
        close(measured, mean, 0.02)
        off = (torch.tensor(measured.values) - mean).abs()
        assert bool((off <= 1.3 * torch.tensor(measured.errors)).all())


def test_sensitivity_along_a_direction(gradient_map, batch):
    J, _ = dense_jacobian(gradient_map, batch)
    params = {name: value.double() for name, value in gradient_map.params.items()}
    wide = Batch(batch.inputs[:1].double(), batch.targets[:1])
    direction = torch.ones(1, 36).double()
    found = sensitivity_along(
        BatchJacobian(gradient_map, params, wide), direction, {"0": [slice(30)]}
    )
    expected = (J[0, :, :30].T @ direction[0]).norm() / 6
    assert float(found["0"]) == pytest.approx(float(expected))


class Scaled(nn.Module):
    """Logits w·(d·x): with their sum as the loss, the gradient d·x is linear in x, and J = d."""

    def __init__(self, d: torch.Tensor):
        super().__init__()
        self.w = nn.Parameter(torch.ones(len(d)))
        self.register_buffer("d", d)

    def forward(self, x):
        return self.w * (self.d * x.flatten(1))


def _sum(logits, targets):
    return logits.sum(1).mean()


def test_one_step_bounds_hold_exactly_for_a_linear_gradient():
    d = torch.linspace(1, 3, 9)
    gradient_map = GradientMap(Scaled(d), loss=_sum)
    batch = Batch(torch.rand(1, 1, 3, 3), torch.tensor([0]))
    exposure = make_exposure(gradient_map, batch)
    found = by_name(measure(OneStepBounds(start=0.2), gradient_map, exposure))
    assert found["upper_lipschitz"].values[0] == pytest.approx(3, rel=1e-2)
    assert found["lower_lipschitz"].values[0] == pytest.approx(1, rel=1e-2)
    # ℓ = Σ d²n², ∇ℓ = 2 d²n, with |n| = 0.2 everywhere; a step of 1/(2L²).
    loss, slope = d.square().sum(), 2 * d.square()
    drop = 1 - (d.square() * (1 - slope / (2 * 9)).square()).sum() / loss
    least, most = (found[f"one_step_drop_{end}"].values[0] for end in ("least", "most"))
    assert least == pytest.approx(float(slope.square().sum() / (4 * 9 * loss)), rel=2e-2)
    assert least <= float(drop) * 1.01 and float(drop) <= most <= 1


def test_poisoning_is_the_growth_of_the_loss(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch)
    rate = 0.05
    score = PoisoningBound(learning_rate=rate, precision="float64")
    found = by_name(measure(score, gradient_map, exposure))
    params = {name: value.double() for name, value in gradient_map.params.items()}
    wide = Batch(batch.inputs.double(), batch.targets)

    def loss_after(x: torch.Tensor) -> torch.Tensor:
        gradient = gradient_map(params, Batch(x, wide.targets[:1]))
        stepped = {name: value - rate * gradient[name] for name, value in params.items()}
        return gradient_map.loss_value(stepped, wide)

    steepest = torch.func.grad(loss_after)(wide.inputs[:1])
    assert found["poisoning_amplification"].values[0] == pytest.approx(float(steepest.norm()))
    for low, high in zip(
        found["poisoning_amplification"].values, found["poisoning_bound"].values, strict=True
    ):
        assert low <= high * (1 + 1e-2)
    wider = by_name(measure(PoisoningBound(0.1, learning_rate=rate), gradient_map, exposure))
    assert wider["poisoning_bound"].values > found["poisoning_bound"].values
    # A part of the samples is poisoned against all of them.
    part = by_name(measure(score, gradient_map, exposure.select([0])))
    assert part["poisoning_bound"].values[0] == pytest.approx(
        found["poisoning_bound"].values[0], rel=1e-6
    )


def test_settings_are_checked():
    for make in (
        lambda: AbsoluteInfluence((0.0,)),
        lambda: JointInfluence(relative_damping=0.0),
        lambda: SingularSpectrum((1.5,)),
        lambda: GradientSensitivity(1),
        lambda: OneStepBounds(start=0.0),
        lambda: PoisoningBound(-1.0),
        lambda: PoisoningBound(learning_rate=0.0),
        lambda: NonlinearBound(num_draws=0),
    ):
        with pytest.raises(ValueError, match="must"):
            make()


SCORES = [
    AbsoluteInfluence(),
    UndampedInfluence(),
    JointInfluence(),
    SingularSpectrum(),
    BatchLipschitz(num_draws=3),
    GradientSensitivity(3),
    OneStepBounds(),
    PoisoningBound(),
]


@pytest.mark.parametrize("score", SCORES, ids=lambda score: type(score).__name__)
def test_a_flat_gradient_is_told(score, batch):
    flat = GradientMap(
        nn.Sequential(nn.Flatten(), nn.Linear(36, 4)), loss=lambda logits, _: 0 * logits.sum()
    )
    exposure = make_exposure(flat, batch, noise_std=NOISE)
    for found in measure_all([score], flat, exposure):
        for index, value in enumerate(found.values):
            assert value is None or math.isfinite(value)
            assert value is not None or found.notes[index]
