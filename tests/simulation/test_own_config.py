"""The server's side writes the run config: what of it a client follows, and what never."""

import json
import logging
import shutil

import pytest
from audits import TINY, no_page, values
from flwr.app import Context, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.defenses import DPSGD
from flwr_leakage.flower import InlineGrid
from flwr_leakage.flower.inline_grid import SERVER_NODE_ID
from flwr_leakage.report.story import facts
from flwr_leakage.simulation import flower_app, own_config
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.simulation.foreign import check_targets
from flwr_leakage.simulation.own_config import TAKEN, split_overrides
from flwr_leakage.tracking import read_run


def _run(tiny_data, folder, run_overrides, node_config, num_clients=2, server_overrides=None):
    """``flwr run`` on real nodes: the apps of the bundle, a run config, each node's own config."""
    data = f"dataset=npz dataset.name=tiny dataset.root={tiny_data}"
    own = f"{' '.join(TINY)} {data} {node_config.pop('leakage-overrides', '')}"
    base = f"{' '.join(TINY)} {data} num_clients={num_clients} num_rounds=1"
    run_config = {"hydra-overrides": f"{base} {run_overrides}", "run-dir": str(folder)}
    grid = InlineGrid(flower_app.client_app, num_clients, run_config)
    for context in grid._contexts.values():
        context.node_config |= {"leakage-overrides": own, **node_config}
    if server_overrides is not None:
        run_config = run_config | {"hydra-overrides": f"{base} {server_overrides}"}
    context = Context(1, SERVER_NODE_ID, {}, RecordDict(), run_config)
    with no_page():
        flower_app.server_app(grid, context)
    return read_run(folder)


def test_a_run_that_sets_no_defense_trains_with_the_nodes_own_and_records_it(tiny_data, tmp_path):
    run = _run(
        tiny_data, tmp_path / "run", "defense=none", {"leakage-overrides": "defense=pruning"}
    )
    told = [event for event in run.events if "defense=pruning of its own config" in event.message]
    assert {event.client_id for event in told} == {0, 1}
    assert all("not taken from the run's config: " in event.message for event in told)
    assert all(" defense" in event.message for event in told)


def test_nothing_is_measured_against_a_truth_that_the_server_cannot_know(tiny_data, tmp_path):
    """MixUp draws from the node's entropy, and the samples are the node's own."""
    mixup = "defense=mixup client.num_examples=4 client.batch_size=4"
    run = _run(tiny_data, tmp_path / "run", mixup, {"leakage-overrides": mixup})
    assert len(values(run, "objective")) == 2
    assert not [record for record in run.records if record.kind == "metric"]
    assert {image.role for image in run.images} <= {"reconstruction"}
    told = [event.message for event in run.events if "samples are unknown here" in event.message]
    assert len(told) == 2


def test_the_server_cannot_grant_labels_that_it_cannot_know(tiny_data, tmp_path):
    run = _run(tiny_data, tmp_path / "run", "threat.labels=known", {})
    assert not values(run, "objective")
    refused = [event for event in run.events if "was not attacked" in event.message]
    assert {event.client_id for event in refused} == {0, 1}
    assert all(
        "labels='known'" in event.message and "and no truth" in event.message for event in refused
    )


