"""What every defense and every objective keeps to, taken from the configs as they are found."""

import math

import pytest
import torch
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from torch import nn

from flwr_leakage._conf import conf_dir
from flwr_leakage.attacks.inversion import objectives
from flwr_leakage.defenses import LocalRound
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, LocalSchedule, Update

SCHEDULE = LocalSchedule(learning_rate=0.5, num_steps=2, batch_size=4)
NEEDS_MORE = {"none": "no _target_ that acts", "instahide_inter": "needs a file of public images"}


def options(group):
    """The options of a config group by name, as plain containers."""
    return {
        path.stem: OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        for path in sorted((conf_dir() / group).glob("*.yaml"))
    }


def local_round():
    torch.manual_seed(3)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Sigmoid(), nn.Linear(12, 3))
    gradient_map = GradientMap(network.double())
    draws = torch.Generator().manual_seed(5)
    inputs = torch.randn(8, 1, 4, 4, dtype=torch.float64, generator=draws)
    batch = Batch(inputs, torch.randint(3, (8,), generator=draws))
    params, buffers = gradient_map.params, gradient_map.buffers
    delta = local_update(gradient_map, params, batch, SCHEDULE, buffers)
    update = Update(delta, buffers, SCHEDULE, len(batch))
    return update, LocalRound(gradient_map, params, buffers, batch, batch)


DEFENSES = {name: node for name, node in options("defense").items() if name not in NEEDS_MORE}


@pytest.mark.parametrize("name", DEFENSES)
@pytest.mark.filterwarnings("ignore:target_rmse")
def test_a_defense_repeats_its_draws_and_leaves_its_arguments_alone(name):
    defense = instantiate(DEFENSES[name], _convert_="all")
    update, around = local_round()
    before = {key: value.clone() for key, value in update.delta.items()}
    first, second = (
        defense.on_update(update, Reproducible.from_seed(7), around).delta for _ in range(2)
    )
    assert {key: value.shape for key, value in first.items()} == {
        key: value.shape for key, value in before.items()
    }
    for key, value in before.items():
        assert torch.equal(update.delta[key], value)
        assert torch.equal(first[key], second[key])
        assert bool(first[key].isfinite().all())
    encoded = [
        defense.on_batch(around.private, 3, Reproducible.from_seed(7)).inputs for _ in range(2)
    ]
    assert torch.equal(*encoded)
    assert encoded[0].shape == around.private.inputs.shape


def nodes_below(node, package):
    """Nodes of a config whose ``_target_`` is a class that a package's modules define."""
    if not isinstance(node, dict):
        return
    if "_target_" in node:
        target = get_class(node["_target_"])
        if target.__module__.startswith(f"{package}."):
            yield target.__name__, node
    for value in node.values():
        yield from nodes_below(value, package)


OBJECTIVES = dict(
    found for node in options("attack").values() for found in nodes_below(node, objectives.__name__)
)


def gradients(count, seed):
    draws = torch.Generator().manual_seed(seed)
    return {
        "first.weight": torch.randn(count, 4, 3, generator=draws),
        "first.bias": torch.randn(count, 4, generator=draws),
        "last.weight": torch.randn(count, 2, 4, generator=draws),
    }


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_smallest_where_both_agree(name):
    objective = instantiate(OBJECTIVES[name], _convert_="all")
    observed = {key: value[0] for key, value in gradients(1, 0).items()}
    least = float(objective(observed, observed))
    others = gradients(20, 1)
    for row in range(20):
        other = {key: value[row] for key, value in others.items()}
        assert float(objective(other, observed)) > least


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_has_a_derivative_and_takes_rows_together(name):
    objective = instantiate(OBJECTIVES[name], _convert_="all")
    observed = {key: value[0] for key, value in gradients(1, 0).items()}
    candidates = gradients(3, 1)
    slope = torch.func.grad(objective)
    together = torch.func.vmap(slope, in_dims=(0, None))(candidates, observed)
    for row in range(3):
        alone = slope({key: value[row] for key, value in candidates.items()}, observed)
        for key, value in alone.items():
            assert bool(value.isfinite().all())
            torch.testing.assert_close(together[key][row], value)
    zero = slope({key: torch.zeros_like(value) for key, value in observed.items()}, observed)
    assert all(math.isfinite(float(value.sum())) for value in zero.values())
