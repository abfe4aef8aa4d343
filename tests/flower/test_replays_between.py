"""What is replayed in which round, and what a round between replays tells."""

import json

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import FedAvg
from one_line import audited, changing, checks, client_app, falling, notes, run
from torch import nn
from trained import pixels

from flwr_leakage.audit import ReplayResult
from flwr_leakage.flower.captured_client import _Work
from flwr_leakage.flower.client_replay import REPLAY_KEY
from flwr_leakage.scores import GradientNorm
from flwr_leakage.scores.plan import ScorePlan


def test_replays_can_be_made_rarer(tmp_path):
    _, data, _ = run(tmp_path / "run", audited(client_app(), replay_every=2), num_rounds=3)
    assert [r.server_round for r in checks(data)] == [1, 1, 3, 3]
    assert not data.events
    page = (tmp_path / "run" / "report.html").read_text()
    assert "yes, rounds 1 and 3 (equal)" in page
    assert "not checked, round 2: not replayed in this round" in page


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
        audited(app, replay_samples=0)


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


def test_a_state_that_cannot_be_read_is_replayed_as_a_first_training_is():
    def forget(context):
        state = json.loads(context.state[REPLAY_KEY]["replay"])
        del state["names"]  # as before there was a glance
        context.state[REPLAY_KEY] = ConfigRecord({"replay": json.dumps(state)})

    def older(message, context, call_next):
        if REPLAY_KEY in context.state:
            forget(context)
        return call_next(message, context)

    app, inner = ClientApp(mods=[older]), audited(client_app())
    app.train()(lambda message, context: inner(message, context))
    assert [note.replay.residual for note in notes(app)] == [0.0] * 3


def test_a_mod_that_only_rounds_is_no_change_after_training():
    told = notes(audited(client_app(mods=[fixedclipping_mod])))
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
    assert [note.replay.explains for note in notes(audited(app))] == [True] * 3


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
    assert all("(clipping, noise or" in note.training.unscheduled for note in told)


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
    _, second = notes(audited(client_app(optimizer=Plain)), num_rounds=2)
    assert second.training is None
    assert "that was looked at (start, end)" in second.replay.sentence


def test_a_round_without_scores_is_not_said_to_have_failed():
    plan = ScorePlan(every=3)
    told = notes(audited(client_app(), scores={"norm": GradientNorm()}, score_plan=plan))
    assert [note.remark for note in told] == [""] * 3


def test_the_normalisation_is_read_again_by_a_replay(tmp_path):
    images = {1: pixels(), 2: (pixels() - 0.5) / 0.5}
    app = changing({"replay_every": 2}, images=lambda r: images[min(r, 2)])
    facts = [note.training for note in notes(app)]
    assert [(each.normalization, each.repeated) for each in facts] == [
        ("0 to 1", False), ("0 to 1", True), ("0.5 and 0.5", False),
    ]  # fmt: skip


def test_scores_are_not_told_that_a_round_between_replays_is_explained():
    context = Context(0, 0, {}, RecordDict(), {})

    def explained(replayed):
        found = ReplayResult("explained" if replayed else "unchanged", sentence="the result")
        return _Work(2, 0, context, 0.1, found).explained()

    assert explained(replayed=True).sentence == "the result"
    assert "was not checked: the result" in explained(replayed=False).sentence


def test_the_first_training_alone_can_be_replayed(tmp_path):
    _, data, _ = run(tmp_path / "run", audited(client_app(), replay_every=None), num_rounds=12)
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
    app = audited(client_app(stateful=True), replay_every=2)
    _, data, _ = run(tmp_path / "run", app, num_rounds=4)
    later = {r.server_round: r for r in checks(data)}
    assert later[1].value == 0.0
    assert later[2].value is None
    assert "6.weight, 6.bias were not the server's before training" in later[2].note
    assert later[3].value > 1e-3
    assert later[4].value is None
    assert later[4].note.startswith("not replayed since round 3, where the captured training does")
