"""The server as the enemy: it knows the code, chooses its messages, and wants the noise away."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from scipy import stats
from torch import nn
from torch.nn import functional as F

from flwr_leakage import defenses as d
from flwr_leakage.defenses.noise import add_gaussian_noise
from flwr_leakage.flower import (
    ClientAudit,
    HonestButCurious,
    InlineGrid,
    LeakageMod,
    ServerAudit,
    encode,
    run_inline,
)
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel, subtract
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import InputSpec, LocalSchedule, Update
from flwr_leakage.tracking import JsonlTracker, read_run

SPEC = InputSpec(shape=(1, 4, 4), num_classes=3, mean=(0.5,), std=(0.5,))
SCHEDULE = LocalSchedule(learning_rate=0.5, batch_size=4)
PUBLIC = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(9))
SECRET = 8_675_309

DRAWING = {
    "gaussian": d.GaussianNoise(0.1),
    "laplacian": d.LaplacianNoise(0.1),
    "dp sgd": d.DPSGD(1.0, 1.0, delta=None),
    "mixup": d.MixUp(2),
    "instahide": d.InstaHide(2),
    "instahide inter": d.InstaHide(3, "inter", public=PUBLIC),
    "influence noise": d.InfluenceNoise(0.1),
    "target risk": d.TargetRisk(0.3, "gaussian"),
    "chain": d.Chain([d.GradientPruning(0.5), d.GaussianNoise(0.1)]),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def client_app(**settings) -> ClientApp:
    app = ClientApp()
    audit = ClientAudit(GradientMap(network()), SPEC, SCHEDULE, **settings)

    @app.train(mods=[LeakageMod(audit)])
    def train(message, context):
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=SCHEDULE.learning_rate)
        images = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(1))
        inputs, targets = encode(images, torch.tensor([0, 1, 2, 0]))
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 4}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def ask(grid: InlineGrid, config: dict, node: int = 0) -> Message:
    """The reply of a node to a message that the server made up."""
    content = {
        "arrays": ArrayRecord(network().state_dict()),
        "config": ConfigRecord({"lr": 0.5, **config}),
    }
    node_id = list(grid.get_node_ids())[node]
    (reply,) = grid.send_and_receive([Message(RecordDict(content), node_id, MessageType.TRAIN)])
    return reply


def update_of(reply: Message) -> torch.Tensor:
    assert not reply.has_error(), reply.error
    sent = reply.content["arrays"].to_torch_state_dict()
    return ravel(subtract(sent, network().state_dict())).detach()


def released(grid: InlineGrid, config: dict, node: int = 0) -> torch.Tensor:
    return update_of(ask(grid, config, node))


@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.parametrize("config", [{"server-round": 1}, {}, {"server-round": 0}], ids=str)
def test_no_message_makes_a_client_repeat_its_draws(name, config):
    grid = InlineGrid(client_app(defense=DRAWING[name]), 1)
    first, second = (released(grid, config) for _ in range(2))
    assert float((first - second).abs().max()) > 1e-4
    (fresh_process,) = (
        released(InlineGrid(client_app(defense=DRAWING[name]), 1), config) for _ in range(1)
    )
    assert float((first - fresh_process).abs().max()) > 1e-4


@pytest.mark.parametrize("name", DRAWING)
def test_two_nodes_of_one_partition_draw_apart(name):
    grid = InlineGrid(client_app(defense=DRAWING[name]), 2)
    for context in grid._contexts.values():
        context.node_config["partition-id"] = 0
    one, other = (released(grid, {"server-round": 1}, node) for node in (0, 1))
    assert float((one - other).abs().max()) > 1e-4


def _subtract_what_a_seed_draws(update: torch.Tensor, noise_std: float) -> float:
    """The attack: the best of the default seed's rounds and clients, as this code draws them."""
    params = {name: torch.zeros_like(value) for name, value in network().state_dict().items()}
    clean = update_of(ask(InlineGrid(client_app(), 1), {"server-round": 1}))
    best = float("inf")
    for server_round in range(3):
        for client in range(2):
            draws = Reproducible.from_seed(
                0, server_round=server_round, client_id=client, purpose="defense"
            )
            guess = ravel(add_gaussian_noise(params, noise_std * 0.5, draws))
            best = min(best, float((update - guess - clean).abs().max()))
    return best


