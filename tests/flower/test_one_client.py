"""One client blinds or exhausts nobody, whatever it tells of its training."""

import json
import time

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp import strategy as st
from observed import Memory, client_app, content, network, observe, serve
from one_line import client_app as training_app
from one_line import run
from torch import nn

from flwr_leakage.audit import ClientNote
from flwr_leakage.audit.record import Recorder
from flwr_leakage.flower import audit, run_inline
from flwr_leakage.flower import observe as observe_line
from flwr_leakage.flower.names import ClientNames
from flwr_leakage.flower.wire import RECORD_KEY
from flwr_leakage.records import Batch, Reconstruction
from flwr_leakage.tracking import read_run

pytestmark = pytest.mark.usefixtures("unchecked")  # values of wrong types are meant


BAD = 1
"""The client that tells what it likes; client 0 is honest."""


class Telling:
    """An audited app, one of whose clients changes the facts in its note."""

    def __init__(self, app, **changes):
        self.app, self.changes = app, changes

    def __call__(self, message, context):
        reply = self.app(message, context)
        if context.node_config["partition-id"] == BAD and RECORD_KEY in reply.content:
            note = json.loads(reply.content[RECORD_KEY]["note"])
            facts = json.loads(note["training"]) | {"unscheduled": ""} | self.changes
            note["training"] = json.dumps(facts)
            reply.content[RECORD_KEY] = ConfigRecord({"note": json.dumps(note)})
        return reply


def guess(job, progress=None):
    """An attack that answers by grey images, of the size that it is told."""
    shape = job.spec.shape
    return [
        Reconstruction(Batch(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long)), 0.5)
        for _ in job.observations
    ]


def attacked(data):
    return sorted(r.client_id % 2**32 for r in data.records if r.name == "objective")


FACTS = {
    "no batch": {"batch_size": 0},
    "no steps": {"num_steps": 0},
    "steps": {"num_steps": 2**31 - 1},
    "batch": {"batch_size": 2**31 - 1},
    "rate below 0": {"learning_rate": -0.1},
    "rate of NaN": {"learning_rate": float("nan")},
    "rate without end": {"learning_rate": float("inf")},
    "rate too large": {"learning_rate": 1e11},
    "rate too small": {"learning_rate": 1e-300},
    "momentum": {"momentum": 1.5},
    "momentum below 0": {"momentum": -0.5},
    "decay": {"weight_decay": -1.0},
    "2 GB": {"shape": [1, 32768, 16384]},
    "channels": {"shape": [2**31 - 1, 1, 1]},
    "all sizes": {"shape": [2**31 - 1] * 3},
    "zeros": {"shape": [0, 6, 6]},
    "two sizes": {"shape": [6, 6]},
    "four sizes": {"shape": [1, 1, 6, 6]},
    "another size": {"shape": [1, 7, 6]},
    "other channels": {"shape": [3, 6, 6]},
    "other classes": {"num_classes": 7},
    "no deviation": {"mean": [0.5], "std": [0.0]},
    "a mean alone": {"mean": [0.5], "std": []},
    "a flag as a text": {"randomness": "false"},
    "a number as a text": {"num_steps": "3"},
    "a list": {"learning_rate": [0.1]},
    "an unknown normalisation": {"normalization": "mine", "mean": [], "std": []},
}


@pytest.mark.parametrize("name", FACTS)
def test_bad_facts_cost_the_client_that_tells_them_and_nobody_else(tmp_path, name):
    app = Telling(audit(training_app()), **FACTS[name])
    _, data, _ = run(tmp_path / "run", app, num_rounds=2, attack=guess)
    assert attacked(data) == [0, 0]
    told = [event for event in data.events if event.client_id % 2**32 == BAD]
    assert told and all(event.level == "warning" for event in told)
    assert {event.server_round for event in told} == {1}  # told once
    assert not [event for event in data.events if "audit failed" in event.message]
    kept_out = [r for r in data.records if r.name == "not_attacked"]
    assert {r.client_id % 2**32 for r in kept_out} == {BAD}


