"""The audit added to an app that knows nothing of it, as the README tells."""

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import LBFGS, AutomaticLabels, Euclidean, GradientInversion, Grey
from flwr_leakage.defenses import Chain, GaussianNoise, GradientPruning, MixUp
from flwr_leakage.flower import (
    ClientAudit,
    HonestButCurious,
    LeakageMod,
    ServerAudit,
    encode,
    run_inline,
)
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.tracking import JsonlTracker, read_run

SPEC = InputSpec(shape=(1, 6, 6), num_classes=3, mean=(0.5,), std=(0.5,))
SCHEDULE = LocalSchedule(learning_rate=0.05, batch_size=1)


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def _client_app(mods, passes_batches=True):
    app = ClientApp()

    @app.train(mods=mods)
    def train(message, context):
        model = _network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=SCHEDULE.learning_rate)
        partition = context.node_config["partition-id"]
        images = torch.full((1, 1, 6, 6), 0.1 * (partition + 1))
        labels = torch.tensor([partition % 3])
        if passes_batches:
            images, labels = encode(images, labels)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def _server_app(folder, **settings):
    app = ServerApp()

    @app.main()
    def main(grid, context):
        tracker = JsonlTracker(folder)
        audit = ServerAudit(GradientMap(_network()), SPEC, SCHEDULE, tracker, **settings)
        strategy = HonestButCurious(FedAvg(fraction_evaluate=0.0), audit)
        strategy.start(grid, ArrayRecord(_network().state_dict()), num_rounds=1)
        tracker.close()

    return app


def _attack():
    return GradientInversion(
        objective=Euclidean(),
        labels=AutomaticLabels(),
        initialisation=Grey(),
        optimizer=LBFGS(iterations=100),
    )


def _audit(**settings):
    return ClientAudit(GradientMap(_network()), SPEC, SCHEDULE, **settings)


def test_without_a_mod_on_the_clients_the_server_still_recovers_their_images(tmp_path):
    run_inline(_server_app(tmp_path / "run", attack=_attack()), _client_app([]), 3)
    data = read_run(tmp_path / "run")
    assert not data.events
    assert len(data.images) == 3
    objectives = [r.value for r in data.records if r.name == "objective"]
    assert max(objectives) < 1e-6


def test_clients_with_and_without_a_mod_are_told_apart(tmp_path):
    plain, audited = _client_app([]), _client_app([LeakageMod(_audit())])
    app = ClientApp()

    @app.train()
    def train(message, context):
        chosen = plain if context.node_config["partition-id"] == 0 else audited
        return chosen(message, context)

    run_inline(_server_app(tmp_path / "run", attack=_attack()), app, 3)
    data = read_run(tmp_path / "run")
    assert not data.events
    clients = {record.client_id for record in data.records if record.name == "objective"}
    assert len(clients) == 3
    assert clients > {1, 2}


def test_flowers_own_clipping_mod_composes_around_the_audit(tmp_path):
    mods = [fixedclipping_mod, LeakageMod(_audit(defense=GradientPruning(prune_ratio=0.5)))]
    data = _run_clipped(tmp_path, mods)
    assert not data.events
    assert len([r for r in data.records if r.name == "objective"]) == 2


def _run_clipped(tmp_path, mods):
    app = ServerApp()

    @app.main()
    def main(grid, context):
        from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping

        tracker = JsonlTracker(tmp_path / "run")
        audit = ServerAudit(GradientMap(_network()), SPEC, SCHEDULE, tracker, attack=_attack())
        private = DifferentialPrivacyClientSideFixedClipping(
            FedAvg(fraction_evaluate=0.0), 0.0, 10.0, 2
        )
        HonestButCurious(private, audit).start(
            grid, ArrayRecord(_network().state_dict()), num_rounds=1
        )
        tracker.close()

    run_inline(app, _client_app(mods), 2)
    return read_run(tmp_path / "run")


def test_a_defense_of_the_inputs_is_never_silently_left_out(tmp_path, caplog):
    app = _client_app([LeakageMod(_audit(defense=MixUp(k=2)))], passes_batches=False)
    run_inline(_server_app(tmp_path / "run", attack=_attack()), app, 2)
    data = read_run(tmp_path / "run")
    assert len(data.events) == 2
    assert all("the client's own log says why" in event.message for event in data.events)
    assert caplog.text.count("flwr_leakage.flower.encode") == 2


def test_defenses_of_the_update_alone_need_no_line_in_the_loop(tmp_path):
    chain = Chain([GradientPruning(prune_ratio=0.5), GaussianNoise(noise_std=0.01)])
    app = _client_app([LeakageMod(_audit(defense=chain))], passes_batches=False)
    run_inline(_server_app(tmp_path / "run", attack=_attack()), app, 2)
    assert not read_run(tmp_path / "run").events


def test_what_only_a_simulation_can_grant_is_refused_elsewhere(tmp_path):
    from flwr_leakage.records import ThreatModel

    with pytest.raises(ValueError, match="granted by a simulation"):
        ServerAudit(
            GradientMap(_network()),
            SPEC,
            SCHEDULE,
            JsonlTracker(tmp_path),
            threat=ThreatModel(labels="known"),
        )


def test_outside_of_a_mod_encode_changes_nothing():
    images, labels = torch.rand(2, 1, 6, 6), torch.tensor([0, 1])
    encoded, targets = encode(images, labels)
    assert encoded is images
    assert targets is labels