def test_noise_cannot_be_subtracted_and_a_simulations_can():
    """Both halves: the attack works where a seed is given, so that its failure says something."""
    defense = d.GaussianNoise(1.0)
    simulated = InlineGrid(client_app(defense=defense, seed=0), 1)
    assert _subtract_what_a_seed_draws(released(simulated, {"server-round": 1}), 1.0) < 1e-6
    real = InlineGrid(client_app(defense=defense), 1)
    assert _subtract_what_a_seed_draws(released(real, {"server-round": 1}), 1.0) > 0.1


@pytest.mark.parametrize("name", DRAWING)
def test_a_seed_repeats_everything_and_says_so(name):
    grids = [InlineGrid(client_app(defense=DRAWING[name], seed=SECRET), 1) for _ in range(2)]
    first, second = (ask(grid, {"server-round": 1}) for grid in grids)
    assert torch.equal(update_of(first), update_of(second))
    assert '"reproducible": true' in first.content["flwr-leakage"]["note"]
    entropy = ask(InlineGrid(client_app(defense=DRAWING[name]), 1), {"server-round": 1})
    assert '"reproducible": false' in entropy.content["flwr-leakage"]["note"]


@pytest.mark.parametrize("seed", [None, SECRET])
@pytest.mark.parametrize("value", [-1, -(2**62), 1.0, True, "1", [1]], ids=str)
def test_rounds_that_are_none_are_refused_and_the_seed_stays_secret(seed, value):
    reply = ask(
        InlineGrid(client_app(defense=DRAWING["gaussian"], seed=seed), 1), {"server-round": value}
    )
    assert reply.has_error()
    assert "server-round must be an integer ≥ 0" in reply.error.reason
    assert str(SECRET) not in reply.error.reason


@pytest.mark.parametrize("partition", [-1, -(2**40)])
def test_no_error_reply_holds_the_seed(partition):
    grid = InlineGrid(client_app(defense=DRAWING["gaussian"], seed=SECRET), 1)
    for context in grid._contexts.values():
        context.node_config["partition-id"] = partition
    reply = ask(grid, {"server-round": 1})
    assert reply.has_error()
    assert str(SECRET) not in reply.error.reason


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        (d.GaussianNoise, lambda std: stats.norm(scale=std)),
        (d.LaplacianNoise, lambda std: stats.laplace(scale=std / 2**0.5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropy_has_the_law_that_is_stated(kind, law, dtype):
    """p-values of 1e-7, as these draws have no seed: one failure in ten million is chance."""
    from flwr_leakage.randomness import Secure

    delta = {"w": torch.full((200_000,), 0.25, dtype=dtype), "b": torch.zeros(3, dtype=dtype)}
    update = Update(delta, {}, LocalSchedule(0.5), 1)
    out = kind(0.2).on_update(update, Secure()).delta
    assert out["w"].dtype == out["b"].dtype == dtype
    noise = (out["w"] - 0.25).double()
    assert stats.kstest(noise.numpy(), law(0.1).cdf).pvalue > 1e-7
    assert stats.kstest(noise.numpy(), law(0.105).cdf).pvalue < 1e-4
    assert float(noise.square().mean()) == pytest.approx(0.01, rel=0.03)
    for lag in (1, 2, 4, 1000, 1 << 17):
        shifted = torch.corrcoef(torch.stack([noise[:-lag], noise[lag:]]))[0, 1]
        assert abs(float(shifted)) < 5.5 / (len(noise) - lag) ** 0.5


def _server(folder, rounds=2):
    app = ServerApp()

    @app.main()
    def main(grid, context):
        tracker = JsonlTracker(folder)
        audit = ServerAudit(GradientMap(network()), SPEC, SCHEDULE, tracker)
        HonestButCurious(FedAvg(fraction_evaluate=0.0), audit).start(
            grid, ArrayRecord(network().state_dict()), num_rounds=rounds
        )
        tracker.close()

    return app


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"defense": d.GaussianNoise(0.1), "seed": 0}, 1),
        ({"defense": d.GaussianNoise(0.1)}, 0),
        ({"defense": d.GradientPruning(0.5), "seed": 0}, 0),
    ],
)
def test_a_seed_outside_of_a_simulation_is_warned_of_once(tmp_path, settings, expected):
    run_inline(_server(tmp_path / "run"), client_app(**settings), 2)
    told = [event for event in read_run(tmp_path / "run").events if "seed" in event.message]
    assert len(told) == expected
    assert all(event.level == "warning" for event in told)
