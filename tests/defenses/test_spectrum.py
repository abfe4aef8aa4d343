"""The spectral defenses against dense float64 linear algebra."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flwr_leakage.defenses import InfluenceNoise, LocalRound, TargetRisk
from flwr_leakage.defenses.influence_noise import allot_energy
from flwr_leakage.defenses.pruning import prune_update
from flwr_leakage.defenses.spectrum import SampleSpectra, sample_jacobian
from flwr_leakage.defenses.target_risk import PRUNE_RATIOS, inversion_influence
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.operators import UpdateJacobian
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, LocalSchedule, Update

N = 9


def draws_of(seed: int) -> Reproducible:
    return Reproducible(torch.Generator().manual_seed(seed))


def make(
    schedule: LocalSchedule | None = None, batch_norm: bool = False
) -> tuple[Update, LocalRound]:
    torch.manual_seed(0)
    norm: list[nn.Module] = [nn.BatchNorm1d(6)] if batch_norm else []
    model = nn.Sequential(nn.Flatten(), nn.Linear(N, 6), *norm, nn.Sigmoid(), nn.Linear(6, 3))
    gradient_map = GradientMap(model.double(), batch_norm="batch" if batch_norm else "running")
    batch = Batch(torch.randn(4, 1, 3, 3, dtype=torch.float64), torch.arange(4) % 3)
    schedule = schedule or LocalSchedule(0.2, 1, 4)
    params, buffers = gradient_map.params, gradient_map.buffers
    delta = local_update(gradient_map, params, batch, schedule, buffers)
    local_round = LocalRound(gradient_map, params, buffers, batch, batch)
    return Update(delta, buffers, schedule, 4), local_round


def dense(local_round: LocalRound, schedule: LocalSchedule) -> torch.Tensor:
    """A_i, (S, P, N), from the dense Jacobian of the whole local training."""
    jacobian = UpdateJacobian(
        local_round.gradient_map,
        local_round.params,
        local_round.defended,
        schedule,
        local_round.buffers,
    ).to_dense()[0]
    return jacobian.reshape(-1, 4, N).movedim(1, 0)


def measure(num_steps: int = N, seed: int = 0) -> SampleSpectra:
    update, local_round = make()
    draws = draws_of(seed)
    return SampleSpectra.measure(local_round, update.schedule, draws, 0.8, 64, num_steps)


def error(energies: torch.Tensor, sigma: torch.Tensor, tau: float) -> torch.Tensor:
    return (tau**2 * energies / (energies + (tau * sigma) ** 2)).sum(-1)


def test_sample_maps_are_blocks_of_the_update_jacobian() -> None:
    update, local_round = make()
    operator, weights = sample_jacobian(local_round, update.schedule, 64)
    torch.testing.assert_close(
        operator.to_dense() * weights[:, None, None], dense(local_round, update.schedule)
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_several_steps_agree_to_first_order_in_the_learning_rate(momentum: float) -> None:
    schedule = LocalSchedule(1e-6, num_steps=3, batch_size=3, momentum=momentum)
    _, local_round = make(schedule)
    operator, weights = sample_jacobian(local_round, schedule, 64)
    torch.testing.assert_close(
        operator.to_dense() * weights[:, None, None],
        dense(local_round, schedule),
        rtol=1e-3,
        atol=1e-6,
    )


def test_exposure_of_samples_that_no_step_touches_is_zero() -> None:
    weights = LocalSchedule(0.1, num_steps=1, batch_size=2).sample_weights(4)
    assert weights.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_noise_is_the_dense_matrix_function_of_the_draw() -> None:
    spectra = measure()
    cutoffs = spectra.cutoffs_of_energy(torch.full((4,), 1e-3, dtype=torch.float64))
    noise = spectra.draw_noise(cutoffs)
    z = torch.randn(4, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    update, local_round = make()
    for i, matrix in enumerate(dense(local_round, update.schedule)):
        u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
        energy = 0.8**2 * sigma * (cutoffs[i] - sigma).clamp_min(0)
        torch.testing.assert_close(
            noise[i], u @ (energy.sqrt() * (vt @ z[i])), rtol=1e-5, atol=1e-8
        )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), cutoff=st.floats(0.1, 20))
def test_no_other_allotment_of_the_energy_hides_more(seed: int, cutoff: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    sigma = torch.rand(12, generator=generator, dtype=torch.float64) * 5 + 1e-3
    tau = 0.7
    best = tau**2 * sigma * (cutoff - sigma).clamp_min(0)
    other = torch.rand(12, generator=generator, dtype=torch.float64)
    other = other * best.sum() / other.sum()
    mixed = 0.9 * best + 0.1 * other
    top = error(best, sigma, tau)
    assert float(error(other, sigma, tau)) <= float(top) + 1e-9
    assert float(error(mixed, sigma, tau)) <= float(top) + 1e-9
    closed_form = tau**2 * (1 - sigma / cutoff).clamp_min(0).sum()
    torch.testing.assert_close(top, closed_form)


def test_predictions_are_the_dense_sums_on_average() -> None:
    update, local_round = make()
    sigma = torch.linalg.svdvals(dense(local_round, update.schedule))
    isotropic, shaped = [], []
    cutoffs = torch.tensor([0.05, 0.1, 0.2, 0.4], dtype=torch.float64)
    for seed in range(100):
        spectra = measure(seed=seed)
        isotropic.append(spectra.error_under_isotropic_noise(0.02) ** 2 * N)
        shaped.append(spectra.error_at(cutoffs) ** 2 * N)
    exact = error(torch.full_like(sigma, 0.02**2), sigma, 0.8)
    torch.testing.assert_close(torch.stack(isotropic).mean(0), exact, rtol=0.15, atol=0.0)
    exact = 0.8**2 * (1 - sigma / cutoffs[:, None]).clamp_min(0).sum(1)
    torch.testing.assert_close(torch.stack(shaped).mean(0), exact, rtol=0.15, atol=0.04)


def test_cutoffs_solve_their_equations() -> None:
    spectra = measure()
    energy = torch.tensor([1e-4, 1e-3, 1e-2, 1.0], dtype=torch.float64)
    cutoffs = spectra.cutoffs_of_energy(energy)
    torch.testing.assert_close(spectra.trace(spectra.energies(cutoffs)), energy)
    torch.testing.assert_close(
        spectra.error_at(spectra.cutoffs_of_error(0.3)), torch.full_like(energy, 0.3)
    )


@pytest.mark.parametrize("allotment", ["equal", "max_min"])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_influence_noise_has_the_energy_of_isotropic_noise(
    allotment: str, batch_norm: bool
) -> None:
    update, local_round = make(batch_norm=batch_norm)
    defense = InfluenceNoise(0.05, allotment=allotment)
    released = defense.on_update(update, draws_of(0), local_round)
    change = (ravel(released.delta) - ravel(update.delta)) / 0.2
    assert float(change.norm()) == pytest.approx(0.05 * math.sqrt(change.numel()))


def test_influence_noise_stays_where_the_samples_show() -> None:
    update, local_round = make()
    released = InfluenceNoise(0.05).on_update(update, draws_of(0), local_round)
    change = ravel(released.delta) - ravel(update.delta)
    everything = dense(local_round, update.schedule).movedim(0, 1).reshape(-1, 4 * N)
    solution = torch.linalg.lstsq(everything, change[:, None], driver="gelsd").solution
    assert float((everything @ solution - change[:, None]).norm() / change.norm()) < 1e-6


def test_max_min_lifts_the_worst_protected_sample() -> None:
    spectra = measure()
    errors = {}
    for allotment in ("equal", "max_min"):
        cutoffs = allot_energy(spectra, 1e-3, allotment)
        total = spectra.trace(spectra.energies(cutoffs)).sum()
        assert float(total) == pytest.approx(1e-3, rel=1e-3)
        errors[allotment] = spectra.error_at(cutoffs)
    assert float(errors["max_min"].min()) > 1.02 * float(errors["equal"].min())
    assert float(errors["max_min"].max()) == pytest.approx(float(errors["max_min"].min()))


def test_influence_noise_predicts_more_error_than_isotropic_noise_of_equal_energy() -> None:
    spectra = measure()
    size = 81
    for std in (0.001, 0.01, 0.1):
        cutoffs = allot_energy(spectra, std**2 * size, "max_min")
        isotropic = spectra.error_under_isotropic_noise(std)
        assert float(spectra.error_at(cutoffs).min()) > float(isotropic.min())


@pytest.mark.parametrize("mechanism", ["gaussian", "influence"])
def test_noise_meets_the_target_and_no_more(mechanism: str) -> None:
    update, local_round = make()
    plans = [
        TargetRisk(target, mechanism).plan(update, draws_of(0), local_round)
        for target in (0.1, 0.3, 0.6)
    ]
    for plan, target in zip(plans, (0.1, 0.3, 0.6), strict=True):
        assert plan.met
        assert float(plan.predicted_rmse.min()) == pytest.approx(target, rel=1e-4)
    assert plans[0].strength < plans[1].strength < plans[2].strength


def test_a_target_needs_less_energy_with_influence_noise() -> None:
    update, local_round = make()
    gaussian, influence = (
        TargetRisk(0.4, m).plan(update, draws_of(0), local_round).strength
        for m in ("gaussian", "influence")
    )
    assert influence < gaussian


@pytest.mark.parametrize(
    "defense",
    [
        TargetRisk(1.5, "gaussian"),
        TargetRisk(1.5, "influence"),
        TargetRisk(0.5, "gaussian", max_noise_std=1e-4),
        TargetRisk(0.5, "influence", max_noise_std=1e-4),
        TargetRisk(1e6, "pruning"),
    ],
)
def test_a_target_out_of_reach_is_reported(defense: TargetRisk) -> None:
    update, local_round = make()
    with pytest.warns(UserWarning, match="cannot be met by .* predicted error is"):
        released = defense.on_update(update, draws_of(0), local_round)
    assert not torch.equal(ravel(released.delta), ravel(update.delta))
    plan = defense.plan(update, draws_of(0), local_round)
    assert not plan.met
    assert plan.strength <= max(defense.max_noise_std, PRUNE_RATIOS[-1]) * (1 + 1e-9)


def test_inversion_influence_is_the_dense_formula() -> None:
    update, local_round = make()
    perturbation = torch.randn(81, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = inversion_influence(local_round, update.schedule, perturbation, 1e-2, 64)
    for i, matrix in enumerate(dense(local_round, update.schedule)):
        gram = matrix.T @ matrix
        damping = 1e-2 * torch.linalg.eigvalsh(gram)[-1]
        solution = torch.linalg.solve(
            gram + damping * torch.eye(N, dtype=torch.float64), matrix.T @ perturbation
        )
        assert float(found[i]) == pytest.approx(float(solution.norm()) / 3, rel=0.05)


def test_pruning_takes_the_smallest_sufficient_ratio() -> None:
    update, local_round = make()
    defense = TargetRisk(0.2, "pruning")
    plan = defense.plan(update, draws_of(0), local_round)
    assert plan.met and float(plan.predicted_rmse.min()) >= 0.2
    weaker = PRUNE_RATIOS[PRUNE_RATIOS.index(plan.strength) - 1]
    change = (ravel(update.delta) - ravel(prune_update(update.delta, weaker))) / 0.2
    influence = inversion_influence(local_round, update.schedule, change, 1e-4, 64)
    assert float(influence.min()) < 0.2
