"""One line a side around an app that knows nothing of it."""

import json
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from torch import nn
from trained import Loop, network, pixels

from flwr_leakage.audit import ReplayResult
from flwr_leakage.defenses import GaussianNoise, MixUp
from flwr_leakage.flower import InlineGrid, audit, observe, run_inline
from flwr_leakage.flower.captured_client import _Work
from flwr_leakage.flower.client_replay import REPLAY_KEY
from flwr_leakage.flower.wire import RECORD_KEY, unpack_note
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.scores import GradientNorm
from flwr_leakage.scores.plan import ScorePlan
from flwr_leakage.tracking import read_run

SPEC = InputSpec((1, 6, 6), 3, (0.5,), (0.5,))


class Counting(FedAvg):
    """A strategy with a ``start`` and attributes of its own, as in Flower's advanced example."""

    started = 0

    def start(self, *args, **kwargs):
        self.started += 1
        return super().start(*args, **kwargs)


def client_app(around=lambda app: app, mods=(), stateful=False, **settings):
    app = around(ClientApp())

    @app.train(mods=list(mods))
    def train(message, context):
        loop = Loop(**{"model": network(batch_norm=settings.get("batch_norm", False))} | {
            name: value for name, value in settings.items() if name != "batch_norm"
        })  # fmt: skip
        if "images" not in settings:
            loop.images = (pixels(seed=context.node_config["partition-id"]) - 0.5) / 0.5
        loop.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        if stateful and "head" in context.state:
            loop.model[-1].load_state_dict(context.state["head"].to_torch_state_dict())
        model = loop.run()
        context.state["head"] = ArrayRecord(model[-1].state_dict())
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 12}),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"accuracy": 0.5, "num-examples": 12})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def run(folder, app, num_rounds=1, strategy=None, model=None, **settings):
    """The result of ``start``, the run, and the strategy."""
    chosen = strategy or Counting(fraction_evaluate=1.0)
    model = model or network()
    observed = observe(chosen, model, folder, attack=settings.pop("attack", None), **settings)
    found = []
    server = ServerApp()

    @server.main()
    def main(grid, context):
        arrays = ArrayRecord(network().state_dict() if isinstance(model, GradientMap)
                             else model.state_dict())  # fmt: skip
        found.append(observed.start(grid, arrays, num_rounds=num_rounds))

    run_inline(server, app, 2)
    return found[0], read_run(folder), observed


def checks(data):
    return [r for r in data.records if r.name == "replay_residual"]


def test_a_training_is_explained_and_the_strategy_stays_what_it_was(tmp_path):
    result, data, observed = run(tmp_path / "run", audit(client_app()), num_rounds=2)
    assert isinstance(observed.strategy, Counting)
    assert observed.started == 1
    assert [r.value for r in checks(data)] == [0.0] * 2
    rest = [r for r in data.records if r.name == "not_replayed"]
    assert [r.server_round for r in rest] == [2, 2]
    words = (
        "nothing that was looked at (start, optimizer, settings, steps, end) differs from round 1, "
        "where the captured training explains the update exactly"
    )
    assert all(words in r.note for r in rest)
    assert not data.events
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == 0.5
    assert (tmp_path / "run" / "report.html").exists()


def test_replays_can_be_made_rarer(tmp_path):
    _, data, _ = run(tmp_path / "run", audit(client_app(), replay_every=2), num_rounds=3)
    assert [r.server_round for r in checks(data)] == [1, 1, 3, 3]
    assert not data.events
    page = (tmp_path / "run" / "report.html").read_text()
    assert "yes, rounds 1 and 3 (equal)" in page
    assert "not checked, round 2: not replayed in this round" in page


def changing(seen=None, **settings):
    """An app whose training changes with the round."""

    def train(message, context):
        server_round = message.content["config"]["server-round"]
        now = {name: of(server_round) for name, of in settings.items()}
        count = now.pop("count", 12)
        metrics = {"num-examples": count} if count else {"train-loss": 0.5}
        loop = Loop(**{"images": (pixels() - 0.5) / 0.5} | now)
        loop.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        content = {
            "arrays": ArrayRecord(loop.run().state_dict()),
            "metrics": MetricRecord(metrics),
        }
        return Message(RecordDict(content), reply_to=message)

    app = ClientApp()
    app.train()(train)
    return audit(app, **(seen or {}))


