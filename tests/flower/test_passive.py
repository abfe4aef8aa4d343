"""An observer changes nothing: the same arrays to the bit, clients and generators."""

import gc
import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as st
from observed import Memory, client_app, content, observe, serve


@pytest.fixture(autouse=True)
def _short_garbage_collections():
    """Bulyan and QFedAvg collect garbage after each array: of the test's own objects only."""
    gc.freeze()
    yield
    gc.unfreeze()


CLIENTS = 11
SHARE = {"fraction_train": 0.8, "fraction_evaluate": 0.3}  # 8 of 11 train, 3 evaluate


def fedavg():
    return st.FedAvg(**SHARE)


STRATEGIES = {
    "FedAvg": fedavg,
    "FedAvgM": lambda: st.FedAvgM(**SHARE, server_momentum=0.9),
    "FedAdagrad": lambda: st.FedAdagrad(**SHARE),
    "FedAdam": lambda: st.FedAdam(**SHARE),
    "FedYogi": lambda: st.FedYogi(**SHARE),
    "FedProx": lambda: st.FedProx(**SHARE, proximal_mu=0.1),
    "FedMedian": lambda: st.FedMedian(**SHARE),
    "FedTrimmedAvg": lambda: st.FedTrimmedAvg(**SHARE),
    "Krum": lambda: st.Krum(**SHARE, num_malicious_nodes=1),
    "MultiKrum": lambda: st.MultiKrum(**SHARE, num_malicious_nodes=1, num_nodes_to_select=4),
    "Bulyan": lambda: st.Bulyan(**SHARE, num_malicious_nodes=1),
    "QFedAvg": lambda: st.QFedAvg(0.1, train_loss_key="train-loss", **SHARE),
    "DP server, fixed": lambda: st.DifferentialPrivacyServerSideFixedClipping(
        fedavg(), 0.1, 0.05, 8
    ),
    "DP server, adaptive": lambda: st.DifferentialPrivacyServerSideAdaptiveClipping(
        fedavg(), 0.3, 8, 0.05
    ),
    "DP client, fixed": lambda: st.DifferentialPrivacyClientSideFixedClipping(
        fedavg(), 0.1, 0.05, 8
    ),
    "DP client, adaptive": lambda: st.DifferentialPrivacyClientSideAdaptiveClipping(
        fedavg(), 0.3, 8, 0.05
    ),
}
MODS = {"DP client, fixed": fixedclipping_mod, "DP client, adaptive": adaptiveclipping_mod}


def _counters_as_floats(reply, partition):
    """Flower's QFedAvg cannot average the integers of BatchNorm, with or without an audit."""
    state = reply.content["arrays"].to_torch_state_dict()
    reply.content["arrays"] = ArrayRecord({name: value.float() for name, value in state.items()})
    return reply


FITTING = {"QFedAvg": _counters_as_floats}


def test_the_table_names_every_strategy_of_flower():
    bases = {"Strategy", "Result"}
    xgboost = {"FedXgbBagging", "FedXgbCyclic"}
    named = {type(make()).__name__ for make in STRATEGIES.values()}
    assert named | xgboost == set(st.__all__) - bases


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_gives_the_same_bits_with_and_without_an_audit(name):
    mods, change = [MODS[name]] if name in MODS else [], FITTING.get(name)
    app, memory = client_app(*mods, on_train=change), Memory()
    plain, states = serve(STRATEGIES[name](), app, CLIENTS)
    observed, states_observed = serve(observe(STRATEGIES[name](), memory), app, CLIENTS)
    assert content(plain) == content(observed)
    assert states == states_observed
    assert not memory.events
    assert len([r for r in memory.records if r.name == "objective"]) == 2 * 8


@pytest.mark.parametrize("choice", [{"bad_replies": "drop"}, {"reproducible": True}])
def test_dropping_changes_nothing_where_all_replies_are_good_and_reproducing_leaves_no_trace(
    choice,
):
    plain, states = serve(fedavg(), client_app(), CLIENTS)
    observed, states_observed = serve(observe(fedavg(), **choice), client_app(), CLIENTS)
    if "reproducible" not in choice:
        assert content(plain) == content(observed)
        assert states == states_observed
    again, _ = serve(observe(fedavg(), **choice), client_app(), CLIENTS)
    assert content(again) == content(observed)