def test_the_servers_defense_is_not_told_as_the_nodes(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(DPSGD, "epsilon", lambda self, *arguments: 3.0)
    asked = "defense=dp_sgd client.batch_size=1"
    run = _run(tiny_data, tmp_path / "run", asked, {"leakage-overrides": "defense=pruning"})
    assert run.metadata["defense"] == "of the nodes' own config; the run's names dp_sgd"
    assert run.metadata["own_config_clients"] == [0, 1]
    assert not values(run, "dp_epsilon_replace_one")
    (defense,) = [fact for fact in facts(run.metadata) if fact.term == "defense"]
    assert not defense.settings


@pytest.mark.parametrize(
    ("node", "sent"),
    [
        ({}, False),
        ({"leakage-overrides": "scoring.send=true"}, True),
        ({"leakage-allow": "scoring.send"}, True),
    ],
)
def test_a_real_node_keeps_its_scores_unless_its_owner_says_otherwise(
    tiny_data, tmp_path, node, sent
):
    own = f"score=gradient_norm {node.get('leakage-overrides', '')}"
    asked = "scoring.send=true selection.first=9"
    run = _run(tiny_data, tmp_path / "run", asked, {**node, "leakage-overrides": own}, 1)
    scores = [record for record in run.records if record.kind == "score"]
    assert bool(scores) == sent


def test_what_is_sent_is_pruned(tiny_data, tmp_path, monkeypatch):
    """The same, read off the updates themselves."""
    seen = []
    original = flower_app.client_app.__class__.__call__

    def listen(self, message, context):
        reply = original(self, message, context)
        before = message.content["arrays"].to_torch_state_dict()
        after = reply.content["arrays"].to_torch_state_dict()
        seen.append(sum(int((after[k] != before[k]).sum()) for k in before))
        return reply

    monkeypatch.setattr(flower_app.client_app.__class__, "__call__", listen)
    for folder, asked, own in (("a", "none", "pruning"), ("b", "pruning", "none")):
        node = {"leakage-overrides": f"defense={own}"}
        _run(tiny_data, tmp_path / folder, f"defense={asked} selection.first=9", node, 1)
    pruned, whole = seen
    assert pruned < 0.05 * whole


def test_draws_on_real_nodes_come_from_entropy(tiny_data, tmp_path):
    own = {"leakage-overrides": "defense=gaussian"}
    runs = [_run(tiny_data, tmp_path / name, "seed=0", dict(own), 1) for name in ("a", "b")]
    assert not [e for run in runs for e in run.events if "draw from a seed" in e.message]
    first, second = (values(run, "objective") for run in runs)
    assert first != second


ATTACKS = [
    "+defense.evil._target_=shutil.copyfile +defense.evil.src={src} +defense.evil.dst={dst}",
    "defense._target_=shutil.copyfile +defense.src={src} +defense.dst={dst}",
    "model.network._target_=shutil.copyfile +model.network.src={src} +model.network.dst={dst}",
    "tracker=wandb tracker._target_=shutil.copyfile +tracker.src={src} +tracker.dst={dst}",
    # Every module that this package imports can be reached through it.
    "model.network._target_=flwr_leakage._conf.shutil.copyfile",
    "partition._target_=shutil.copyfile +partition.src={src} +partition.dst={dst}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_run_config_copies_no_file_on_a_client(tiny_data, tmp_path, attack):
    source, target = tmp_path / "private", tmp_path / "public"
    source.write_text("secret")
    attack = attack.format(src=source, dst=target)
    _run(tiny_data, tmp_path / "run", attack, {}, 1, server_overrides="selection.first=9")
    assert not target.exists()


@pytest.mark.parametrize("attack", ATTACKS)
def test_nor_on_the_server(tiny_data, tmp_path, attack):
    source, target = tmp_path / "private", tmp_path / "public"
    source.write_text("secret")
    with pytest.raises(ConfigError, match="must be a class of the packaged config"):
        _run(tiny_data, tmp_path / "run", attack.format(src=source, dst=target), {})
    assert not target.exists()


def test_the_packaged_copy_attack_would_work_without_the_check(tmp_path):
    """The test above says something only because Hydra does call what it is told to."""
    import hydra

    source, target = tmp_path / "private", tmp_path / "public"
    source.write_text("secret")
    hydra.utils.instantiate({"_target_": "shutil.copyfile", "src": source, "dst": target})
    assert target.read_text() == source.read_text()
    assert shutil.copyfile  # the name that the attacks use


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"network": {"_target_": "os.system"}}},
        {"a": [{"b": {"_target_": "flwr_leakage.flower.launch.os.system"}}]},
        {"defense": {"_target_": "flwr_leakage.defenses.NoDefense", "_partial_": True}},
        {"defense": {"_target_": "flwr_leakage.defenses.NoDefense", "_args_": [1]}},
        {"defense": {"_partial_": True}},
    ],
)
def test_only_what_the_packaged_config_names_is_called(config):
    with pytest.raises(ConfigError):
        check_targets(config)
    check_targets({"defense": {"_target_": "flwr_leakage.defenses.NoDefense"}})


