"""Every score against a dense float64 computation, and the contract that all of them share."""

import copy
import math
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from scored import make_exposure, measure, measure_all, small_network
from torch import nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import Budget, BudgetExhausted, SampleJacobian
from flwr_leakage.params import ravel, subtract
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.records import Batch, LocalSchedule
from flwr_leakage.scores import (
    LAVP,
    GradientNorm,
    InfluenceKrylovBound,
    InfluenceLowerBound,
    InversionInfluence,
    JacobianNorm,
    LambdaMax,
    LayerShares,
    Lipschitz,
    NonlinearBound,
    SingularInfluence,
)
from flwr_leakage.scores.lipschitz import lipschitz_constants
from flwr_leakage.scores.plan import rank_samples

FILES = sorted((Path(__file__).parents[2] / "conf" / "score").glob("*.yaml"))
# own_records takes a data set, and what a list of defaults gathers is built from the other files.
CONFIGS = [
    path for path in FILES if "${" not in (text := path.read_text()) and "defaults:" not in text
]
SCORES = {
    "gradient_norm": GradientNorm(),
    "lambda_max": LambdaMax(),
    "influence_lower_bound": InfluenceLowerBound(),
    "inversion_influence": InversionInfluence((1e-3,), expected="always"),
    "influence_krylov_bound": InfluenceKrylovBound(),
    "lavp": LAVP(),
    "jacobian_norm": JacobianNorm(),
    "singular_influence": SingularInfluence(),
    "lipschitz": Lipschitz(num_draws=5),
    "nonlinear_bound": NonlinearBound(num_draws=1),
    "layer_shares": LayerShares(num_probes=3),
}


