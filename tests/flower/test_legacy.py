"""Apps of Flower's older interface: secure aggregation, plain ones, and mixtures of old and new."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Error, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg as MessageFedAvg
from observed import Memory, network
from observed import audit as observed_audit

from flwr_leakage.attacks.base import failure
from flwr_leakage.audit import Selection
from flwr_leakage.audit.kept import KeptObservations
from flwr_leakage.flower import InlineGrid, audit, observe, observe_legacy, run_inline
from flwr_leakage.flower.heard import Heard
from flwr_leakage.flower.legacy import LegacyHonestButCurious
from flwr_leakage.flower.names import ClientNames
from flwr_leakage.records import InputSpec, LocalSchedule, ThreatModel
from flwr_leakage.tracking import read_run
from simulations.examples.secagg import client_app, server_app, task

SPEC = InputSpec((1, 28, 28), 10, (0.1307,), (0.3081,))


class Shown(FedAvg):
    """Keeps what it is shown of each client."""

    def aggregate_fit(self, server_round, results, failures):
        self.shown = [fit.parameters for _, fit in results]
        return super().aggregate_fit(server_round, results, failures)


def run(folder, app, fit_workflow, **settings):
    """The run of three clients, and the strategy."""
    torch.manual_seed(0)
    model = task.network()
    first = ndarrays_to_parameters([value.numpy() for value in model.state_dict().values()])
    strategy = Shown(fraction_evaluate=0.0, initial_parameters=first, min_available_clients=3)
    grid = InlineGrid(app, 3)
    schedule = LocalSchedule(task.LEARNING_RATE)
    with observe_legacy(strategy, model, folder, SPEC, schedule, **settings) as seen:
        legacy = LegacyContext(context(), ServerConfig(num_rounds=1), seen)
        DefaultWorkflow(fit_workflow=fit_workflow)(grid, legacy)
    return read_run(folder), strategy


def context():
    return Context(1, 1, {}, RecordDict(), {})


def first_model():
    torch.manual_seed(0)
    state = task.network().state_dict().values()
    return ndarrays_to_parameters([value.numpy().copy() for value in state])


def told_run(folder, app, num_clients=3, num_rounds=1, **settings):
    """A run as an app's author writes it: one line, and nothing said of inputs or schedule."""
    strategy = FedAvg(
        fraction_evaluate=0.0, initial_parameters=first_model(), min_fit_clients=num_clients,
        min_available_clients=num_clients,
    )  # fmt: skip
    grid = InlineGrid(app, num_clients)
    secure = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=1.0)
    settings = {"attack": "exact_batch", **settings}
    legacy = LegacyContext(
        context(),
        ServerConfig(num_rounds=num_rounds),
        observe_legacy(strategy, task.network(), folder, **settings),
    )
    DefaultWorkflow(fit_workflow=secure)(grid, legacy)
    assert not read_run(folder).closed
    del legacy
    gc.collect()
    assert "send_and_receive" not in vars(grid)
    return read_run(folder)


def secure_app(*failing, **settings):
    """The example's clients, of which some fail once the keys are shared."""

    def client_fn(context):
        partition = context.node_config["partition-id"]
        client = client_app.DigitClient(partition % 3)
        if partition in failing:
            client.fit = lambda *_: 1 / 0
        return client.to_client()

    app = ClientApp(client_fn=client_fn, mods=[client_app.secaggplus_mod])
    return audit(app, **{"share": "everything", **settings})


def psnr(data):
    return [r.value for r in data.records if r.name == "psnr"]


def test_the_example_recovers_every_digit_from_the_unmasked_sum(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server_app.app(InlineGrid(client_app.app, 3), context())
    gc.collect()
    data = read_run("leakage-secagg")
    assert not data.events
    assert {r.client_id for r in data.records if r.kind in ("attack", "metric")} == {-1}
    assert len(psnr(data)) == 3
    assert min(psnr(data)) > 60


def test_what_is_a_sum_is_not_attacked_as_single_updates(tmp_path):
    secure = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=1.0)
    app = ClientApp(client_fn=client_app.client_fn, mods=[client_app.secaggplus_mod])
    data, strategy = run(tmp_path / "run", app, secure, threat=ThreatModel())
    assert len({id(parameters) for parameters in strategy.shown}) == 1
    (event,) = data.events
    assert "threat.view must be 'aggregate', got 'single'" in event.message
    assert not [r for r in data.records if r.kind == "attack"]


def test_plain_numpy_clients_are_attacked_one_by_one(tmp_path):
    app = audit(ClientApp(client_fn=client_app.client_fn), truth=tmp_path / "truth")
    data, strategy = run(
        tmp_path / "run", app, None, threat=ThreatModel(), truth=tmp_path / "truth",
        attack="analytic",
    )  # fmt: skip
    assert len({id(parameters) for parameters in strategy.shown}) == 3
    assert not data.events
    assert {r.client_id for r in data.records if r.name == "psnr"} == {0, 1, 2}
    assert min(psnr(data)) > 60
    assert (tmp_path / "run" / "report.html").exists()


