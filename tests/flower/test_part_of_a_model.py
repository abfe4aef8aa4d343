"""Apps that send a part of the model that they train, as where the body is frozen."""

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from observed import serve
from one_line import audited
from torch import nn
from torch.nn import functional as F

from flwr_leakage.capture.names import name_live
from flwr_leakage.flower import observe
from flwr_leakage.tracking import read_run


class Body(nn.Module):
    """A frozen layer, and the head that is trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 6)
        self.heads = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        self.body.requires_grad_(False)

    def forward(self, images):
        return self.heads(self.body(images.flatten(1)))


def network():
    torch.manual_seed(0)
    return Body()


def app(rename=""):
    app = ClientApp()

    @app.train()
    def train(message, context):
        model = network()
        model.heads.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.heads.parameters(), lr=0.1)
        images = torch.rand(4, 1, 4, 4)
        F.cross_entropy(model(images), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
        renamed = rename if context.node_config["partition-id"] == 1 else ""
        state = {renamed + name: value for name, value in model.heads.state_dict().items()}
        metrics = MetricRecord({"num-examples": 4})
        content = RecordDict({"arrays": ArrayRecord(state), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def run(folder, client, model, **settings):
    strategy = FedAvg(fraction_evaluate=0.0)
    observed = observe(strategy, model, folder, attack=None, **settings)
    arrays = ArrayRecord(network().heads.state_dict())
    result, _ = serve(observed, client, 2, arrays=arrays)
    return result, read_run(folder)


def test_a_part_that_is_sent_is_replayed_as_a_part(tmp_path):
    _, data = run(tmp_path / "run", audited(app(), replay_every=1), network().heads)
    residuals = [r.value for r in data.records if r.name == "replay_residual"]
    assert residuals == [0.0] * 4
    assert not data.events


def test_no_client_is_blamed_for_a_model_that_the_server_does_not_send(tmp_path):
    another = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    result, data = run(tmp_path / "run", audited(app()), another, bad_replies="drop")
    (event,) = data.events  # once, and not in each round
    assert (event.server_round, event.client_id) == (1, -1)
    assert "what the strategy sends is not the model that observe was given" in event.message
    assert "missing: none, unknown: ['0.weight', '0.bias']" in event.message
    assert not torch.equal(
        result.arrays.to_torch_state_dict()["0.weight"], network().heads.state_dict()["0.weight"]
    )


def test_the_part_that_is_sent_of_the_model_that_the_server_knows_is_told(tmp_path):
    _, data = run(tmp_path / "run", audited(app()), network())
    (event,) = data.events
    assert event.level == "info"
    assert event.message.startswith(
        "4 of the model's 6 arrays are exchanged, and body.weight, body.bias are not known to the "
        "server. Attacks take the given model's values"
    )


def test_a_reply_of_other_names_is_bad_all_the_same(tmp_path):
    _, data = run(tmp_path / "run", audited(app("other.")), network(), bad_replies="drop")
    said = [event.message for event in data.events if "was left out" in event.message]
    assert len(said) == 2
    assert all("other names than those that were sent" in message for message in said)


@pytest.mark.parametrize("sent", [{"weight": (5, 6)}, {"weight": (9, 9)}])
def test_which_part_it_is_is_told_from_names_and_shapes_or_not_at_all(sent):
    received = {name: torch.zeros(shape) for name, shape in sent.items()}
    model = nn.ModuleDict({"first": nn.Linear(6, 5), "second": nn.Linear(5, 3)})
    found = name_live(received, [model])
    assert [own for _, own, _ in found.values()] == (["first.weight"] if len(found) else [])
    assert bool(found) == (sent["weight"] == (5, 6))
    twins = nn.ModuleDict({"first": nn.Linear(6, 5), "second": nn.Linear(6, 5)})
    assert name_live(received, [twins]) == {}
