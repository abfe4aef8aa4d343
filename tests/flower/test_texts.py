"""An app of token ids that knows nothing of the audit, and the two lines around it."""

import pytest
import texts
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_leakage.audit import Candidates
from flwr_leakage.flower import audit, observe, run_inline
from flwr_leakage.tracking import read_run

LENGTH = 8


def client_app(causal=False):
    app = ClientApp()

    @app.train()
    def train(message, context):
        client = int(context.node_config["partition-id"])
        model, _, loss, batch = texts.case(1 + client, LENGTH, seed=100 + client, causal=causal)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        metrics = MetricRecord({"num-examples": len(batch)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def observed(folder, client, causal=False, **settings):
    model, *_ = texts.case(1, LENGTH, seed=100, causal=causal)
    app = ServerApp()

    @app.main()
    def main(grid, context):
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=2)
        arrays = ArrayRecord(model.state_dict())
        observe(strategy, model, folder, **settings).start(
            grid=grid, initial_arrays=arrays, num_rounds=1
        )

    run_inline(app, client, 2)
    return read_run(folder)


@pytest.mark.parametrize("causal", [False, True])
def test_texts_of_an_app_are_recovered_as_ids(tmp_path, causal):
    _, spec, _, _ = texts.case(1, LENGTH, seed=100, causal=causal)
    truth = tmp_path / "truth"
    truth.mkdir()
    client = audit(client_app(causal), spec=spec, truth=truth)
    run = observed(tmp_path / "run", client, causal, spec=spec, truth=truth)
    exact = [record.value for record in run.records if record.name == "exact_text"]
    assert exact == [1.0, 1.0, 1.0]
    found = {(t.client_id, t.sample): t.ids for t in run.texts if t.role == "reconstruction"}
    for client_id in (0, 1):
        *_, batch = texts.case(1 + client_id, LENGTH, seed=100 + client_id)
        ids = {found[client_id, sample] for sample in range(1 + client_id)}
        assert ids == {tuple(text) for text in batch.inputs.tolist()}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "private training texts" in page


@pytest.mark.parametrize("causal", [False, True])
def test_candidate_texts_are_found_in_the_update_of_their_client(tmp_path, causal):
    _, spec, _, null = texts.case(600, LENGTH, seed=7, causal=causal)
    held = [texts.case(1 + client, LENGTH, seed=100 + client)[-1].inputs for client in (0, 1)]
    others = texts.case(4, LENGTH, seed=8)[-1].inputs
    candidates = Candidates(torch.cat([*held, others]), null.inputs)
    client = audit(client_app(causal), spec=spec)
    run = observed(tmp_path / "run", client, causal, spec=spec, candidates=candidates)
    found = {
        (record.client_id, record.sample)
        for record in run.records
        if record.name == "membership_exact" and record.value == 1
    }
    assert found == {(0, 0), (1, 1), (1, 2)}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "it or an equal copy was used, by algebra" in page


def test_an_observer_that_was_told_no_vocabulary_says_what_is_missing(tmp_path):
    run = observed(tmp_path / "run", audit(client_app()))
    reasons = [record.note for record in run.records if record.name == "not_attacked"]
    assert len(reasons) == 2
    assert all("give observe a spec, InputSpec.text(…)" in reason for reason in reasons)
