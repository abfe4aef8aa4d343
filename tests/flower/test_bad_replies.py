"""Replies that would harm an aggregation: recorded always, left out only where one asks for it."""

import json
import random

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as st
from observed import Memory, client_app, content, network, observe, serve

from flwr_leakage.audit import ClientNote
from flwr_leakage.flower.names import ClientNames
from flwr_leakage.flower.wire import RECORD_KEY, pack_note


def _set(reply, **metrics):
    for name, value in metrics.items():
        reply.content["metrics"][name.replace("_", "-")] = value
    return reply


def _half(reply):
    state = reply.content["arrays"].to_torch_state_dict()
    half = {k: v.half() if v.is_floating_point() else v for k, v in state.items()}
    reply.content["arrays"] = ArrayRecord(half)
    return reply


def _histogram(reply):
    reply.content["metrics"]["histogram[3]"] = 1.0
    return reply


def _dotted(reply):
    metrics = reply.content.pop("metrics")
    reply.content["metrics.train-loss"] = metrics
    return reply


FAULTS = {
    "1e308 samples": (lambda r: _set(r, num_examples=1e308), "must be at most 2^53, got 1e+308"),
    "no samples": (lambda r: _set(r, num_examples=0), "must be at least 1, got 0"),
    "float16": (_half, "are less precise than the model's"),
    "a loss of NaN": (lambda r: _set(r, train_loss=float("nan")), "'train-loss' must be finite"),
    "a number that looks like a list": (_histogram, "histogram[3]"),
    "a record with a dot": (_dotted, "'metrics.train-loss' of"),
}


def run(fault, first_bad=1, num_clients=4, arrays=None, note=None, **choice):
    """Clients ``0 … first_bad − 1`` misbehave; returns the result and the events."""

    def on_train(reply, partition):
        if note is not None:
            reply.content[RECORD_KEY] = pack_note(note(partition))
        return fault(reply) if partition < first_bad else reply

    memory = Memory()
    around = observe(st.FedAvg(fraction_evaluate=0.0), memory, **choice) if choice else None
    result, _ = serve(
        around or st.FedAvg(fraction_evaluate=0.0), client_app(on_train=on_train), num_clients,
        num_rounds=1,
    )  # fmt: skip
    return result, memory


