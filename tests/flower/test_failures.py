"""Bad replies: the run goes on, the record says what happened, nothing written is lost."""

import numpy as np
import pytest
import torch
from audits import replace_arrays, run, tiny_config, values
from flwr.app import Array, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_leakage.simulation.apps import make_client_app
from flwr_leakage.simulation.build import build


def _faulty_app(config, fault):
    """The audit's own client app, in which client 1 misbehaves."""
    honest, app = make_client_app(lambda _: build(config)), ClientApp()

    @app.train()
    def train(message, context):
        if context.node_config["partition-id"] != 1:
            return honest(message, context)
        return fault(message, context, honest)

    return app


def _raises(message, context, honest):
    raise RuntimeError("the disk of client 1 is full")


def _nan(message, context, honest):
    reply = honest(message, context)
    weight = reply.content["arrays"].to_torch_state_dict()["fc.bias"]
    replace_arrays(reply, {"fc.bias": torch.full_like(weight, float("nan"))})
    return reply


def _wrong_shape(message, context, honest):
    reply = honest(message, context)
    replace_arrays(reply, {"fc.bias": torch.zeros(7)})
    return reply


def _missing_entry(message, context, honest):
    reply = honest(message, context)
    del reply.content["arrays"]["fc.bias"]
    return reply


def _extra_entry(message, context, honest):
    reply = honest(message, context)
    replace_arrays(reply, {"backdoor": torch.zeros(2)})
    return reply


def _no_examples(message, context, honest):
    reply = honest(message, context)
    reply.content["metrics"]["num-examples"] = 0
    return reply


def _steals_an_identity(message, context, honest):
    context.node_config["partition-id"] = 0
    try:
        return honest(message, context)
    finally:
        context.node_config["partition-id"] = 1


def _broken_note(message, context, honest):
    reply = honest(message, context)
    reply.content["flwr-leakage"]["note"] = '{"client-id": 1, "measurements": "<script>"}'
    return reply


def _overflow(message, context, honest):
    reply = honest(message, context)
    replace_arrays(reply, {"fc.bias": torch.full((4,), 1e300, dtype=torch.float64)})
    return reply


def _hidden_shape(message, context, honest):
    reply = honest(message, context)
    reply.content["arrays"]["fc.bias"].data = Array(np.zeros(7, np.float32)).data
    return reply


def _deep_note(message, context, honest):
    reply = honest(message, context)
    reply.content["flwr-leakage"]["note"] = "[" * 100_000
    return reply


def _examples(count):
    def fault(message, context, honest):
        reply = honest(message, context)
        reply.content["metrics"]["num-examples"] = count
        return reply

    return fault


def _another_metric(message, context, honest):
    reply = honest(message, context)
    reply.content["metrics"]["extra"] = 1.0
    return reply


def _another_name(message, context, honest):
    reply = honest(message, context)
    reply.content["weights"] = reply.content.pop("arrays")
    return reply


def _two_metric_records(message, context, honest):
    reply = honest(message, context)
    reply.content["more"] = MetricRecord({"num-examples": 1})
    return reply


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_overflow, "4 entries that are NaN or infinite"),
        (_hidden_shape, "must have shape (4,), got (7,)"),
        (_examples(float("inf")), "must be at least 1, got inf"),
        (_examples([1, 2]), "must be at least 1, got [1, 2]"),
        (_another_metric, "its records are"),
        (_another_name, "its records are"),
        (_two_metric_records, "expected one MetricRecord, got 2"),
        (_examples(10**12), "was not attacked, as there is no truth: num_examples must lie in"),
        (_raises, "the disk of client 1 is full"),
        (_nan, "NaN or infinite"),
        (_wrong_shape, "must have shape (4,), got (7,)"),
        (_missing_entry, "missing: ['fc.bias']"),
        (_extra_entry, "unknown: ['backdoor']"),
        (_no_examples, "must be at least 1, got 0"),
    ],
)
def test_a_bad_reply_is_recorded_and_the_run_goes_on(tiny_data, fault, said):
    config = tiny_config(tiny_data)
    data = run(config, _faulty_app(config, fault), page=True)
    warnings = [event for event in data.events if event.level == "warning"]
    assert [event.server_round for event in warnings] == [1, 2]
    assert all(said in event.message for event in warnings)
    assert data.closed
    attacked = {(r, c) for r, c, _ in values(data, "psnr")}
    assert attacked == {(1, 0), (1, 2), (2, 0), (2, 2)}
    assert (tiny_data / "run" / "report.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_deep_note, "cannot be read: RecursionError"),
        (_broken_note, "cannot be read"),
        (_steals_an_identity, "says it is client 0, and so do others"),
    ],
)
def test_a_note_decides_about_names_and_never_about_the_aggregation(tiny_data, fault, said):
    """Nobody's update is left out, and nothing is measured against the wrong client's images."""
    config = tiny_config(tiny_data, "num_rounds=1")
    aggregated = []
    original = FedAvg.aggregate_train

    def count(self, server_round, replies):
        aggregated.append(len(replies))
        return original(self, server_round, replies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedAvg, "aggregate_train", count)
        data = run(config, _faulty_app(config, fault))
    assert aggregated == [3]
    assert any(said in event.message for event in data.events)
    honest = {2} if fault is _steals_an_identity else {0, 2}
    assert {client for _, client, _ in values(data, "psnr")} == honest


def test_a_label_outside_the_classes_is_an_error_of_that_client(tiny_data, monkeypatch):
    from flwr_leakage.data import FederatedDataset
    from flwr_leakage.records import Batch

    original = FederatedDataset.client_batch

    def unknown_label(self, client_id, server_round, num_examples):
        batch = original(self, client_id, server_round, num_examples)
        return Batch(batch.inputs, batch.targets + 9) if client_id == 1 else batch

    monkeypatch.setattr(FederatedDataset, "client_batch", unknown_label)
    data = run(tiny_config(tiny_data))
    assert len(data.events) == 2
    assert all("labels must lie in 0 … 3" in event.message for event in data.events)
    assert {c for _, c, _ in values(data, "psnr")} == {0, 2}


def test_an_empty_client_answers_with_an_error(tiny_data, monkeypatch):
    from flwr_leakage.simulation import build as building
    from flwr_leakage.simulation import checks

    def with_an_empty_part(labels, generator):
        return [torch.arange(20), torch.arange(0), torch.arange(20, 40)]

    original = building.instantiate
    monkeypatch.setattr(
        building,
        "instantiate",
        lambda config, key, kind, **given: (
            with_an_empty_part if key == "partition" else original(config, key, kind, **given)
        ),
    )
    # A simulation refuses such a partition before it starts; real clients may still be empty.
    monkeypatch.setattr(checks, "check_clients", lambda experiment: None)
    data = run(tiny_config(tiny_data, "seed=77"))
    assert len(data.events) == 2
    assert {c for _, c, _ in values(data, "psnr")} == {0, 2}


def test_an_attack_that_fails_leaves_the_training_alone(tiny_data, monkeypatch):
    from flwr_leakage.attacks import GradientInversion

    def out_of_memory(self, *args, **kwargs):
        raise MemoryError("no room for the Jacobian")

    monkeypatch.setattr(GradientInversion, "__call__", out_of_memory)
    data = run(tiny_config(tiny_data))
    psnr = [record for record in data.records if record.name == "psnr"]
    assert len(psnr) == 6
    assert all(record.value is None and "no room" in record.note for record in psnr)
    assert len([r for r in data.records if r.name == "test_accuracy"]) == 3
