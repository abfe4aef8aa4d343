"""Flower's own differential privacy around the defenses: what leaves the client is both's."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from torch import nn
from torch.nn import functional as F

from flwr_leakage.defenses import Chain, GradientPruning, MixUp
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
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.tracking import JsonlTracker, read_run

SPEC = InputSpec(shape=(1, 4, 4), num_classes=3, mean=(0.5,), std=(0.5,))
SCHEDULE = LocalSchedule(learning_rate=0.5, batch_size=4)
DEFENSE = Chain([MixUp(2), GradientPruning(0.75)])
CLIP = 0.01


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def client_app(*around) -> ClientApp:
    """A client that mixes and prunes, with Flower's mods around the audit."""
    app = ClientApp()
    audit = ClientAudit(
        GradientMap(network()), SPEC, SCHEDULE, defense=DEFENSE, seed=0, share="times"
    )

    @app.train(mods=[*around, LeakageMod(audit)])
    def train(message, context):
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=SCHEDULE.learning_rate)
        generator = torch.Generator().manual_seed(context.node_config["partition-id"])
        images = torch.randn(4, 1, 4, 4, generator=generator)
        inputs, targets = encode(images, torch.tensor([0, 1, 2, 0]))
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 4}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def released(*around, **config) -> torch.Tensor:
    """The update that one client sends."""
    grid = InlineGrid(client_app(*around), 1)
    content = {
        "arrays": ArrayRecord(network().state_dict()),
        "config": ConfigRecord({"server-round": 1, **config}),
    }
    node = next(iter(grid.get_node_ids()))
    (reply,) = grid.send_and_receive([Message(RecordDict(content), node, MessageType.TRAIN)])
    assert not reply.has_error(), reply.error
    sent = reply.content["arrays"].to_torch_state_dict()
    return ravel(subtract(sent, network().state_dict())).detach()


def test_clipping_acts_on_the_defended_update():
    defended = released()
    clipped = released(fixedclipping_mod, **{"clipping_norm": CLIP})
    assert int((defended != 0).sum()) == 51 - int(0.75 * 51)
    assert float(defended.norm()) > 2 * CLIP
    torch.testing.assert_close(clipped, defended * CLIP / defended.norm(), atol=1e-7, rtol=1e-4)


def test_local_noise_covers_what_pruning_left_out():
    noisy = released(LocalDpMod(clipping_norm=CLIP, sensitivity=1e-3, epsilon=1.0, delta=1e-2))
    assert bool((noisy != 0).all())


WRAPPERS = {
    "client side, fixed": (
        lambda s: DifferentialPrivacyClientSideFixedClipping(s, 0.1, CLIP, 2),
        fixedclipping_mod,
    ),
    "client side, adaptive": (
        lambda s: DifferentialPrivacyClientSideAdaptiveClipping(s, 0.1, 2, CLIP),
        adaptiveclipping_mod,
    ),
    "server side, fixed": (
        lambda s: DifferentialPrivacyServerSideFixedClipping(s, 0.1, CLIP, 2),
        None,
    ),
    "server side, adaptive": (
        lambda s: DifferentialPrivacyServerSideAdaptiveClipping(s, 0.1, 2, CLIP),
        None,
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("curious", ["outside", "inside"])
def test_every_wrapper_of_flower_composes_with_defended_clients(tmp_path, name, curious):
    wrap, mod = WRAPPERS[name]
    app = ServerApp()

    @app.main()
    def main(grid, context):
        tracker = JsonlTracker(tmp_path / "run")
        audit = ServerAudit(GradientMap(network()), SPEC, SCHEDULE, tracker)
        plain = FedAvg(fraction_evaluate=0.0)
        if curious == "outside":
            strategy = HonestButCurious(wrap(plain), audit)
        else:
            strategy = wrap(HonestButCurious(plain, audit))
        result = strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=2)
        after = ravel(result.arrays.to_torch_state_dict())
        assert not torch.equal(after, ravel(network().state_dict()))
        tracker.close()

    run_inline(app, client_app(*([mod] if mod else [])), 2)
    data = read_run(tmp_path / "run")
    assert not [event for event in data.events if event.level == "error"], data.events
    trained = [r for r in data.records if r.name == "train_cpu_seconds"]
    assert {(r.server_round, r.client_id) for r in trained} == {
        (r, c) for r in (1, 2) for c in (0, 1)
    }