def test_what_a_client_follows():
    taken = ["model=mlp", "client.num_steps=3", "client.learning_rate=0.5"]
    ignored = [
        "defense=none",
        "+defense.evil=1",
        "++client.num_steps=2",
        "~defense",
        "client.num_threads=64",
        "client.max_samples=1",
        "scoring.send=true",
        "dataset.root=/home",
        "model.network._target_=os.system",
        "model=../../tmp/evil",
        "model@defense=mlp",
        "client.learning_rate=${oc.env:HOME}",
        "client.learning_rate='a'",
        "client.num_steps=[1,2]",
        "client={num_steps:1}",
        "seed=7",
        "experiment=two_steps",
        "hydra.run.dir=/tmp/x",
    ]
    followed, left_out = split_overrides([*taken, *ignored], TAKEN)
    assert followed == taken
    assert {"defense", "scoring.send", "dataset.root", "seed", "experiment"} <= set(left_out)
    assert split_overrides(taken, ())[0] == []


@given(st.lists(st.sampled_from([*TAKEN, "defense", "score", "scoring.send", "seed"]), max_size=6))
def test_nothing_that_is_not_allowed_is_followed(keys):
    followed, left_out = split_overrides([f"{key}=1" for key in keys], TAKEN)
    assert {text.split("=")[0] for text in followed} <= set(TAKEN) - {"model"}
    assert set(left_out) == set(keys) - {text.split("=")[0] for text in followed}


def test_the_local_training_is_the_servers_unless_the_owner_says_otherwise(tiny_data):
    def config(run, **node):
        node = {"partition-id": 0, "num-partitions": 3, **node}
        node["leakage-overrides"] = " ".join(
            [
                *(override for override in TINY if not override.startswith("client.num_steps")),
                "dataset=npz dataset.name=tiny",
                f"dataset.root={tiny_data}",
            ]
            + ([node["leakage-overrides"]] if "leakage-overrides" in node else [])
        )
        context = Context(1, 5, node, RecordDict(), run)
        return own_config.experiment_of_client(context).config

    run = {"hydra-overrides": "client.num_steps=3 client.num_examples=2 num_clients=50 seed=4"}
    assert config(run)["client"]["num_steps"] == 3
    assert config(run)["client"]["num_examples"] == 1
    assert config(run)["num_clients"] == 3
    assert config(run)["seed"] == 0
    refusing = config(run, **{"leakage-allow": ""})
    assert refusing["client"]["num_steps"] is None  # by epochs, as in the packaged config
    above = config(run, **{"leakage-overrides": "client.num_steps=2"})
    assert above["client"]["num_steps"] == 2


def test_the_server_reads_nothing_of_a_clients_own_config_in_its_errors(tiny_data, caplog):
    node = {"partition-id": 0, "leakage-overrides": "defense=gaussian defense.noise_std=-77.5"}
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(ConfigError, match="its own log says why") as caught,
    ):
        own_config.experiment_of_client(Context(1, 5, node, RecordDict(), {}))
    assert "77" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "-77.5" in caplog.text


def test_whatever_happens_the_server_reads_a_general_text_only(monkeypatch, caplog):
    def fail(*arguments):
        raise RuntimeError("/home/owner/private")

    monkeypatch.setattr(own_config, "build", fail)
    with pytest.raises(ConfigError, match="its own log says why") as caught:
        own_config.experiment_of_client(Context(1, 5, {"partition-id": 0}, RecordDict(), {}))
    assert "private" not in str(caught.value)
    assert "/home/owner/private" in caplog.text


def test_a_virtual_node_follows_the_run(monkeypatch):
    monkeypatch.setattr(own_config, "on_virtual_node", lambda: True)
    run = {"hydra-overrides": "defense=pruning seed=4"}
    node = {"partition-id": 0, "num-partitions": 2}
    experiment = own_config.experiment_of_client(Context(1, 5, node, RecordDict(), run))
    assert experiment.config["choices"]["defense"] == "pruning"
    assert experiment.client_audit().seed == 4
    assert not experiment.client_audit().own_config
    json.dumps(experiment.config)


def test_this_process_is_no_virtual_node():
    assert not own_config.on_virtual_node()


def test_a_run_can_neither_open_a_nodes_gate_nor_have_its_self_attack_shared():
    wanted = ["gate=none", "self_attack=none", "client.share=numbers", "client.folder=/tmp/x"]
    taken, left_out = split_overrides(wanted, TAKEN)
    assert (taken, len(left_out)) == ([], 4)