class AnySize(nn.Sequential):
    """A network that takes images of any size."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(256, 3),
        )  # fmt: skip


def any_size_run(folder, changes, **settings):
    app = Telling(audit(training_app(model=AnySize(), batch_size=12)), **changes)
    strategy = observe_line(
        st.FedAvg(fraction_evaluate=0.0), AnySize(), folder, attack=guess, **settings
    )
    server = ServerApp()

    @server.main()
    def main(grid, context):
        strategy.start(grid, ArrayRecord(AnySize().state_dict()), num_rounds=1)

    run_inline(server, app, 2)
    return read_run(folder)


def test_clients_that_differ_are_each_attacked_by_their_own_word(tmp_path):
    data = any_size_run(tmp_path / "run", {"shape": [1, 9, 9]})
    assert attacked(data) == [0, BAD]
    assert not [event for event in data.events if "not attacked" in event.message]


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({"shape": [1, 3000, 3000]}, {}, "inputs of shape (1, 3000, 3000) are too large"),
        ({"shape": [1, 64, 64]}, {}, "would need about"),
        (
            {"shape": [1, 192, 192]},
            {"max_bytes": None, "max_seconds": 0.1},
            "no 10 fit into max_seconds=0.1",
        ),
    ],
)
def test_inputs_that_the_model_takes_and_a_server_cannot(tmp_path, changes, settings, said):
    data = any_size_run(tmp_path / "run", changes, **settings)
    assert attacked(data) == [0]
    (event,) = data.events
    assert said in event.message
    (kept_out,) = [r for r in data.records if r.name == "not_attacked"]
    assert said in kept_out.note


def test_an_attack_that_fails_by_one_client_goes_on_with_the_others(tmp_path):
    def careful(job, progress=None):
        if any(seen.client_id == BAD for seen in job.observations):
            raise ZeroDivisionError("client 1")
        return guess(job)

    _, data, _ = run(tmp_path / "run", audit(training_app()), attack=careful)
    found = {r.client_id: r.value for r in data.records if r.name == "objective"}
    assert found == {0: 0.5, BAD: None}
    (event,) = [e for e in data.events if e.level == "warning"]
    assert event.message == "client 1 not recovered: ZeroDivisionError: client 1"


def test_what_nobody_foresaw_of_one_client_loses_no_record_of_another(tmp_path, monkeypatch):
    plain = Recorder.note

    def note(self, server_round, note):
        if note.client_id == 0:
            raise KeyError("unforeseen")
        plain(self, server_round, note)

    monkeypatch.setattr(Recorder, "note", note)
    _, data, _ = run(tmp_path / "run", audit(training_app()), attack=guess)
    assert attacked(data) == [0, 1]
    assert [r.client_id for r in data.records if r.name.startswith("replay_")] == [1]
    (event,) = [e for e in data.events if e.level == "warning"]
    assert event.message.startswith("the audit of client 0 failed: KeyError")


def test_a_rounds_attacks_end_with_their_time_and_say_who_was_left_out(tmp_path):
    def slow(job, progress=None):
        ends = time.process_time() + 0.3
        while time.process_time() < ends:
            pass
        return guess(job)

    _, data, _ = run(
        tmp_path / "run", audit(training_app()), attack=slow, num_rounds=8, max_seconds=0.2,
        max_round_seconds=0.25,
    )  # fmt: skip
    by_round = {}
    for record in data.records:
        if record.name == "objective":
            by_round.setdefault(record.server_round, []).append(record.client_id)
    assert {len(clients) for clients in by_round.values()} == {1}
    assert len(by_round) == 8
    assert {clients[0] for clients in by_round.values()} == {0, 1}  # drawn anew, so in turn
    said = [e.message for e in data.events]
    assert all("1 of 2 targets were not attacked" in message for message in said)
    left_out = [r for r in data.records if r.name == "not_attacked"]
    assert len(left_out) == 8
    assert all("0.25 CPU seconds" in r.note for r in left_out)


def test_fresh_words_each_round_are_recorded_up_to_a_limit(tmp_path):
    rounds = 40

    def on_train(reply, partition):
        calls.append(partition)
        if partition == BAD:
            note = ClientNote(partition, remark=f"number {len(calls)}", explained=f"{len(calls)}")
            reply.content[RECORD_KEY] = ConfigRecord({"note": note.to_text()})
        return reply

    calls, memory = [], Memory()
    app = client_app(on_train=on_train)
    serve(observe(st.FedAvg(fraction_evaluate=0.0), memory), app, 2, num_rounds=rounds)
    said = [event.message for event in memory.events if event.client_id == BAD]
    assert len(said) == 33
    assert "32 different things were recorded of it" in said[-1]


def test_nobody_takes_the_name_of_a_node_that_is_yet_to_come():
    names, honest = ClientNames(), (1 << 40) + 3
    assert "may be another node's id" in names.learn({1 << 40: honest})[1 << 40]
    assert names.of(1 << 40) == 1 << 40
    assert not names.learn({honest: honest})
    assert names.of(honest) == honest


# Layouts that are wrong by themselves


def _no_weight(reply):
    del reply.content["metrics"]["num-examples"]


def _no_arrays(reply):
    del reply.content["arrays"]


def _no_metrics(reply):
    del reply.content["metrics"]


def _two_metrics(reply):
    reply.content["more"] = MetricRecord({"num-examples": 1})


def _two_arrays(reply):
    reply.content["more"] = ArrayRecord(dict(reply.content["arrays"]))


def _a_list(reply):
    reply.content["metrics"]["num-examples"] = [1, 2]


def _half(reply):
    state = reply.content["arrays"].to_torch_state_dict()
    half = {k: v.half() if v.is_floating_point() else v for k, v in state.items()}
    reply.content["arrays"] = ArrayRecord(half)


BROKEN = (_no_weight, _no_arrays, _no_metrics, _two_metrics, _two_arrays, _a_list, _half)


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("first_bad", [2, 3])
def test_most_or_all_replies_that_are_wrong_end_no_run(fault, first_bad):
    """2 of 3 clients, then all: the one that is right is aggregated, or nothing is."""

    def on_train(reply, partition):
        if partition < first_bad:
            fault(reply)
        return reply

    def alone(reply, partition):
        if partition < first_bad:
            raise RuntimeError("not there")
        return reply

    memory = Memory()
    strategy = observe(st.FedAvg(fraction_evaluate=0.0), memory, bad_replies="drop")
    found, _ = serve(strategy, client_app(on_train=on_train), 3)
    expected, _ = serve(st.FedAvg(fraction_evaluate=0.0), client_app(on_train=alone), 3)
    assert content(found)["arrays"] == content(expected)["arrays"]
    left_out = [e for e in memory.events if "left out of the aggregation" in e.message]
    assert len(left_out) == 2 * first_bad


STRATEGIES = {
    "FedAvg": st.FedAvg, "FedProx": lambda **k: st.FedProx(proximal_mu=0.1, **k),
    "FedMedian": st.FedMedian, "FedTrimmedAvg": st.FedTrimmedAvg, "FedAvgM": st.FedAvgM,
    "FedAdam": st.FedAdam, "FedAdagrad": st.FedAdagrad, "FedYogi": st.FedYogi, "Krum": st.Krum,
    "MultiKrum": st.MultiKrum, "Bulyan": st.Bulyan,
    "QFedAvg": lambda **k: st.QFedAvg(client_learning_rate=0.1, **k),
    "DP, fixed": lambda **k: st.DifferentialPrivacyServerSideFixedClipping(
        st.FedAvg(**k), 0.1, 1.0, 2),
    "DP, adaptive": lambda **k: st.DifferentialPrivacyServerSideAdaptiveClipping(
        st.FedAvg(**k), 0.1, 2),
    "DP of clients": lambda **k: st.DifferentialPrivacyClientSideAdaptiveClipping(
        st.FedAvg(**k), 0.1, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_strategy_of_flowers_ends_where_all_replies_are_left_out(name):
    """Their own metrics are missing too: ``train_loss`` of q-FedAvg, the norm bit of DP."""

    def on_train(reply, partition):
        _a_list(reply)
        return reply

    memory = Memory()
    strategy = STRATEGIES[name](fraction_evaluate=0.0)
    around = observe(strategy, memory, bad_replies="drop")
    found, _ = serve(around, client_app(on_train=on_train), 2)
    assert not [e for e in memory.events if e.level == "error"]
    before = {k: a.data for k, a in ArrayRecord(network().state_dict()).items()}
    assert not found.arrays or {k: a.data for k, a in found.arrays.items()} == before


@pytest.mark.parametrize("name", ["QFedAvg", "DP of clients"])
def test_a_reply_without_what_the_strategy_reads_is_wrong_however_many_they_are(name):
    memory = Memory()
    around = observe(STRATEGIES[name](fraction_evaluate=0.0), memory, bad_replies="drop")
    serve(around, client_app(), 2)
    needed = "train_loss" if name == "QFedAvg" else "norm_bit"
    said = [
        e.message for e in memory.events if f"the strategy needs the metric {needed!r}" in e.message
    ]
    assert len(said) == 4


def test_what_is_no_known_model_has_to_have_the_shapes_that_were_sent():
    """The strategy sends another model than observe was given."""
    sent = nn.Linear(3, 2)
    app = ClientApp()

    @app.train()
    def train(message, context):
        state = message.content["arrays"].to_torch_state_dict()
        if context.node_config["partition-id"] == BAD:
            state["weight"] = torch.zeros(5, 5)
        metrics = MetricRecord({"num-examples": 1})
        return Message(
            RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message
        )

    memory = Memory()
    around = observe(st.FedAvg(fraction_evaluate=0.0), memory, bad_replies="drop")
    found, _ = serve(around, app, 2, num_rounds=1, arrays=ArrayRecord(sent.state_dict()))
    assert found.arrays["weight"].shape in ((2, 3), [2, 3])
    assert sum("must have shape (2, 3)" in e.message for e in memory.events) == 1


def test_bytes_that_are_no_tensor_may_have_any_length():
    from flwr_leakage.flower.arrays import MalformedArraysError, check_like

    sent = ArrayRecord({"0": torch.zeros(4, dtype=torch.uint8)})
    longer = ArrayRecord({"0": torch.zeros(9, dtype=torch.uint8)})
    assert check_like(longer, sent) == ()
    with pytest.raises(MalformedArraysError):
        check_like(ArrayRecord({"0": torch.zeros(9)}), ArrayRecord({"0": torch.zeros(4)}))


def test_a_reply_that_ends_the_run_costs_no_record_of_the_others():
    """Handed on, it ends the run as without the audit; its round is recorded all the same."""

    def on_train(reply, partition):
        if partition == BAD:
            _no_arrays(reply)
        return reply

    memory = Memory()
    around = observe(st.FedAvg(fraction_evaluate=0.0), memory, bad_replies="pass")
    with pytest.raises(Exception, match="exactly one ArrayRecord"):
        serve(around, client_app(on_train=on_train), 3)
    objectives = [r for r in memory.records if r.name == "objective"]
    assert sorted(r.client_id % 2**32 for r in objectives) == [0, 2]