def _without_the_first(num_clients=4):
    def on_train(reply, partition):
        if partition == 0:
            raise RuntimeError("not there")
        return reply

    app = client_app(on_train=on_train)
    return serve(st.FedAvg(fraction_evaluate=0.0), app, num_clients, num_rounds=1)[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_reply_is_left_out_where_one_asks_for_it(name):
    fault, said = FAULTS[name]
    result, memory = run(fault, bad_replies="drop")
    assert content(result)["arrays"] == content(_without_the_first())["arrays"]
    (event,) = memory.events
    assert "was left out of the aggregation" in event.message
    assert said in event.message
    arrays = result.arrays.to_torch_state_dict()
    assert all(value.isfinite().all() for value in arrays.values())
    assert arrays["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("name", [n for n in FAULTS if "looks" not in n and "dot" not in n])
def test_by_default_it_is_handed_on_and_recorded(name):
    fault, said = FAULTS[name]
    result, memory = run(fault, bad_replies="pass")
    plain, _ = run(fault)
    assert repr(content(result)) == repr(content(plain))  # NaN equals itself here
    (event,) = memory.events
    assert event.level == "warning"
    assert "is bad, and was handed on" in event.message
    assert said in event.message


@pytest.mark.parametrize("fault", [_histogram, _dotted])
def test_a_round_that_flower_refuses_is_refused_as_without_the_audit(fault):
    refused = []
    for choice in ({}, {"bad_replies": "pass"}):
        with pytest.raises(Exception, match="MetricRecord") as error:
            run(fault, **choice)
        refused.append((error.type, str(error.value)))
    assert refused[0] == refused[1]


@pytest.mark.parametrize("first", ["arrives first", "arrives last"])
def test_of_two_layouts_that_tie_the_one_of_the_rounds_before_is_kept(first):
    """Client 0 changes its metrics in the second round, when only two answer."""

    def on_train(reply, partition):
        rounds.append(partition)
        return _histogram(reply) if len(rounds) > 2 and partition == bad else reply

    rounds, bad = [], 0 if first == "arrives first" else 1
    memory = Memory()
    strategy = observe(st.FedAvg(fraction_evaluate=0.0), memory, bad_replies="drop")
    serve(strategy, client_app(on_train=on_train), 2)
    (event,) = memory.events
    assert event.server_round == 2
    assert event.client_id % 2 == bad


def test_an_unlike_reply_never_leaves_out_the_many():
    """``metrics`` with ``a.b`` and ``metrics.a`` with ``b`` read alike, and are not."""

    def on_train(reply, partition):
        key, name = ("metrics.a", "b") if partition == 0 else ("metrics", "a.b")
        count = reply.content.pop("metrics")["num-examples"]
        reply.content[key] = MetricRecord({"num-examples": count, name: 1.0})
        return reply

    memory = Memory()
    strategy = observe(st.FedAvg(fraction_evaluate=0.0), memory, bad_replies="drop")
    result, _ = serve(strategy, client_app(on_train=on_train), 3, num_rounds=1)
    assert result.train_metrics_clientapp[1]["a.b"] == pytest.approx(1.0)
    assert [event.client_id % 4 for event in memory.events] == [0]


def _replies(observed, contents):
    """What a server receives, made by hand: (node, content) of each."""
    from flwr_leakage.flower import InlineGrid

    grid = InlineGrid(client_app(), 3)
    nodes = list(grid.get_node_ids())
    random.seed(0)
    asked = observed.configure_train(1, ArrayRecord(network().state_dict()), ConfigRecord(), grid)
    by_node = {message.metadata.dst_node_id: message for message in asked}
    return [Message(record, reply_to=by_node[nodes[place]]) for place, record in contents]


def _good(scale=1.0, examples=1):
    state = {k: v * scale for k, v in network().state_dict().items()}
    metrics = MetricRecord({"num-examples": examples})
    return RecordDict({"arrays": ArrayRecord(state), "metrics": metrics})


@pytest.mark.parametrize(("choice", "expected"), [("pass", 5.0), ("drop", 2.0)])
def test_a_second_answer_is_recorded_and_aggregated_only_where_it_would_be(choice, expected):
    memory = Memory()
    observed = observe(st.FedAvg(), memory, bad_replies=choice)
    replies = _replies(observed, [(0, _good(1.0)), (1, _good(3.0)), (1, _good(11.0))])
    arrays, _ = observed.aggregate_train(1, iter(replies))
    weight, sent = (a["3.weight"].numpy() for a in (arrays, ArrayRecord(network().state_dict())))
    np.testing.assert_allclose(weight, expected * sent, rtol=1e-5)
    told = [event.message for event in memory.events]
    assert any("answer number 2 in this round" in message for message in told)
    assert any(message.endswith("never replied") for message in told)
    assert len([r for r in memory.records if r.name == "objective"]) == 2


def test_silent_and_failing_nodes_are_named_in_training_and_evaluation():
    """The first round too, when no note has named anyone; a name that comes later is told."""

    def on_train(reply, partition):
        calls.append(partition)
        if len(calls) <= 2 and partition == 0:
            raise RuntimeError("first time")
        reply.content[RECORD_KEY] = pack_note(ClientNote(partition))
        return reply

    def on_evaluate(reply, partition):
        if partition == 1:
            raise RuntimeError("no test data")
        return reply

    calls = []
    app = client_app(on_train=on_train, on_evaluate=on_evaluate)
    memory = Memory()
    serve(observe(st.FedAvg(), memory), app, 2)
    told = [(e.server_round, e.client_id, e.message) for e in memory.events]
    node = 1 << 32
    assert (1, node, f"node {node} answered with an error: RuntimeError: first time") in told
    assert (2, 0, f"node {node}, of which events before tell, is client 0") in told
    failed = f"evaluation: node {node + 1} (client 1) answered with an error: RuntimeError: no test"
    assert [(r, c) for r, c, m in told if m.startswith(failed)] == [(1, 1), (2, 1)]


def test_names_are_claims_that_the_first_keeps_and_ties_lose():
    names = ClientNames()
    assert not names.learn({100: 0})
    assert names.learn({100: 0, 101: 0})[101].endswith("as node 100 did before")
    restarted = names.learn({101: 0})[101]
    assert restarted.endswith("a SuperNode that is restarted has another node id")
    assert (names.of(100), names.of(101)) == (0, 101)
    assert set(names.learn({102: 5, 103: 5})) == {102, 103}
    assert not names.learn({102: 5})
    assert "now says it is client 9" in names.learn({100: 9})[100]
    assert names.of(100) == 0
    assert "another node's id" in names.learn({104: 105, 105: 7})[104]
    assert names.known == {100, 102, 105}


def test_who_claims_another_id_or_is_silent_once_takes_nobodys_place():
    """Client 0 sends no note in the first round, in which client 1 takes its name."""

    def on_train(reply, partition):
        calls.append(partition)
        if len(calls) > 3 or partition != 0:
            claim = 0 if partition == 1 else partition
            reply.content[RECORD_KEY] = pack_note(ClientNote(claim))
        return reply

    calls, memory = [], Memory()
    strategy = st.FedAvg(fraction_evaluate=0.0)
    observed, _ = serve(
        observe(strategy, memory, bad_replies="drop"), client_app(on_train=on_train), 3
    )
    plain, _ = serve(st.FedAvg(fraction_evaluate=0.0), client_app(), 3)
    assert content(observed)["arrays"] == content(plain)["arrays"]
    assert len([r for r in memory.records if r.name == "objective"]) == 6
    (event,) = memory.events
    assert (event.server_round, event.client_id) == (2, 1 << 32)


# Whatever a client writes


def _any_array(draws, like):
    shape = like.shape if draws.random() < 0.7 else tuple(draws.choices([0, 1, 2, 8, 3], k=2))
    dtype = draws.choice(["f2", "f4", "f4", "f4", "f8", "i8", "u1", "?", "c8"])
    values = np.full(shape, draws.choice([0.0, 1.0, -1e30, 65504.0]), dtype)
    if dtype[0] == "f" and values.size and draws.random() < 0.2:
        values.flat[0] = draws.choice([np.nan, np.inf, -np.inf])
    array = Array(values)
    if draws.random() < 0.1:
        array.data = bytes(draws.choices(range(256), k=draws.choice([0, 5, 200])))
    return array


def _any_reply(draws, message):
    """A reply with some of its parts changed at random."""
    good = _good(examples=draws.randint(1, 5))
    if draws.random() < 0.3:
        return Message(good, reply_to=message)
    record = RecordDict()
    arrays = dict(good["arrays"])
    for name in list(arrays):
        if draws.random() < 0.15:
            arrays[name] = _any_array(draws, arrays[name])
    if draws.random() < 0.15:
        del arrays[draws.choice(list(arrays))]
    record[draws.choice(["arrays"] * 8 + ["weights"])] = ArrayRecord(arrays)
    big = [1, 3, 0, -1, 2.5, 1e308, float("inf"), float("nan"), 2**62, [1, 2], [], [1e308]]
    metrics = {"num-examples": draws.choice(big) if draws.random() < 0.4 else 2}
    for name in ("train-loss", "histogram[3]", "\x1b[2J", "\u202ex"):
        if draws.random() < 0.08:
            metrics[name] = draws.choice(big)
    if draws.random() < 0.1:
        del metrics["num-examples"]
    record[draws.choice(["metrics"] * 8 + ["metrics.a"])] = MetricRecord(metrics)
    if draws.random() < 0.3:
        notes = [pack_note(ClientNote(draws.randint(0, 3)))]
        notes += [ConfigRecord({"note": text}) for text in ("", "{", "null", json.dumps({"a": 1}))]
        notes += [ConfigRecord({"note": draws.choice([b"x", 1.5, [1], True])}), ConfigRecord()]
        record[RECORD_KEY] = draws.choice(notes)
    return Message(record, reply_to=message)


def _through_the_wire(message):
    from flwr.common.serde import message_from_proto, message_to_proto

    return message_from_proto(message_to_proto(message))


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_generated_replies_end_no_run(seed):
    """4 × 52 rounds × 5 replies. Left out, no round fails; handed on, each fails as it would."""
    from flwr_leakage.flower import InlineGrid

    draws, grid = random.Random(seed), InlineGrid(client_app(), 4)
    memories = [Memory(), Memory()]
    kept, passed = (
        observe(st.FedAvg(), memory, bad_replies=choice)
        for memory, choice in zip(memories, ("drop", "pass"), strict=True)
    )
    plain, sent = st.FedAvg(), ArrayRecord(network().state_dict())
    failed_without = 0
    for server_round in range(1, 53):
        for strategy in (kept, passed, plain):
            messages = list(strategy.configure_train(server_round, sent, ConfigRecord(), grid))
        answered = draws.choices(messages, k=5)
        replies = [_through_the_wire(_any_reply(draws, message)) for message in answered]
        arrays, _ = kept.aggregate_train(server_round, replies)
        for name, value in (arrays or {}).items():
            found, like = value.numpy(), sent[name].numpy()
            assert found.shape == like.shape
            assert np.isfinite(found).all()
        outcomes = []
        for strategy in (plain, passed):
            try:
                arrays, metrics = strategy.aggregate_train(server_round, replies)
                outcomes.append(repr((arrays and {k: v.data for k, v in arrays.items()}, metrics)))
            except Exception as error:
                outcomes.append(repr(error))
                failed_without += strategy is plain
        assert outcomes[0] == outcomes[1]
    assert failed_without > 10  # else these replies would show nothing
    assert not [e for memory in memories for e in memory.events if "audit failed" in e.message]