def test_one_line_without_a_block_takes_the_rest_from_what_clients_tell(tmp_path):
    app = secure_app(truth=tmp_path / "truth")
    data = told_run(tmp_path / "run", app, truth=tmp_path / "truth", num_rounds=2)
    assert data.closed
    assert (tmp_path / "run" / "report.html").exists()
    assert [e.message for e in data.events] == []
    replays = {
        (r.server_round, r.client_id): r for r in data.records if r.name == "replay_residual"
    }
    assert {key: record.value for key, record in replays.items()} == {(1, i): 0 for i in range(3)}
    assert "explains the update exactly; what was sent is masked" in replays[1, 0].note
    (second,) = (r.note for r in data.records if r.name == "not_replayed" and r.client_id == 1)
    assert "not the end, which was masked" in second
    assert len(psnr(data)) == 6
    assert min(psnr(data)[:3]) > 60


def test_a_client_that_drops_out_is_told_once_and_by_name(tmp_path):
    data = told_run(tmp_path / "run", secure_app(3), num_clients=4)
    (event,) = data.events
    assert event.client_id == (1 << 32) + 3
    assert event.message.startswith(f"node {event.client_id} answered with an error")
    assert "division by zero" in event.message
    assert len([r for r in data.records if r.kind == "attack" and r.name == "objective"]) == 1


def test_failures_that_no_message_told_are_recorded_and_the_others_once(unchecked):
    memory = Memory()
    heard = Heard(observed_audit(memory), ClientNames())
    replies = [error_of(100, "of key shares"), error_of(101, "")]
    grid = SimpleNamespace(send_and_receive=lambda messages, timeout=None: iter(replies))
    heard.listen(1, [SimpleNamespace(grid=grid, node_id=100 + i) for i in range(3)])
    assert grid.send_and_receive([]) == replies
    twice = [Exception(reply.error) for reply in replies for _ in range(2)]
    heard.end_round({101}, [*twice, TimeoutError("a proxy's own")])
    assert [(event.client_id, event.message) for event in memory.events] == [
        (100, "node 100 answered with an error: of key shares"),
        (101, "node 101 answered with an error: "),
        (-1, "a client failed: a proxy's own"),
        (102, "node 102 never replied"),
    ]


def error_of(node, reason):
    return SimpleNamespace(
        metadata=SimpleNamespace(message_type="train", src_node_id=node),
        error=Error(7, reason),
        has_error=lambda: True,
    )


def test_a_round_that_is_halted_is_told(tmp_path):
    data = told_run(tmp_path / "run", secure_app(1, 2), num_rounds=2)
    said = [(e.server_round, e.message) for e in data.events]
    assert len(said) == 6
    for server_round in (1, 2):
        *errors, lost = [message for when, message in said if when == server_round]
        assert all("answered with an error" in message for message in errors)
        assert lost.startswith("the strategy was shown nothing of this round")


class OneIsSilent(ClientApp):
    """Client 1 has no audit."""

    def __init__(self):
        super().__init__()
        self.audited = secure_app()
        self.plain = ClientApp(client_fn=client_app.client_fn, mods=[client_app.secaggplus_mod])

    def __call__(self, message, context):
        is_silent = context.node_config["partition-id"] == 1
        return (self.plain if is_silent else self.audited)(message, context)


def test_a_sum_is_attacked_with_all_of_its_clients_or_not_at_all(tmp_path):
    some = Selection(clients=(0, 1))
    data = told_run(tmp_path / "some", secure_app(), selection=some)
    (event,) = data.events
    assert "the sum is of 3 clients, and only 2 of them are to be attacked" in event.message
    data = told_run(tmp_path / "many", secure_app(), max_samples=2)
    assert len(data.events) == 3
    assert all("use 3 samples, more than max_samples=2" in e.message for e in data.events)


def test_a_mean_is_attacked_as_if_all_had_trained_like_most(tmp_path):
    """One client that says nothing, or something else, hides nobody."""
    data = told_run(tmp_path / "silent", OneIsSilent())
    (event,) = data.events
    assert event.message.startswith("client 1 is in a mean update that is attacked as if")
    assert "told nothing of its training" in event.message
    assert "no evidence of safety" in event.message
    (objective,) = [r for r in data.records if r.kind == "attack" and r.name == "objective"]
    assert objective.value < 1e-6
    alone = told_run(tmp_path / "two", OneIsSilent(), num_clients=2)
    assert all("no majority of the 2 clients" in e.message or "told nothing" in e.message
               for e in alone.events)  # fmt: skip
    assert not [r for r in alone.records if r.name == "objective"]


