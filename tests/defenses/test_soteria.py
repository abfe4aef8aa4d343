import pytest
import torch
from torch import nn

from flwr_leakage.defenses import LocalRound, Soteria
from flwr_leakage.defenses.soteria import representation_sensitivity
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, LocalSchedule, Update


def make() -> tuple[Update, LocalRound]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 3)).double()
    gradient_map = GradientMap(model)
    batch = Batch(torch.randn(3, 1, 4, 4, dtype=torch.float64), torch.arange(3))
    schedule = LocalSchedule(0.1, 1, 3)
    delta = local_update(gradient_map, gradient_map.params, batch, schedule)
    return (
        Update(delta, {}, schedule, 3),
        LocalRound(gradient_map, gradient_map.params, {}, batch, batch),
    )


def brute_force(local_round: LocalRound) -> torch.Tensor:
    features = local_round.gradient_map.model[:3]
    total = torch.zeros(8, dtype=torch.float64)
    for single in local_round.private.inputs:
        jacobian = torch.autograd.functional.jacobian(lambda x: features(x)[0], single[None])
        total += jacobian.reshape(8, -1).norm(dim=1) / features(single[None])[0].abs()
    return total


@pytest.mark.parametrize("chunk_size", [3, 64])
def test_sensitivity_equals_the_dense_jacobian(chunk_size: int) -> None:
    _, local_round = make()
    sensitivity = representation_sensitivity(
        local_round.gradient_map,
        local_round.params,
        local_round.private.inputs,
        "3",
        None,
        chunk_size,
    )
    torch.testing.assert_close(sensitivity, brute_force(local_round))


def test_prunes_the_columns_of_smallest_sensitivity_only() -> None:
    update, local_round = make()
    released = Soteria(0.5).on_update(update, Reproducible(torch.Generator()), local_round)
    hidden = brute_force(local_round).argsort()[:4]
    kept = brute_force(local_round).argsort()[4:]
    assert not released.delta["3.weight"][:, hidden].any()
    assert torch.equal(released.delta["3.weight"][:, kept], update.delta["3.weight"][:, kept])
    for key in ("0.weight", "0.bias", "3.bias"):
        assert torch.equal(released.delta[key], update.delta[key])


def test_the_exact_representation_is_hidden() -> None:
    _, local_round = make()
    single = Batch(local_round.private.inputs[:1], local_round.private.targets[:1])
    gradient_map = local_round.gradient_map
    schedule = LocalSchedule(0.1)
    delta = local_update(gradient_map, gradient_map.params, single, schedule)
    alone = LocalRound(gradient_map, gradient_map.params, {}, single, single)
    released = Soteria(0.5).on_update(
        Update(delta, {}, schedule, 1), Reproducible(torch.Generator()), alone
    )
    recovered = released.delta["3.weight"][0] / released.delta["3.bias"][0]
    representation = gradient_map.model[:3](single.inputs)[0]
    exact = (recovered - representation).abs() < 1e-9
    assert int(exact.sum()) == 4


def test_a_layer_that_is_none_is_named() -> None:
    update, local_round = make()
    with pytest.raises(ValueError, match="layer must name a linear layer of the model, got '0'"):
        Soteria(0.5, layer="0").on_update(update, Reproducible(torch.Generator()), local_round)
    gradient_map = GradientMap(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()).double())
    no_linear = LocalRound(
        gradient_map, gradient_map.params, {}, local_round.private, local_round.private
    )
    with pytest.raises(ValueError, match="with a linear layer"):
        Soteria(0.5).on_update(update, Reproducible(torch.Generator()), no_linear)


def test_where_training_uses_batch_statistics_a_sample_keeps_those_of_its_batch() -> None:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Sigmoid(), nn.Linear(8, 3)]
    gradient_map = GradientMap(nn.Sequential(*layers).double(), batch_norm="batch")
    batch = Batch(torch.randn(4, 1, 4, 4, dtype=torch.float64), torch.arange(4) % 3)
    params, buffers = gradient_map.params, gradient_map.buffers
    schedule = LocalSchedule(0.1, 1, 4)
    update = Update(local_update(gradient_map, params, batch, schedule), buffers, schedule, 4)
    around = LocalRound(gradient_map, params, buffers, batch, batch)
    released = Soteria(0.5, max_samples=2).on_update(
        update, Reproducible(torch.Generator()), around
    )
    given = gradient_map.statistics(params, batch.inputs, buffers)
    fixed = gradient_map.with_batch_norm("running")
    sensitivity = representation_sensitivity(fixed, params, batch.inputs[:2], "4", given)
    hidden = (released.delta["4.weight"] == 0).all(0)
    assert torch.equal(hidden.nonzero()[:, 0], sensitivity.argsort()[:4].sort().values)