def test_a_later_replay_is_of_the_first_samples_and_of_all_after_a_change(tmp_path):
    def fell(server_round):
        return lambda p: torch.optim.SGD(p, lr=0.1 if server_round < 4 else 0.05)

    app = changing({"replay_every": 2, "replay_samples": 5}, optimizer=fell)
    strategy = FedAvg(fraction_evaluate=0.0)
    _, data, _ = run(tmp_path / "run", app, strategy=strategy, num_rounds=5)
    notes = {r.server_round: r.note for r in checks(data)}
    assert sorted(notes) == [1, 3, 5]
    assert "explains the update" in notes[1] and "explains the update" in notes[5]
    assert "explains its first 2 of 3 steps (the rest was not kept) exactly" in notes[3]
    assert not data.events
    with pytest.raises(ValueError, match="replay_samples must be None or ≥ 1, got 0"):
        audit(app, replay_samples=0)


@pytest.mark.parametrize(
    ("size", "batch_size", "replayed", "told"),
    [
        (lambda r: 12 * r, lambda r: 4, {1, 3}, [3, 6, 9, 12]),  # an epoch each: more steps
        (lambda r: 12 * min(r, 2), lambda r: 4 * min(r, 2), {1, 3}, [3, None, 3, 3]),
        (lambda r: 12, lambda r: 4, {1}, [3] * 4),
    ],
)
def test_more_samples_in_as_many_steps_are_no_schedule_until_they_are_captured(
    size, batch_size, replayed, told
):
    app = changing(images=lambda r: pixels(size(r)), batch_size=batch_size, count=size)
    told_by = notes(app, 4)
    assert {n for n, note in enumerate(told_by, 1) if note.replay.replayed} == replayed
    steps = [None if n.training.unscheduled else n.training.schedule().num_steps for n in told_by]
    assert steps == told


def test_clients_that_tell_no_number_of_samples_keep_their_schedule():
    told = notes(changing(count=lambda r: 0), 3)
    assert [note.replay.replayed for note in told] == [True, False, False]
    assert [note.training.unscheduled for note in told] == [""] * 3


def falling(server_round):
    return lambda p: torch.optim.SGD(p, lr=0.1 / server_round)


def test_a_change_is_replayed_in_the_next_round_and_a_rate_that_keeps_falling_only_once(tmp_path):
    strategy = FedAvg(fraction_evaluate=0.0)
    _, data, _ = run(tmp_path / "run", changing(optimizer=falling), strategy=strategy, num_rounds=5)
    assert {r.server_round for r in checks(data)} == {1, 3}
    notes = {r.server_round: r.note for r in data.records if r.name == "not_replayed"}
    assert sorted(notes) == [2, 4, 5]
    assert "with another learning rate than in round 1" in notes[2]
    assert "with another learning rate than in round 3" in notes[5]


def test_a_change_of_kind_is_always_replayed_in_the_next_round(tmp_path):
    strategy = FedAvg(fraction_evaluate=0.0)
    app = changing(optimizer=lambda r: torch.optim.Adam if r % 3 == 2 else torch.optim.SGD)
    _, data, _ = run(tmp_path / "run", app, strategy=strategy, num_rounds=6)
    assert {r.server_round for r in checks(data)} == {1, 3, 6}


def test_gradients_that_are_changed_from_a_round_on_are_seen_whatever_the_optimizer(tmp_path):
    app = changing(
        optimizer=lambda r: torch.optim.Adam,
        on_gradients=lambda r: lambda m: r > 2 and nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    )
    _, data, _ = run(
        tmp_path / "run", app, strategy=FedAvg(fraction_evaluate=0.0), num_rounds=4
    )  # fmt: skip
    assert {r.server_round for r in checks(data)} == {1, 4}
    notes = {r.server_round: r.note for r in data.records if r.name == "not_replayed"}
    assert "nothing that was looked at" in notes[2]
    assert "with another change of gradients before a step than in round 1" in notes[3]


def notes(app, num_rounds=3):
    """What one client tells beside its update, round by round."""
    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    told = []
    for server_round in range(1, num_rounds + 1):
        config = ConfigRecord({"server-round": server_round, "clipping_norm": 1e6})
        content = RecordDict({"arrays": ArrayRecord(network().state_dict()), "config": config})
        message = grid.create_message(content, "train", node, str(server_round))
        (reply,) = grid.send_and_receive([message])
        assert not reply.has_error()
        told.append(unpack_note(reply.content[RECORD_KEY]))
    return told


