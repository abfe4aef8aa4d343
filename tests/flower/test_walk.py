"""Rounds over the in-process grid: the bookkeeping from the private batch to the record."""

import pytest
import torch
from audits import TINY, numbers, run, tiny_config, values
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict

from flwr_leakage.flower import InlineGrid
from flwr_leakage.flower.wire import RECORD_KEY
from flwr_leakage.gradient_map import local_update
from flwr_leakage.simulation.apps import make_client_app
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import compose


def _train_once(config, client_id=0):
    experiment = build(config)
    grid = InlineGrid(make_client_app(lambda _: build(config)), config["num_clients"])
    content = RecordDict(
        {
            "arrays": ArrayRecord(experiment.network.state_dict()),
            "config": ConfigRecord({"server-round": 1}),
        }
    )
    node = list(grid.get_node_ids())[client_id]
    (reply,) = grid.send_and_receive([Message(content, node, MessageType.TRAIN)])
    return experiment, reply, grid


@pytest.mark.parametrize(
    "schedule",
    [
        ["client.num_examples=3", "client.batch_size=3"],
        ["client.num_examples=5", "client.batch_size=2", "client.num_steps=4"],
        [
            "client.num_examples=4",
            "client.batch_size=2",
            "client.num_steps=4",
            "client.momentum=0.9",
            "client.weight_decay=0.01",
        ],
    ],
)
@pytest.mark.parametrize(
    "model", [["model=mlp"], ["model=resnet8", "model.network.width=4", "model.batch_norm=batch"]]
)
def test_the_reply_is_what_the_attacker_replays(tiny_data, schedule, model):
    config = tiny_config(tiny_data, *schedule, *model)
    experiment, reply, _ = _train_once(config)
    sent = experiment.gradient_map.params
    returned = reply.content["arrays"].to_torch_state_dict()
    batch = experiment.client_batch(0, 1)
    replayed = local_update(experiment.gradient_map, sent, batch, experiment.schedule)
    for name, delta in replayed.items():
        torch.testing.assert_close(returned[name] - sent[name], delta, atol=2e-6, rtol=1e-4)


def test_the_default_run_records_every_client_and_round(tiny_data):
    data = run(tiny_config(tiny_data))
    assert set(values(data, "psnr")) == {(r, c, 0) for r in (1, 2) for c in (0, 1, 2)}
    assert set(values(data, "test_accuracy")) == {(r, -1, -1) for r in (0, 1, 2)}
    assert all("labels inferred" in r.note for r in data.records if r.name == "objective")
    assert not data.events
    assert {image.role for image in data.images} == {"original", "reconstruction", "blind_guess"}
    guesses = [image for image in data.images if image.role == "blind_guess"]
    assert [(g.server_round, g.client_id, g.sample) for g in guesses] == [(1, -1, -1), (2, -1, -1)]
    meant = {r.note for r in data.records if r.name == "blind_psnr"}
    assert meant == {"the mean of the server’s own test images"}
    # Whatever is attacked is replayed, scored or not.
    residuals = values(data, "replay_residual")
    assert set(residuals) == {(r, c, -1) for r in (1, 2) for c in (0, 1, 2)}
    assert max(residuals.values()) < 1e-5


def test_same_seed_same_numbers_and_another_seed_others(tiny_data):
    first, second = (run(tiny_config(tiny_data, name=name)) for name in "ab")
    other = run(tiny_config(tiny_data, "seed=1", name="c"))
    assert numbers(first) == numbers(second)
    assert numbers(first) != numbers(other)


def test_partial_participation_is_repeatable(tiny_data):
    few = ["strategy.fraction_train=0.4", "num_clients=6", "num_rounds=3"]
    first, second = (run(tiny_config(tiny_data, *few, name=name)) for name in "ab")
    assert numbers(first) == numbers(second)
    assert len(values(first, "psnr")) == 6


def test_pruning_reaches_the_wire_and_is_what_the_server_attacks(tiny_data):
    pruned = ["defense=pruning", "defense.prune_ratio=0.9"]
    _, reply, _ = _train_once(tiny_config(tiny_data, *pruned))
    experiment, raw, _ = _train_once(tiny_config(tiny_data))
    sent = experiment.gradient_map.params
    state, raw_state = (m.content["arrays"].to_torch_state_dict() for m in (reply, raw))
    delta = torch.cat([(state[k] - sent[k]).flatten() for k in sent])
    raw_delta = torch.cat([(raw_state[k] - sent[k]).flatten() for k in sent])
    kept = delta != 0
    assert kept.float().mean() == pytest.approx(0.1, abs=0.02)
    torch.testing.assert_close(delta[kept], raw_delta[kept], atol=1e-7, rtol=1e-4)


def test_scores_stay_on_the_client_unless_sent(tiny_data):
    base = ["score=default", "client.num_examples=2", "client.batch_size=2"]
    _, kept, grid = _train_once(tiny_config(tiny_data, *base, "scoring.send=false"))
    assert '"measurements": []' in kept.content[RECORD_KEY]["note"]
    context: Context = grid._contexts[next(iter(grid.get_node_ids()))]
    assert "gradient_norm" in context.state[RECORD_KEY]["round-1"]
    _, sent, _ = _train_once(tiny_config(tiny_data, *base))
    assert "gradient_norm" in sent.content[RECORD_KEY]["note"]


