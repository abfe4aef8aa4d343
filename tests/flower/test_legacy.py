"""Apps of Flower's older interface: secure aggregation, plain ones, and mixtures of old and new."""

import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp.strategy import FedAvg as MessageFedAvg

from flwr_leakage.flower import InlineGrid, audit, observe, observe_legacy
from flwr_leakage.records import LocalSchedule, ThreatModel
from flwr_leakage.tracking import read_run
from simulations.examples.secagg import client_app, server_app, task


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
    with observe_legacy(strategy, model, folder, server_app.SPEC, schedule, **settings) as seen:
        legacy = LegacyContext(context(), ServerConfig(num_rounds=1), seen)
        DefaultWorkflow(fit_workflow=fit_workflow)(grid, legacy)
    return read_run(folder), strategy


def context():
    return Context(1, 1, {}, RecordDict(), {})


def psnr(data):
    return [r.value for r in data.records if r.name == "psnr"]


def test_the_example_recovers_every_digit_from_the_unmasked_sum(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server_app.app(InlineGrid(client_app.app, 3), context())
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