def test_a_state_that_cannot_be_read_is_replayed_as_a_first_training_is():
    def forget(context):
        state = json.loads(context.state[REPLAY_KEY]["replay"])
        del state["names"]  # as before there was a glance
        context.state[REPLAY_KEY] = ConfigRecord({"replay": json.dumps(state)})

    def older(message, context, call_next):
        if REPLAY_KEY in context.state:
            forget(context)
        return call_next(message, context)

    app, inner = ClientApp(mods=[older]), audit(client_app())
    app.train()(lambda message, context: inner(message, context))
    assert [note.replay.residual for note in notes(app)] == [0.0] * 3


def test_a_mod_that_only_rounds_is_no_change_after_training():
    told = notes(audit(client_app(mods=[fixedclipping_mod])))
    assert 0 < told[0].replay.residual < 1e-6
    assert [note.replay.explains for note in told] == [True] * 3
    assert "not replayed" in told[1].replay.sentence


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_a_client_keeps_to_itself_is_not_asked_for(is_trained):
    def keep(message, context, call_next):
        reply = call_next(message, context)
        arrays = reply.content["arrays"]
        kept = {name: arrays[name] for name in arrays if not name.startswith("0.")}
        reply.content["arrays"] = ArrayRecord(kept)
        return reply

    start = 0 if is_trained else 2
    app = client_app(mods=[keep], optimizer=lambda p: torch.optim.SGD(list(p)[start:], lr=0.1))
    assert [note.replay.explains for note in notes(audit(app))] == [True] * 3


def test_after_a_failed_replay_the_settings_are_those_of_the_round():
    def before(model):
        with torch.no_grad():
            model[0].bias.add_(1)

    told = notes(changing(optimizer=falling, before=lambda server_round: before))
    assert [note.replay.explains for note in told] == [False] * 3
    assert [note.training.learning_rate for note in told] == [0.1, 0.05, 0.1 / 3]


def test_a_later_replay_forgets_no_change_of_gradients_in_steps_that_it_does_not_keep():
    def late(server_round):
        calls = []

        def clip(model):
            calls.append(model)
            if len(calls) > 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)

        return clip

    told = notes(changing({"replay_every": 2, "replay_samples": 5}, on_gradients=late))
    assert "its first 2 of 3 steps" in told[2].replay.sentence
    assert [note.training.rewritten for note in told] == [3] * 3
    assert all("clipping or noise" in note.training.unscheduled for note in told)