def dense(gradient_map: GradientMap, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """J of each sample as (S, N, P), and the gradients, in float64."""
    params = {name: value.double() for name, value in gradient_map.params.items()}
    operator = SampleJacobian(gradient_map, params, Batch(batch.inputs.double(), batch.targets))
    return operator.to_dense().transpose(1, 2), operator.value


def by_name(measurements) -> dict:
    return {m.name: m for m in measurements}


def assert_values(measurement, expected: torch.Tensor, rtol: float) -> None:
    assert None not in measurement.values, measurement.notes
    found = torch.tensor(measurement.values, dtype=torch.float64)
    torch.testing.assert_close(found, expected.double(), rtol=rtol, atol=0)


def test_gradient_norm(gradient_map, batch):
    (found,) = measure(GradientNorm(), gradient_map, make_exposure(gradient_map, batch))
    assert_values(found, dense(gradient_map, batch)[1].norm(dim=1), 1e-5)


def test_lavp_equals_dense_eigenvalues(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch)
    found = by_name(measure(LAVP(tolerance=1e-4), gradient_map, exposure))
    J, g = dense(gradient_map, batch)
    gram = J @ J.transpose(1, 2)
    along = (J @ g[..., None])[..., 0]
    squared = (g**2).sum(1)[:, None, None]
    angular = (gram - along[:, :, None] * along[:, None] / squared) / squared
    eigenvalues = torch.linalg.svdvals(J) ** 2
    directions = torch.linalg.eigvalsh(angular)
    assert_values(found["lambda_max"], eigenvalues[:, 0], 1e-3)
    assert_values(found["lambda_min"], eigenvalues[:, -1], 1e-2)
    assert_values(found["angular_max"], directions[:, -1], 1e-3)
    assert_values(found["angular_min"], directions[:, 0], 1e-2)
    fusion = (eigenvalues[:, 0] * directions[:, 0]).sqrt()
    assert_values(found["lavp_fusion"], fusion, 1e-2)
    (alone,) = measure(LambdaMax(), gradient_map, exposure)
    assert_values(alone, eigenvalues[:, 0], 1e-2)


def test_inversion_influence_equals_a_dense_solve(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    score = InversionInfluence((1e-2, 1e-4), tolerance=1e-4, expected="always", num_probes=40)
    found = by_name(measure(score, gradient_map, exposure))
    J, _ = dense(gradient_map, batch)
    # One step over four samples: each sample's share of δ is four times δ.
    difference = subtract(exposure.released.pseudo_gradient(), exposure.raw.pseudo_gradient())
    delta = 4 * ravel(difference).double()
    eigenvalues = torch.linalg.svdvals(J) ** 2
    for label, relative in (("1e-02", 1e-2), ("1e-04", 1e-4)):
        damping = relative * eigenvalues[:, :1]
        gram = J @ J.transpose(1, 2) + damping[:, :, None] * torch.eye(36).double()
        exact = torch.linalg.solve(gram, J @ delta).norm(dim=1)
        assert_values(found[f"inversion_influence_{label}"], exact, 1e-2)
        assert_values(found[f"inversion_influence_rmse_{label}"], exact / 6, 1e-2)
        expected = (eigenvalues / (eigenvalues + damping) ** 2).sum(1)
        assert_values(found[f"expected_influence_rmse_{label}"], (expected / 36).sqrt(), 0.1)


def test_influence_bounds_hold(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    found = by_name(measure(InfluenceLowerBound(), gradient_map, exposure))
    J, _ = dense(gradient_map, batch)
    delta = (
        4
        * ravel(
            subtract(exposure.released.pseudo_gradient(), exposure.raw.pseudo_gradient())
        ).double()
    )
    nominal = (J @ delta).norm(dim=1)
    assert_values(found["influence_nominal"], nominal, 1e-4)
    assert_values(
        found["influence_lower_bound"], nominal / torch.linalg.svdvals(J)[:, 0] ** 2, 2e-2
    )
    undamped = (torch.linalg.pinv(J.transpose(1, 2)) @ delta).norm(dim=1)
    for bound, exact in zip(found["influence_lower_bound"].values, undamped, strict=True):
        assert bound <= float(exact)


def test_krylov_bound_lies_between_the_lower_bound_and_the_influence(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    J, _ = dense(gradient_map, batch)
    difference = subtract(exposure.released.pseudo_gradient(), exposure.raw.pseudo_gradient())
    delta = 4 * ravel(difference).double()
    exact = (torch.linalg.pinv(J.transpose(1, 2)) @ delta).norm(dim=1) / 6
    previous = torch.zeros(4).double()
    for num_steps in (1, 5, 20, 36):
        score = InfluenceKrylovBound(num_steps, precision="float64")
        (found,) = measure(score, gradient_map, exposure)
        values = torch.tensor(found.values, dtype=torch.float64)
        assert bool((values >= previous).all()) and bool((values <= exact * (1 + 1e-6)).all())
        previous = values
    torch.testing.assert_close(previous, exact, rtol=1e-3, atol=0)
    loose = by_name(measure(InfluenceLowerBound(), gradient_map, exposure))["influence_lower_bound"]
    (tight,) = measure(InfluenceKrylovBound(5), gradient_map, exposure)
    assert all(a / 6 <= b for a, b in zip(loose.values, tight.values, strict=True))


def test_krylov_bound_probes_an_undefended_client(gradient_map, batch):
    found = by_name(
        measure(InfluenceKrylovBound(), gradient_map, make_exposure(gradient_map, batch))
    )
    assert found["influence_krylov_bound_rmse"].values == (0.0,) * 4
    assert "δ = 0" in found["influence_krylov_bound_rmse"].notes[0]
    assert all(v > 0 for v in found["unit_noise_influence_bound_rmse"].values)


def test_singular_influence_is_that_of_a_singular_vector(gradient_map, batch):
    found = by_name(measure(SingularInfluence(), gradient_map, make_exposure(gradient_map, batch)))
    J, _ = dense(gradient_map, batch)
    for index, name in ((0, "first_singular_influence"), (-1, "last_singular_influence")):
        right = torch.linalg.svd(J, full_matrices=False).Vh[:, index]
        solved = torch.linalg.pinv(J.transpose(1, 2)) @ right[..., None]
        assert_values(found[name], solved[..., 0].norm(dim=1), 1e-2)


def test_jacobian_norms(gradient_map, batch):
    score = JacobianNorm(num_probes=400)
    found = by_name(measure(score, gradient_map, make_exposure(gradient_map, batch)))
    J, _ = dense(gradient_map, batch)
    assert_values(found["jacobian_norm"], torch.linalg.svdvals(J)[:, 0], 1e-2)
    assert_values(found["jacobian_frobenius_norm"], J.norm(dim=(1, 2)), 0.1)


def test_layer_shares_add_up_and_match(gradient_map, batch):
    score = LayerShares(num_probes=400)
    found = by_name(measure(score, gradient_map, make_exposure(gradient_map, batch)))
    J, _ = dense(gradient_map, batch)
    first = 30  # parameters of the convolution: 27 weights and 3 biases
    share = (J[:, :, :first].norm(dim=(1, 2)) / J.norm(dim=(1, 2))) ** 2
    assert_values(found["layer_share/0"], share, 0.1)
    u = torch.linalg.svd(J).U[:, :, 0]
    image = (J.transpose(1, 2) @ u[..., None])[..., 0]
    top = (image[:, :first].norm(dim=1) / image.norm(dim=1)) ** 2
    assert_values(found["layer_top_share/0"], top, 0.05)
    for kind in ("layer_share", "layer_top_share"):
        for a, b in zip(found[f"{kind}/0"].values, found[f"{kind}/3"].values, strict=True):
            assert a + b == pytest.approx(1)


def test_lipschitz_of_a_linear_map_is_exact(generator):
    # g(x) = 3x: L = 3 for every n, and the angle is kept.
    x = torch.randn(2, 10, generator=generator, dtype=torch.float64)
    plain, angular = lipschitz_constants(lambda v: 3 * v, x, generator, num_draws=4)
    torch.testing.assert_close(plain, torch.full((2,), 3.0).double())
    torch.testing.assert_close(angular, torch.ones(2).double(), rtol=1e-6, atol=0)


def test_lipschitz_is_below_the_norm_of_the_jacobian(gradient_map, batch):
    found = by_name(
        measure(Lipschitz(num_draws=50), gradient_map, make_exposure(gradient_map, batch))
    )
    J, _ = dense(gradient_map, batch)
    for value, top in zip(
        found["lipschitz"].values, torch.linalg.svdvals(J)[:, 0].tolist(), strict=True
    ):
        assert 0.1 * top < value < 1.05 * top
    assert all(v > 0 for v in found["angular_lipschitz"].values)


def test_nonlinear_bound_of_a_quadratic_gradient():
    """With L = ½(wᵀx)² and no curvature of J in x known to be zero, μ_J = ‖∂J‖ is exact."""

    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0]))

        def forward(self, x):
            return self.w * x

    # g = w·x², J = 2wx, |J'| = 2|w|: μ_L is estimated as max(|J|, slopes nearby).
    gradient_map = GradientMap(Square(), loss=lambda out, _: 0.5 * (out**2).sum())
    batch = Batch(torch.tensor([[3.0]]), torch.tensor([0]))
    exposure = make_exposure(gradient_map, batch, noise_std=0.5)
    score = NonlinearBound(radius=1e-3, num_draws=3, precision="float64")
    (found,) = measure(score, gradient_map, exposure)
    delta = float(exposure.released.pseudo_gradient()["w"] - exposure.raw.pseudo_gradient()["w"])
    expected = abs(6 * delta) / (6 * 6 + 2 * 2 * abs(9 + delta))
    assert found.values[0] == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("name", SCORES)
def test_contract(name, gradient_map, batch):
    """Same seed same result, nothing changed, units and notes in order, one by one the same."""
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    before = copy.deepcopy((exposure, gradient_map.params))
    results = [measure_all({name: SCORES[name]}, gradient_map, exposure, 3) for _ in range(2)]
    assert results[0] == results[1]
    for measured in results[0]:
        assert len(measured.values) == len(batch)
        assert None not in measured.values, measured.notes
        assert measured.unit and measured.direction
    assert sum(m.products for m in results[0]) >= 0
    torch.testing.assert_close(exposure.private.inputs, before[0].private.inputs)
    torch.testing.assert_close(exposure.released.delta, before[0].released.delta)
    torch.testing.assert_close(gradient_map.params, before[1])


@pytest.mark.parametrize(
    "name", ["gradient_norm", "lambda_max", "influence_lower_bound", "lavp", "singular_influence"]
)
def test_little_memory_gives_the_same_values(name, gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    wide = type(SCORES[name])(precision="float64")
    # Room for one sample at a time, and for none of the dense matrices.
    narrow = type(SCORES[name])(precision="float64", memory_bytes=30_000)
    for left, right in zip(
        measure(wide, gradient_map, exposure),
        measure(narrow, gradient_map, exposure),
        strict=True,
    ):
        found = torch.tensor([math.nan if v is None else v for v in right.values])
        torch.testing.assert_close(found, torch.tensor(left.values), rtol=2e-2, atol=0)


def test_schedule_weights_with_momentum_equal_the_first_order_expansion(gradient_map, batch):
    schedule = LocalSchedule(1e-6, 5, 2, momentum=0.9)
    exposure = make_exposure(gradient_map, batch, schedule)
    _, gradients = dense(gradient_map, batch)
    weights = schedule.sample_weights(4)
    released = ravel(exposure.raw.pseudo_gradient()).double()
    torch.testing.assert_close(weights @ gradients, released, rtol=1e-1, atol=1e-1)
    assert weights.tolist() == pytest.approx([7.3555, 7.3555, 4.9950 - 0.0, 4.9950], rel=1)


def test_a_sample_that_the_schedule_never_uses_has_no_number(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, LocalSchedule(0.1, 1, 2), noise_std=1e-2)
    (found,) = measure(LambdaMax(), gradient_map, exposure)
    assert found.values[2:] == (None, None) and found.values[0] is not None
    assert "never uses" in found.notes[2]


def test_without_a_defense_the_influence_is_zero_and_says_why(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch)
    found = by_name(measure(InversionInfluence((1e-3,)), gradient_map, exposure))
    assert found["inversion_influence_1e-03"].values == (0.0,) * 4
    assert "δ = 0" in found["inversion_influence_1e-03"].notes[0]
    assert all(v > 0 for v in found["expected_influence_rmse_1e-03"].values)


def test_private_point_counts_what_an_encoding_hides(gradient_map, batch):
    encoded = Batch(batch.inputs * 0.9, batch.targets)
    exposure = make_exposure(gradient_map, batch, defended=encoded)
    at_defended = by_name(measure(InversionInfluence((1e-3,)), gradient_map, exposure))
    score = InversionInfluence((1e-5,), point="private", precision="float64")
    at_private = by_name(measure(score, gradient_map, exposure))
    assert at_defended["inversion_influence_1e-03"].values == (0.0,) * 4
    assert all(v > 0 for v in at_private["inversion_influence_1e-05"].values)


def test_a_zero_gradient_is_marked(batch):
    gradient_map = GradientMap(nn.Sequential(nn.Flatten(), nn.Linear(36, 4)), loss=_flat_loss)
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    found = by_name(measure_all(SCORES, gradient_map, exposure))
    assert found["gradient_norm"].values == (0.0,) * 4
    assert found["angular_max"].values == (None,) * 4
    assert "no direction" in found["angular_max"].notes[0]
    assert found["influence_lower_bound"].values == (None,) * 4
    assert found["inversion_influence_1e-03"].values == (None,) * 4
    assert "J = 0" in found["inversion_influence_1e-03"].notes[0]


def _flat_loss(logits, targets):
    return 0 * logits.sum()


def test_nan_weights_are_marked(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch)
    poisoned = {k: torch.full_like(v, math.nan) for k, v in exposure.params.items()}
    exposure = type(exposure)(
        poisoned, {}, exposure.private, exposure.defended, exposure.raw, exposure.released
    )
    for measured in measure_all(SCORES, gradient_map, exposure):
        assert measured.values == (None,) * 4
        assert measured.notes[0]


def test_one_poisoned_sample_leaves_the_others_alone(gradient_map, batch):
    inputs = batch.inputs.clone()
    inputs[1, 0, 0, 0] = math.nan
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    poisoned = Batch(inputs, batch.targets)
    exposure = type(exposure)(
        exposure.params, {}, poisoned, poisoned, exposure.raw, exposure.released
    )
    clean = by_name(
        measure_all(SCORES, gradient_map, make_exposure(gradient_map, batch, noise_std=1e-2))
    )
    for measured in measure_all(SCORES, gradient_map, exposure):
        assert measured.values[1] is None and "not finite" in measured.notes[1]
        others = [measured.values[i] for i in (0, 2, 3)]
        assert None not in others, measured
        assert others == pytest.approx([clean[measured.name].values[i] for i in (0, 2, 3)], rel=0.6)


def test_integer_inputs_and_wrong_labels_are_reasons(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch)
    for inputs, targets, reason in (
        (batch.inputs.long(), batch.targets, "floating-point"),
        (batch.inputs, torch.tensor([0, 1, 2, 4]), "0 … 3"),
        (batch.inputs, torch.tensor([0, 1, 2, -1]), "0 … 3"),
    ):
        bad = Batch(inputs, targets)
        broken = type(exposure)(exposure.params, {}, bad, bad, exposure.raw, exposure.released)
        (found,) = measure_all([LambdaMax()], gradient_map, broken)
        assert found.values == (None,) * 4 and reason in found.notes[0]
        with pytest.raises(ValueError, match=reason):
            measure(LambdaMax(), gradient_map, broken)


def test_batch_norm_in_train_mode_keeps_the_statistics_of_the_batch(batch):
    model = small_network(batch_norm=True).train()
    gradient_map = GradientMap(model, batch_norm="batch")
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    found = by_name(measure_all(SCORES, gradient_map, exposure))
    given = gradient_map.statistics(exposure.params, batch.inputs)
    fixed = gradient_map.with_batch_norm("running")
    params = {name: value.double() for name, value in fixed.params.items()}
    wide = Batch(batch.inputs.double(), batch.targets)
    J = SampleJacobian(fixed, params, wide, given).to_dense()
    assert_values(found["lambda_max"], torch.linalg.svdvals(J)[:, 0] ** 2, 1e-2)
    assert int(model[1].num_batches_tracked) == 0


def test_a_second_derivative_that_is_not_implemented_is_a_reason(batch):
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.out = nn.Linear(36, 8), nn.Linear(16, 4)

        def forward(self, x):
            z = self.linear(x.flatten(1)).reshape(-1, 4, 2)
            return self.out(torch.cdist(z, z.sin()).flatten(1))

    gradient_map = GradientMap(Distances())
    exposure = make_exposure(gradient_map, batch)
    found = by_name(
        measure_all(
            {"lambda_max": LambdaMax(), "lipschitz": Lipschitz(num_draws=2)}, gradient_map, exposure
        )
    )
    assert "cannot be differentiated" in found["lambda_max"].notes[0]
    assert None not in found["lipschitz"].values  # needs first derivatives only


def test_a_budget_stops_the_dear_scores_only(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    scores = {"gradient_norm": GradientNorm(), "lavp": LAVP(), "after": GradientNorm()}
    found = measure_all(scores, gradient_map, exposure, budget=Budget(products=20))
    assert None not in found[0].values and None not in found[2].values
    assert found[1].name == "lavp" and "20 products" in found[1].notes[0]
    assert found[1].products <= 20
    with pytest.raises(ValueError, match="≥ 0"):
        Budget(seconds=-1.0)
    late = measure_all([LambdaMax()], gradient_map, exposure, budget=Budget(seconds=0.0))
    assert "CPU seconds" in late[0].notes[0]
    assert issubclass(BudgetExhausted, RuntimeError)


def test_selected_samples_have_the_values_of_the_whole(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    (whole,) = measure_all([GradientNorm()], gradient_map, exposure)
    client = ClientSamples(gradient_map, exposure)
    chosen = sorted(rank_samples(client, "largest_gradient")[0][:2])
    assert sorted(whole.values)[-2:] == sorted(whole.values[i] for i in chosen)
    (part,) = measure_all([GradientNorm()], gradient_map, exposure, samples=chosen)
    for index in range(4):
        if index in chosen:
            assert part.values[index] == pytest.approx(whole.values[index])
        else:
            assert part.values[index] is None and "not selected" in part.notes[index]
    assert sorted(rank_samples(client, "random")[0]) == [0, 1, 2, 3]
    assert rank_samples(client, "first")[0] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="how must be"):
        rank_samples(client, "last")


def test_scores_share_their_lanczos_run(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch, noise_std=1e-2)
    scores = {"a": LambdaMax(), "b": LambdaMax()}
    first, second = measure_all(scores, gradient_map, exposure)
    assert first.values == second.values
    assert first.products > 0 and second.products == 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_builds_and_runs(path, gradient_map, batch):
    scores = instantiate(OmegaConf.load(path), _convert_="all")
    exposure = make_exposure(gradient_map, batch[:2], noise_std=1e-2)
    measurements = measure_all(scores or {}, gradient_map, exposure)
    assert all(None not in m.values for m in measurements), measurements
    assert bool(measurements) == (path.stem != "none")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: InversionInfluence((0.0,)), "relative_dampings"),
        (lambda: InversionInfluence(num_probes=0), "num_probes"),
        (lambda: LAVP(("lambda_mid",)), "quantities"),
        (lambda: JacobianNorm(num_probes=1), "num_probes"),
        (lambda: NonlinearBound(radius=0), "radius"),
        (lambda: LayerShares(num_probes=0), "num_probes"),
    ],
)
def test_wrong_settings_are_refused(build, reason):
    with pytest.raises(ValueError, match=reason):
        build()