def _trees():
    model = {
        "gbtree_model_param": {"num_trees": "1", "num_parallel_tree": "1"},
        "iteration_indptr": [0, 1],
        "trees": [{"id": 0}],
        "tree_info": [0],
    }
    text = json.dumps({"learner": {"gradient_booster": {"model": model}}})
    return np.frombuffer(text.encode(), np.uint8)


@pytest.mark.parametrize("name", ["FedXgbBagging", "FedXgbCyclic"])
def test_trees_pass_through_and_are_told_to_be_no_model_of_the_audit(name):
    app, memory = ClientApp(), Memory()

    @app.train()
    def train(message, context):
        arrays = ArrayRecord({"0": Array(_trees())})
        metrics = MetricRecord({"num-examples": 4})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    def run(around):
        strategy = around(getattr(st, name)(fraction_train=1.0, fraction_evaluate=0.0))
        first = ArrayRecord({"0": Array(np.zeros(0, np.uint8))})
        return serve(strategy, app, 3, arrays=first)

    plain, observed = run(lambda s: s), run(lambda s: observe(s, memory))
    assert content(plain[0]) == content(observed[0])
    assert plain[1] == observed[1]
    assert memory.events
    told = {e.message.partition(": ")[2] for e in memory.events if "evaluation" not in e.message}
    assert told
    assert all("the model's 9 entries; missing" in message for message in told), told


class CustomFedAvg(st.FedAvg):
    """As apps do it: a ``start`` of its own, with state of its own."""

    rounds = 0

    def set_factor(self, factor):
        self.factor = factor

    def start(self, grid, initial_arrays, num_rounds=3, **settings):
        arrays, result = initial_arrays, st.Result()
        for server_round in range(1, num_rounds + 1):
            self.rounds += 1
            replies = grid.send_and_receive(
                messages=self.configure_train(server_round, arrays, settings["config"], grid)
            )
            arrays, _ = self.aggregate_train(server_round, replies)
            scaled = {k: Array(np.asarray(v.numpy() * self.factor)) for k, v in arrays.items()}
            arrays = result.arrays = ArrayRecord(scaled)
        return result


def test_an_apps_own_start_and_state_are_run_and_observed():
    from flwr.app import ConfigRecord

    def run(around):
        strategy = CustomFedAvg(**SHARE)
        wrapped = around(strategy)
        wrapped.set_factor(0.5)
        result, states = serve(wrapped, client_app(), CLIENTS, config=ConfigRecord())
        assert wrapped.rounds == strategy.rounds == 2
        assert not {"configure_train", "aggregate_train"} & set(vars(strategy))
        return content(result), states

    memory = Memory()
    assert run(lambda s: s) == run(lambda s: observe(s, memory))
    assert len([r for r in memory.records if r.name == "objective"]) == 2 * 8


def test_a_start_that_goes_around_the_phases_is_told():
    class Bypass(st.FedAvg):
        def start(self, grid, initial_arrays, num_rounds=3, **settings):
            return st.Result(arrays=initial_arrays)

    memory = Memory()
    serve(observe(Bypass(), memory), client_app(), 3)
    (event,) = memory.events
    assert event.level == "error"
    assert "Bypass.start never called configure_train" in event.message


def test_the_strategys_own_error_is_recorded_and_raised_as_it_is():
    class Failing(st.FedAvg):
        def aggregate_train(self, server_round, replies):
            raise ZeroDivisionError("no weight")

    memory, strategy = Memory(), Failing()
    with pytest.raises(ZeroDivisionError, match="no weight"):
        serve(observe(strategy, memory), client_app(), 3)
    assert [(e.level, e.server_round) for e in memory.events] == [("error", 1)]
    assert "ended early: ZeroDivisionError: no weight" in memory.events[0].message
    assert not vars(strategy).keys() & {"aggregate_train"}


@pytest.mark.parametrize("broken", ["wants", "inspect", "begin_round", "warn"])
def test_an_error_of_the_audit_is_none_of_the_training(broken, monkeypatch):
    from flwr_leakage.audit import ServerAudit

    def fail(self, *args, **kwargs):
        raise MemoryError("no room")

    monkeypatch.setattr(ServerAudit, broken, fail)
    plain, states = serve(fedavg(), client_app(), CLIENTS)
    memory = Memory()
    observed, states_observed = serve(observe(fedavg(), memory), client_app(), CLIENTS)
    assert (content(plain), states) == (content(observed), states_observed)
    told = [event.message for event in memory.events]
    assert broken == "warn" or any("no room" in message for message in told)