class Plain(torch.optim.Optimizer):
    """Has no learning rate by that name."""

    def __init__(self, parameters):
        super().__init__(parameters, {"eta": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["eta"])


def test_settings_that_are_not_told_are_not_said_to_be_compared():
    _, second = notes(audit(client_app(optimizer=Plain)), num_rounds=2)
    assert second.training is None
    assert "that was looked at (start, end)" in second.replay.sentence


def test_a_round_without_scores_is_not_said_to_have_failed():
    plan = ScorePlan(every=3)
    told = notes(audit(client_app(), scores={"norm": GradientNorm()}, score_plan=plan))
    assert [note.remark for note in told] == [""] * 3


def test_the_normalisation_is_read_again_by_a_replay(tmp_path):
    images = {1: pixels(), 2: (pixels() - 0.5) / 0.5}
    app = changing({"replay_every": 2}, images=lambda r: images[min(r, 2)])
    facts = [note.training for note in notes(app)]
    assert [(each.mean, each.repeated) for each in facts] == [
        ((0.0,), False), ((0.0,), True), ((0.5,), False),
    ]  # fmt: skip


def test_scores_are_not_told_that_a_round_between_replays_is_explained():
    context = Context(0, 0, {}, RecordDict(), {})

    def explained(replayed):
        found = ReplayResult(0.0 if replayed else None, True, "the result", replayed=replayed)
        return _Work(2, 0, context, 0.1, found).explained()

    assert explained(replayed=True).sentence == "the result"
    assert "was not checked: the result" in explained(replayed=False).sentence


def test_the_first_training_alone_can_be_replayed(tmp_path):
    _, data, _ = run(tmp_path / "run", audit(client_app(), replay_every=None), num_rounds=12)
    assert [r.server_round for r in checks(data)] == [1, 1]
    assert len([r for r in data.records if r.name == "not_replayed"]) == 22


def frozen(change):
    """An app whose first layer is not trained, and is sent otherwise from the second round on."""

    def loop(server_round):
        def after(model):
            if change and server_round > 1:
                with torch.no_grad():
                    model[0].bias.add_(1)

        return after

    return changing(optimizer=lambda r: lambda p: torch.optim.SGD(list(p)[2:], lr=0.1), after=loop)


@pytest.mark.parametrize("change", [False, True])
def test_what_is_not_trained_has_to_be_sent_as_it_came(tmp_path, change):
    strategy = FedAvg(fraction_evaluate=0.0)
    _, data, _ = run(tmp_path / "run", frozen(change), strategy=strategy, num_rounds=2)
    told = [r.note for r in checks(data) if r.server_round == 2]
    assert ["0.bias not trained, and not sent as received" in note for note in told] == (
        [True, True] * change
    )


def test_a_failed_replay_is_told_until_the_next_one(tmp_path):
    app = audit(client_app(stateful=True), replay_every=2)
    _, data, _ = run(tmp_path / "run", app, num_rounds=4)
    later = {r.server_round: r for r in checks(data)}
    assert later[1].value == 0.0
    assert later[2].value is None
    assert "6.weight, 6.bias were not the server's before training" in later[2].note
    assert later[3].value > 1e-3
    assert later[4].value is None
    assert later[4].note.startswith("not replayed since round 3, where the captured training does")


def test_the_line_may_stand_before_or_after_the_functions(tmp_path):
    _, before, _ = run(tmp_path / "a", client_app(around=audit))
    _, after, _ = run(tmp_path / "b", audit(client_app()))
    assert [r.note for r in checks(before)] == [r.note for r in checks(after)]


def test_the_audit_changes_no_bit_of_what_is_sent():
    def replies(app):
        grid = InlineGrid(app, 2)
        arrays = ArrayRecord(network().state_dict())
        messages = [
            grid.create_message(RecordDict({"arrays": arrays}), "train", node, group)
            for group in ("1", "2")  # a replay, and a glance
            for node in grid.get_node_ids()
        ]
        return [r.content["arrays"] for r in grid.send_and_receive(messages)]

    torch.manual_seed(0)
    plain = replies(client_app(epochs=2))
    torch.manual_seed(0)
    seen = replies(audit(client_app(epochs=2)))
    assert len(plain) == len(seen) == 4
    for left, right in zip(plain, seen, strict=True):
        left, right = left.to_torch_state_dict(), right.to_torch_state_dict()
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_stateful_head_is_named(tmp_path):
    _, data, _ = run(tmp_path / "run", audit(client_app(stateful=True)), num_rounds=2)
    by_round = {r.server_round: r for r in checks(data)}
    assert by_round[1].value == 0.0
    assert by_round[2].value is None  # seen without a replay
    assert "6.weight, 6.bias were not the server's" in by_round[2].note
    assert any("not the server's" in event.message for event in data.events)
    assert "no evidence of safety" in (tmp_path / "run" / "report.html").read_text()


def test_clipping_by_a_mod_of_flowers_own_is_named(tmp_path):
    strategy = DifferentialPrivacyClientSideFixedClipping(
        FedAvg(fraction_evaluate=0.0), 0.0, 0.05, 2
    )
    app = audit(client_app(mods=[fixedclipping_mod]))
    _, data, _ = run(tmp_path / "run", app, strategy=strategy)
    assert len(checks(data)) == 2
    assert all("after training (clipping)" in r.note for r in checks(data))


MISTAKES = {
    "learning rate": ({"schedule": LocalSchedule(0.01, 3, 4)}, {}, "learning rate 0.1, assumed"),
    "normalisation": ({"spec": InputSpec((1, 6, 6), 3)}, {}, "normalisation"),
    "one step": ({"schedule": LocalSchedule(0.1, 1, 4)}, {}, "steps 3, assumed 1"),
    "ten steps": ({"schedule": LocalSchedule(0.1, 10, 4)}, {}, "steps 3, assumed 10"),
    "momentum": (
        {"schedule": LocalSchedule(0.1, 3, 4)},
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)},
        "momentum 0.9, assumed 0",
    ),
    "BatchNorm mode": (
        {"model": GradientMap(network(batch_norm=True), batch_norm="running")},
        {"batch_norm": True},
        "BatchNorm in mode batch, assumed running",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_server_is_named(tmp_path, name):
    given, client, words = MISTAKES[name]
    if "model" in given:
        given = {**given, "strategy": FedAvg(fraction_evaluate=0.0)}
        app = audit(client_app(**client))
        strategy = observe(given["strategy"], given["model"], tmp_path / "run", attack=None)
        server = ServerApp()

        @server.main()
        def main(grid, context):
            arrays = ArrayRecord(network(batch_norm=True).state_dict())
            strategy.start(grid, arrays, num_rounds=1)

        run_inline(server, app, 2)
        data = read_run(tmp_path / "run")
    else:
        _, data, _ = run(tmp_path / "run", audit(client_app(**client)), **given)
    warnings = [event.message for event in data.events]
    assert any(words in message and "no evidence of safety" in message for message in warnings)
    assert {event.client_id for event in data.events} == {0, 1}


def test_in_a_simulation_the_samples_reach_the_evaluator(tmp_path):
    app = audit(client_app(images=torch.eye(6).reshape(1, 1, 6, 6)), truth=tmp_path / "truth")
    _, data, _ = run(tmp_path / "run", app, truth=tmp_path / "truth", attack="analytic", spec=SPEC)
    assert len([r for r in data.records if r.name == "psnr"]) == 2
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "truth").iterdir()} == {0}