def test_an_app_of_server_app_components_is_observed_by_one_line(tmp_path):
    def server_fn(_):
        strategy = FedAvg(
            fraction_evaluate=0.0, initial_parameters=first_model(), min_available_clients=3
        )
        observed = observe_legacy(
            strategy, task.network(), tmp_path / "run", attack="analytic",
            threat=ThreatModel(), truth=tmp_path / "truth",
        )  # fmt: skip
        return ServerAppComponents(strategy=observed, config=ServerConfig(num_rounds=2))

    app = audit(ClientApp(client_fn=client_app.client_fn), truth=tmp_path / "truth", share="replay")
    run_inline(ServerApp(server_fn=server_fn), app, 3)
    gc.collect()
    data = read_run(tmp_path / "run")
    assert (data.closed, data.events) == (True, ())
    assert {r.value for r in data.records if r.name == "replay_residual"} == {0.0}
    second = [r for r in data.records if r.name == "not_replayed"]
    assert {(r.server_round, r.client_id) for r in second} == {(2, 0), (2, 1), (2, 2)}
    assert min(psnr(data)[:3]) > 60


def fit_round(server_round, sent, claims, view="single", **settings):
    """What is attacked and told of a round in which node 100 + i answers model i by zeros."""
    attacked, memory = [], Memory()

    def attack(job, progress=None):
        attacked.extend(job.observations)
        return [failure("not tried") for _ in job.observations]

    settings = {"attack": attack, "threat": ThreatModel(view=view), **settings}
    strategy = FedAvg(fraction_evaluate=0.0)
    seen = LegacyHonestButCurious(strategy, observed_audit(memory, **settings))
    proxies = [SimpleNamespace(cid=str(100 + i), node_id=100 + i) for i in range(len(sent))]
    strategy.configure_fit = lambda *_: [
        (proxy, FitIns(model, {})) for proxy, model in zip(proxies, sent, strict=True)
    ]
    seen.configure_fit(server_round, filled(9), None)
    ok = Status(Code.OK, "")
    results = [
        (proxy, FitRes(ok, filled(0), 4, {} if claim is None else {"partition-id": claim}))
        for proxy, claim in zip(proxies, claims, strict=True)
    ]
    seen.aggregate_fit(server_round, results, [])
    return attacked, [event.message for event in memory.events if "not tried" not in event.message]


def filled(value):
    state = network().state_dict().values()
    return ndarrays_to_parameters([np.full_like(one.numpy(), value) for one in state])


def test_the_update_is_told_from_the_model_that_a_client_was_sent(unchecked):
    attacked, said = fit_round(1, [filled(2), filled(3), filled(2)], [0, 1, None])
    assert not said
    assert {o.client_id: float(o.update.delta["0.bias"][0]) for o in attacked} == {
        0: -2.0, 1: -3.0, 102: -2.0,
    }  # fmt: skip
    assert attacked[0].params is attacked[2].params
    attacked, (reason,) = fit_round(1, [filled(2), filled(3)], [0, 1], "aggregate")
    assert not attacked
    assert "the clients were sent 2 different ones" in reason
    (mean,), said = fit_round(1, [filled(2), filled(2)], [0, 1], "aggregate")
    assert (mean.client_id, said) == (-1, [])


def test_clients_that_claim_one_partition_are_known_by_their_nodes(tmp_path, unchecked):
    models, keep = [filled(1)] * 3, KeptObservations(tmp_path / "kept")
    attacked, said = fit_round(1, models, [7, 7, 1])
    assert [o.client_id for o in attacked] == [1, 100, 101]
    assert [m for m in said if "the name of node 100 is not certain" in m]
    assert len(said) == 2
    fit_round(1, models, [7, 7, 1], keep=keep)
    assert [each.observation.client_id for each in keep.read(1)[0]] == [1, 100, 101]


def test_a_model_that_is_none_of_torch_is_refused_in_words(tmp_path, unchecked):
    for strategy, line in ((MessageFedAvg(), observe), (FedAvg(), observe_legacy)):
        with pytest.raises(TypeError, match="only models of torch"):
            line(strategy, np.zeros(3), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_old_and_new_do_not_mix_and_it_is_said_in_words(tmp_path, unchecked):
    with pytest.raises(TypeError, match="observe_legacy"):
        observe(FedAvg(), task.network(), tmp_path / "run")
    grid = InlineGrid(audit(ClientApp(client_fn=client_app.client_fn)), 2)
    arrays = ArrayRecord(task.network().state_dict())
    strategy = observe(
        MessageFedAvg(fraction_evaluate=0.0), task.network(), tmp_path / "run", attack=None
    )
    strategy.start(grid, arrays, num_rounds=1)
    messages = [event.message for event in read_run(tmp_path / "run").events]
    assert len([m for m in messages if "is trained by strategies of flwr.server only" in m]) == 2
