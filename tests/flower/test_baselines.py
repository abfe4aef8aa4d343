"""Methods of federated learning as their authors write them, with one line on each side."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Server, ServerConfig, SimpleClientManager
from flwr.server.compat import start_grid
from flwr.server.server import fit_clients
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg

from flwr_leakage.audit import ServerAudit
from flwr_leakage.capture import TrainingFacts
from flwr_leakage.flower import InlineGrid, audit, observe, observe_legacy
from flwr_leakage.flower.part import Variates
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, ThreatModel
from flwr_leakage.tracking import read_run
from simulations.benchmarks.baselines import run
from simulations.benchmarks.methods import (
    METHODS,
    RATE,
    Net,
    NovaStrategy,
    images_of,
    plain,
    record_app,
)

REFUSED = {
    "a fastai loop": "no step of a torch.optim.Optimizer was seen",
    "DASHA-like compression": "got 1 that no part fits",
    "scikit-learn": "got 2 that no part fits",
}
TOLD = {
    "FedProx": "a loss with a term in the parameters",
    "FedDyn": "a loss with a term in the parameters",
    "FedBN": "6 of the model's 11 arrays are exchanged, and bn1.weight, bn1.bias are not known",
    "FedBN, named": "6 of the model's 11 arrays are exchanged",
    "FedPer": "2 of the model's 4 arrays are exchanged, and head.weight, head.bias are not known",
    "FedPer, named": "head.weight, head.bias are not known to the server",
    "FedRep": "head.weight, head.bias are not known to the server",
    "SCAFFOLD, of gradients": "6 exchanged arrays are none of the model's",
    "SCAFFOLD": "6 exchanged arrays are none of the model's, such as control variates",
    "LoRA adapters": "4 of the model's 8 arrays are exchanged",
}


def residuals(data):
    return [r.value for r in data.records if r.name == "replay_residual"]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_trains_as_without_the_audit_and_is_explained_or_refused_in_words(name, tmp_path):
    plainly = run(METHODS[name])
    seen = run(METHODS[name], tmp_path / "run", share="everything", replay_every=1)
    assert seen.models == plainly.models and len(seen.models) == 2
    said = " ".join(event.message for event in seen.data.events)
    assert TOLD.get(name, "") in said
    if name in REFUSED:
        assert REFUSED[name] in said
        return
    assert "does not explain" not in said
    found = residuals(seen.data)
    assert len(found) == 4 and max(found) < 1e-5
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "steps"),
    [("SCAFFOLD", 1), ("SCAFFOLD", 2), ("SCAFFOLD, from its parameters", 1)],
)
def test_one_step_with_control_variates_is_explained_by_those_that_were_sent_before(
    name, steps, tmp_path, monkeypatch
):
    given = []
    inspect = ServerAudit.inspect
    monkeypatch.setattr(
        ServerAudit, "inspect", lambda self, *rest: (given.extend(rest[1]), inspect(self, *rest))[1]
    )
    settings = {"images": 2 * steps, "replay_every": 1, "share": "everything", "num_rounds": 3}
    data = run(METHODS[name], tmp_path / "run", attack="analytic", **settings).data
    assert max(residuals(data)) < 1e-6 and len(residuals(data)) == 6
    assert not any("does not explain" in event.message for event in data.events)
    last = [seen for seen in given if seen.server_round == 3]
    assert len(last) == (2 if steps == 1 else 0)  # of more steps it is refused
    for seen in last:  # what is attacked is the client's own gradient
        torch.manual_seed(0)
        context = Context(1, 1, {"partition-id": seen.client_id}, RecordDict(), {"images": 2})
        inputs, targets = images_of(context)
        gradient_map = GradientMap(Net())
        params = {name: seen.params[name] for name in gradient_map.params}
        gradient = gradient_map(params, Batch(inputs, targets))
        for name, value in gradient.items():
            torch.testing.assert_close(seen.update.delta[name], -RATE * value, atol=1e-7, rtol=1e-4)


def test_variates_of_another_kind_leave_an_update_as_it_is():
    arrays = {"w": torch.tensor([1.0, 2.0])}
    variates, ours = Variates(), {"w": torch.ones(2)}
    variates.hear(0, {"w": torch.tensor([5.0, 5.0])}, ours)
    facts = TrainingFacts("SGD", 0.1, num_steps=1)
    assert variates.without(0, facts, arrays, {"w": torch.zeros(2)}) is arrays
    assert variates.without(1, facts, arrays, {"w": torch.zeros(2)}) is arrays  # never heard
    variates.hear(2, {"w": torch.tensor([-10.0, -20.0])}, {"w": -3 * ours["w"]})  # −Δ/η
    found = variates.without(2, facts, arrays, {"w": torch.zeros(2)})
    torch.testing.assert_close(found["w"], arrays["w"])
    assert variates.without(2, replace(facts, num_steps=2), arrays, {}) is arrays


def test_a_server_of_its_own_that_aggregates_by_another_method_is_observed(tmp_path):
    class Strategy(NovaStrategy):
        def aggregate_fit_custom(self, server_round, server_params, results, failures):
            return NovaStrategy.aggregate_fit(self, server_round, results, failures)

        def aggregate_fit(self, server_round, results, failures):
            raise AssertionError("FedNova's server calls the other one")

    class NovaServer(Server):
        def fit_round(self, server_round, timeout):
            chosen = self.strategy.configure_fit(
                server_round=server_round, parameters=self.parameters,
                client_manager=self._client_manager,
            )  # fmt: skip
            results, failures = fit_clients(chosen, self.max_workers, timeout, server_round)
            now = parameters_to_ndarrays(self.parameters)
            done = self.strategy.aggregate_fit_custom(server_round, now, results, failures)
            return *done, (results, failures)

    method = METHODS["FedNova"]
    first = ndarrays_to_parameters(method.first(method.net()))
    strategy = Strategy(fraction_evaluate=0.0, initial_parameters=first)
    app = audit(method.client(), share="everything")
    threat = ThreatModel()
    with observe_legacy(
        strategy, method.net(), tmp_path / "run", attack=None, threat=threat
    ) as observed:
        server = NovaServer(client_manager=SimpleClientManager(), strategy=observed)
        start_grid(
            grid=InlineGrid(app, 2, {"images": 4}), server=server, config=ServerConfig(num_rounds=2)
        )
    found = residuals(read_run(tmp_path / "run"))
    assert found and max(found) < 1e-5


def test_weights_that_come_back_unchanged_are_told_where_they_are_attacked(tmp_path):
    seen = run(METHODS["pFedPara"], tmp_path / "run", "analytic", num_rounds=1, images=1)
    (said,) = {e.message[10:] for e in seen.data.events if "sent back unchanged" in e.message}
    assert said.startswith("sent back unchanged: head.weight. Either the client keeps its own")
    assert "no evidence of safety" in said


def test_between_replays_a_glance_compares_what_it_can_and_the_rest_is_replayed(tmp_path):
    counts = {"FedBN": 2, "FedPer": 2, "FedRep": 4, "SCAFFOLD": 6, "FedNova": 6, "pFedPara": 2}
    for name, count in counts.items():
        data = run(METHODS[name], tmp_path / name, num_rounds=3, share="everything").data
        found = residuals(data)
        assert (name, len(found)) == (name, count)
        assert max(found) < 1e-5
        assert not [e for e in data.events if "not replayed" in e.message]


@pytest.mark.parametrize(
    ("name", "attack", "least"),
    [
        ("FedPer", "analytic", 90),
        ("FedNova", "feature_matching", 30),
        ("SCAFFOLD", "feature_matching", 30),
        ("MOON", "analytic", 90),
    ],
)
def test_what_is_sent_of_one_image_is_attacked(name, attack, least, tmp_path):
    """In the first round, where the personal parts are the given model's."""
    seen = run(
        METHODS[name], tmp_path / "run", attack, num_rounds=1, images=1, truth=tmp_path / "truth"
    )
    found = [r.value for r in seen.data.records if r.name == "psnr"]
    assert len(found) == 2 and min(found) > least