def test_a_client_of_many_samples_is_recorded_and_not_attacked(tmp_path):
    _, data, _ = run(tmp_path / "run", audit(client_app()), attack="analytic", max_samples=11)
    assert not [r for r in data.records if r.kind == "attack"]
    assert len(checks(data)) == 2
    assert all("3 steps of 4 samples" in event.message for event in data.events)
    kept_out = [r for r in data.records if r.name == "not_attacked"]
    assert ["3 steps of 4 samples" in r.note for r in kept_out] == [True, True]


@pytest.mark.parametrize(
    ("optimizer", "done"),
    [
        (None, "12 images, 3 steps of 4 images, learning rate 0.1"),
        (lambda p: torch.optim.Adam(p), ""),
    ],
)
def test_a_client_that_nobody_attacks_is_recorded_as_it_told(tmp_path, optimizer, done):
    app = audit(client_app(**({"optimizer": optimizer} if optimizer else {})))
    _, data, _ = run(tmp_path / "run", app)
    assert [r.note for r in data.records if r.name == "images"] == [done, done]
    reasons = [r.note for r in data.records if r.name == "not_attacked"]
    assert reasons == ["no attack is configured"] * 2


def test_elsewhere_no_sample_leaves_the_client(tmp_path):
    grid = InlineGrid(audit(client_app()), 1)
    (node,) = grid.get_node_ids()
    arrays = RecordDict({"arrays": ArrayRecord(network().state_dict())})
    (reply,) = grid.send_and_receive([grid.create_message(arrays, "train", node, "1")])
    assert set(reply.content) == {"arrays", "metrics", RECORD_KEY}
    assert len(reply.content[RECORD_KEY]["note"]) < 2000
    assert not list(Path(tmp_path).iterdir())


def test_scores_need_no_hand_written_settings(tmp_path):
    app = audit(
        client_app(), scores={"gradient_norm": GradientNorm()}, score_plan=ScorePlan(send=True)
    )
    _, data, _ = run(tmp_path / "run", app)
    scores = [r for r in data.records if r.name == "gradient_norm"]
    assert {r.client_id for r in scores if r.value} == {0, 1}


def test_where_scores_cannot_be_had_the_update_is_sent_all_the_same(tmp_path):
    app = audit(
        client_app(optimizer=lambda p: torch.optim.Adam(p)),
        scores={"gradient_norm": GradientNorm()},
    )
    _, data, _ = run(tmp_path / "run", app)
    assert len(checks(data)) == 2
    assert any("Neither scores" in event.message for event in data.events)


def test_a_defense_acts_on_what_is_sent_or_the_client_refuses(tmp_path):
    noise = GaussianNoise(noise_std=0.1)
    _, data, _ = run(tmp_path / "a", audit(client_app(), defense=noise))
    assert [r.value for r in checks(data)] == [0.0, 0.0]
    assert any("defended by GaussianNoise" in event.message for event in data.events)
    adam = client_app(optimizer=lambda p: torch.optim.Adam(p))
    result, data, _ = run(tmp_path / "b", audit(adam, defense=noise))
    assert not result.arrays
    assert any("Adam" in event.message for event in data.events)
    with pytest.raises(ValueError, match="encode"):
        audit(ClientApp(), defense=MixUp(k=2))