def test_known_labels_are_disclosed_and_inferred_ones_are_not(tiny_data, monkeypatch):
    from flwr_leakage.attacks import GradientInversion

    seen = []
    original = GradientInversion.__call__

    def spy(self, gradient_map, spec, observations, *args, **kwargs):
        seen.extend(observations)
        return original(self, gradient_map, spec, observations, *args, **kwargs)

    monkeypatch.setattr(GradientInversion, "__call__", spy)
    run(tiny_config(tiny_data, "num_rounds=1", name="inferred"))
    assert all(o.disclosed.targets is None and o.disclosed.statistics is None for o in seen)
    seen.clear()
    config = tiny_config(tiny_data, "num_rounds=1", "threat.labels=known")
    run(config)
    for observation in seen:
        truth = build(config).client_batch(observation.client_id, 1)
        assert torch.equal(observation.disclosed.targets, truth.targets)


def test_selection_limits_rounds_and_clients(tiny_data):
    chosen = ["num_rounds=4", "selection.every=2", "selection.first=2", "selection.clients=[0,2]"]
    data = run(tiny_config(tiny_data, *chosen))
    assert {(r, c) for r, c, _ in values(data, "psnr")} == {(2, 0), (2, 2), (4, 0), (4, 2)}


def test_the_aggregate_view_attacks_one_mean_update(tiny_data):
    data = run(tiny_config(tiny_data, "threat.view=aggregate", "num_rounds=1"))
    assert set(values(data, "psnr")) == {(1, -1, sample) for sample in range(3)}


def test_finished_attacks_are_kept_and_read_again(tiny_data, tmp_path):
    kept = [f"server.attack_folder={tmp_path}/kept", "server.attack_chunk=2"]
    first = run(tiny_config(tiny_data, *kept, name="first"))
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "kept").iterdir()}
    second = run(tiny_config(tiny_data, *kept, name="second"))
    assert len(files) == 4  # two rounds of three clients in chunks of two
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "kept").iterdir()} == files
    assert values(first, "psnr") == values(second, "psnr")


def test_rounds_of_the_same_samples_are_attacked_jointly(tiny_data):
    config = tiny_config(tiny_data, "client.same_samples=true", "threat.rounds=2")
    first, second = (build(config).client_batch(0, server_round) for server_round in (1, 2))
    assert torch.equal(first.inputs, second.inputs)
    data = run(config)
    assert not data.events
    assert set(values(data, "psnr")) == {(r, client, 0) for r in (1, 2) for client in range(3)}


@pytest.mark.parametrize(
    "strategy",
    [
        "fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedmedian", "fedtrimmedavg",
        "krum", "multikrum", "bulyan", "qfedavg", "dp_fixed_clipping",
    ],
)  # fmt: skip
def test_every_strategy_runs_under_the_wrapper(tiny_data, strategy):
    data = run(tiny_config(tiny_data, f"strategy={strategy}", "num_clients=8", "num_rounds=1"))
    assert not data.events
    assert len(values(data, "psnr")) == 8


def test_a_score_plan_limits_rounds_samples_and_products(tiny_data):
    plan = ["scoring.every=2", "scoring.max_samples=2", "scoring.which=largest_gradient"]
    batch = [
        "scoring.relative_cost=null",
        "client.num_examples=4",
        "client.batch_size=4",
        "num_rounds=3",
        "attack=none",
    ]
    data = run(_config_with_scores(tiny_data, *plan, *batch))
    norms = values(data, "lambda_max")
    assert {r for r, _, _ in norms} == {1, 3}
    for server_round in (1, 3):
        client = {s: v for (r, c, s), v in norms.items() if (r, c) == (server_round, 0)}
        assert sum(value is not None for value in client.values()) == 2
        assert client[-1] is None  # one record says how many were left out
    poor = run(_config_with_scores(tiny_data, "scoring.products=3", *batch, name="poor"))
    spent = [r for r in poor.records if r.name == "lambda_max"]
    assert spent
    assert all(r.value is None and "budget of 3 products" in r.note for r in spent)


def test_scores_are_paid_by_training_from_round_to_round(tiny_data):
    plan = ["scoring.min_samples=0", "client.num_examples=4", "client.batch_size=4", "num_rounds=3"]
    config = _config_with_scores(tiny_data, *plan, "attack=none", "num_clients=1")
    first = run(config)
    cheap = values(first, "input_gradient_norm")
    dear = values(first, "lambda_max")
    worst = max(range(4), key=lambda sample: cheap[1, 0, sample])
    assert sorted(dear) == [(1, 0, -1), (1, 0, worst)]
    assert dear[1, 0, worst] is not None
    assert [key for key in cheap if key[0] > 1] == [(2, 0, -1), (3, 0, -1)]
    (note,) = {
        r.note for r in first.records if r.name == "input_gradient_norm" and r.server_round == 3
    }
    assert "the training of rounds to come must pay" in note


def _config_with_scores(root, *overrides, name="run"):
    without = [o for o in TINY if not o.startswith(("score=", "attack"))]
    data = ["dataset=npz", "dataset.name=tiny", f"dataset.root={root}"]
    return compose([*without, *data, *overrides], str(root / name))