def test_a_model_that_differs_between_turns_is_not_attacked_and_it_is_said_why(tmp_path):
    data = run(METHODS["FedRep"], tmp_path / "run", "analytic").data
    reasons = {r.note for r in data.records if r.name == "not_attacked"}
    assert reasons == {"parts of the model were trained in turns, as FedRep's head and body"}


@pytest.mark.parametrize("bad_replies", ["pass", "drop"])
def test_a_client_that_sends_another_part_than_most_is_named(bad_replies, tmp_path):
    whole, part = record_app(Net, plain)(), record_app(Net, plain, lambda n: n[0] == "c")()

    client = ClientApp()

    @client.train()
    def train(message, context):
        app = part if context.node_config["partition-id"] == 0 else whole
        return app(message, context)

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    observed = observe(strategy, Net(), tmp_path / "run", attack=None, bad_replies=bad_replies)
    with pytest.raises(InconsistentMessageReplies) if bad_replies == "pass" else nullcontext():
        observed.start(InlineGrid(client, 3), ArrayRecord(Net().state_dict()), num_rounds=1)
    (said,) = [e.message for e in read_run(tmp_path / "run").events if "the reply of" in e.message]
    assert ("arrays ['arrays: conv1.bias, conv1.weight']" in said) == (bad_replies == "pass")
    assert ("was left out" in said) == (bad_replies == "drop")


@pytest.mark.parametrize("name", ["FedAvg, lists", "FedAvgM"])
def test_no_client_and_no_model_is_blamed_where_the_server_sends_nan(name, tmp_path):
    method = METHODS[name]

    def first(net):
        with torch.no_grad():
            net.conv1.weight.mul_(float("nan"))
        return method.first(net)

    settings = {"share": "everything", "num_rounds": 1}
    data = run(replace(method, first=first), tmp_path / "run", **settings).data
    said = {event.message for event in data.events}
    diverged = {message for message in said if "nothing is observed" in message}
    assert len(diverged) == 1 and "the model that the strategy sends has diverged" in diverged.pop()
    assert not any("the reply of" in message or "does not explain" in message for message in said)
    assert sum("was received with entries that are NaN" in message for message in said) == 2
