"""One line a side around an app that knows nothing of it."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from one_line import Counting, audited, checks, client_app, run
from torch import nn
from torch.nn import functional as F
from trained import network

from flwr_leakage.audit.kept import KeptObservations
from flwr_leakage.defenses import DPSGD, GaussianNoise, GradientPruning, MixUp, PercentilePrivacy
from flwr_leakage.defenses.pruning import prune_update
from flwr_leakage.evidence import make_evidence
from flwr_leakage.flower import InlineGrid, audit, observe, run_inline
from flwr_leakage.flower.wire import RECORD_KEY
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Part, Reconstruction
from flwr_leakage.report.advice import advise
from flwr_leakage.report.index import Index
from flwr_leakage.report.verdict import judge
from flwr_leakage.scores import GradientNorm
from flwr_leakage.scores.plan import ScorePlan
from flwr_leakage.testing import check
from flwr_leakage.tracking import read_run

SPEC = InputSpec((1, 6, 6), 3, (0.5,), (0.5,))


def test_a_training_is_explained_and_the_strategy_stays_what_it_was(tmp_path):
    result, data, observed = run(tmp_path / "run", audited(client_app()), num_rounds=2)
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


def test_the_line_may_stand_before_or_after_the_functions(tmp_path):
    _, before, _ = run(tmp_path / "a", client_app(around=audited))
    _, after, _ = run(tmp_path / "b", audited(client_app()))
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
    seen = replies(audited(client_app(epochs=2)))
    assert len(plain) == len(seen) == 4
    for left, right in zip(plain, seen, strict=True):
        left, right = left.to_torch_state_dict(), right.to_torch_state_dict()
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_stateful_head_is_named(tmp_path):
    _, data, _ = run(tmp_path / "run", audited(client_app(stateful=True)), num_rounds=2)
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
    app = audited(client_app(mods=[fixedclipping_mod]))
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
    "loss": (
        {"schedule": LocalSchedule(0.1, 3, 4)},
        {"loss": lambda model, x, y: F.cross_entropy(x, y, torch.tensor([1.0, 2.0, 3.0]))},
        "the cross-entropy with class weights, assumed the mean cross-entropy",
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
        app = audited(client_app(**client))
        strategy = observe(given["strategy"], given["model"], tmp_path / "run", attack=None)
        server = ServerApp()

        @server.main()
        def main(grid, context):
            arrays = ArrayRecord(network(batch_norm=True).state_dict())
            strategy.start(grid, arrays, num_rounds=1)

        run_inline(server, app, 2)
        data = read_run(tmp_path / "run")
    else:
        _, data, _ = run(tmp_path / "run", audited(client_app(**client)), **given)
    warnings = [event.message for event in data.events]
    assert any(words in message and "no evidence of safety" in message for message in warnings)
    assert {event.client_id for event in data.events} == {0, 1}
    told = [record for record in data.records if record.name == "trained_otherwise"]
    assert {record.client_id for record in told} == {0, 1}
    assert all(words in record.note for record in told)


class Grey:
    """An attack that answers every update by grey images, far from the update."""

    def __call__(self, job, progress=None):
        return [self._of(job.spec, seen.update.num_examples) for seen in job.observations]

    def _of(self, spec, count):
        grey = Batch(torch.zeros(count, *spec.shape), torch.zeros(count, dtype=torch.int64))
        parts = (Part("a", "found", 0.9), Part("b", "refused", reason="no such layer."))
        return Reconstruction(grey, 0.9, {"attack": "a"}, parts=parts)


@dataclass
class Listening:
    """An attack that notes the assumed loss of two equal logits, and refuses.

    Attributes:
        losses: the noted losses.
    """

    losses: list[float] = field(default_factory=list)

    def __call__(self, job, progress=None):
        loss = job.gradient_map.loss(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]))
        self.losses.append(float(loss))
        return [Reconstruction(None, float("nan"), error="none.") for _ in job.observations]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kept", [True, False])
def test_smoothed_labels_are_assumed_as_clients_tell_them(tmp_path, smoothing, kept):
    def loss(model, logits, labels):
        return F.cross_entropy(logits, labels, label_smoothing=smoothing)

    attack = Listening()
    settings = {"keep": KeptObservations(tmp_path / "kept")} if kept else {}
    _, data, _ = run(tmp_path / "run", audited(client_app(loss=loss)), attack=attack, **settings)
    if kept:
        told = [each.inputs.label_smoothing for each in settings["keep"].read(1)[0]]
        assert told == [smoothing] * 2
        return
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    right = F.cross_entropy(logits, torch.tensor([0]), label_smoothing=smoothing)
    assert attack.losses == pytest.approx([float(right)] * len(attack.losses)) and attack.losses
    assert not [record for record in data.records if record.name == "trained_otherwise"]


@pytest.mark.parametrize("schedule", [LocalSchedule(1.0, 3, 4), None])
def test_a_wrong_rate_of_the_server_is_why_its_run_cannot_say(tmp_path, schedule):
    app = audited(client_app(), truth=tmp_path / "truth")
    settings = {"truth": tmp_path / "truth", "attack": Grey(), "spec": SPEC}
    _, data, _ = run(tmp_path / "run", app, schedule=schedule, **settings)
    found, made = check(data), make_evidence(tmp_path / "run")
    told = "clients 0 and 1 trained with learning rate 0.1, and the attack assumed 1"
    if schedule is None:
        assert told not in found.message
        return
    assert found.exit_code == 4 and told in found.message
    assert any("Set schedule= of observe(…)" in line.text for line in found.lines)
    filed = [each for each in made.statements if told in each.text]
    assert {each.part for each in filed} >= {"Verdict", "What else is known"}
    assert all(each.source == "records" for each in filed)
    assert not any("they trained what the attack assumes" in e.text for e in made.statements)
    assert (
        "own word: learning rate 0.1, assumed 1" in (tmp_path / "run" / "report.html").read_text()
    )


def test_the_samples_of_a_defended_training_by_adam_reach_the_evaluator(tmp_path):
    app = audited(
        client_app(optimizer=lambda p: torch.optim.Adam(p)),
        truth=tmp_path / "truth", defense="pruning",
    )  # fmt: skip
    attacked = {"attack": Grey(), "spec": SPEC, "schedule": LocalSchedule(0.1, 3, 4)}
    _, data, _ = run(tmp_path / "run", app, truth=tmp_path / "truth", **attacked)
    assert len([r for r in data.records if r.name == "psnr"]) == 24
    _, data, _ = run(tmp_path / "untold", app, attack="idlg")  # the server knows no inputs either
    reasons = [r.note for r in data.records if r.name == "not_attacked"]
    assert reasons == ["the optimizer is Adam, and no SGD"] * 2


def test_a_wrong_setting_of_the_audit_is_refused_in_words(tmp_path, unchecked):
    with pytest.raises(TypeError, match="take no argument view; their further settings are those"):
        observe(FedAvg(), network(), tmp_path / "run", view="aggregate")
    with pytest.raises(TypeError, match="threat must be a ThreatModel"):
        observe(FedAvg(), network(), tmp_path / "run", threat="aggregate")


def test_in_a_simulation_the_samples_reach_the_evaluator(tmp_path):
    app = audited(client_app(images=torch.eye(6).reshape(1, 1, 6, 6)), truth=tmp_path / "truth")
    _, data, _ = run(tmp_path / "run", app, truth=tmp_path / "truth", attack="analytic", spec=SPEC)
    assert len([r for r in data.records if r.name == "psnr"]) == 2
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "truth").iterdir()} == {0}


def test_a_client_of_many_samples_is_recorded_and_not_attacked(tmp_path):
    _, data, _ = run(tmp_path / "run", audited(client_app()), attack="analytic", max_samples=11)
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
    app = audited(client_app(**({"optimizer": optimizer} if optimizer else {})))
    _, data, _ = run(tmp_path / "run", app)
    assert [r.note for r in data.records if r.name == "images"] == [done, done]
    reasons = [r.note for r in data.records if r.name == "not_attacked"]
    assert reasons == ["no attack is configured"] * 2


def test_a_client_of_another_optimizer_is_not_attacked_and_the_report_says_what_can_be(tmp_path):
    app = audited(client_app(optimizer=lambda p: torch.optim.Adam(p)))
    _, data, _ = run(tmp_path / "run", app, attack="idlg")
    advice = advise(Index(data.records), data.metadata, [], data.events)
    sentence = judge(Index(data.records), data.events, data.metadata).sentence
    assert "Clients 0 and 1 were not attacked: the optimizer is Adam, and no SGD" in sentence
    (do,) = advice.do
    assert do.startswith(
        "For clients 0 and 1: observe(…, spec=…, schedule=LocalSchedule(…)); the attack assumes"
    )


def test_elsewhere_no_sample_leaves_the_client(tmp_path):
    grid = InlineGrid(audited(client_app()), 1)
    (node,) = grid.get_node_ids()
    arrays = RecordDict({"arrays": ArrayRecord(network().state_dict())})
    (reply,) = grid.send_and_receive([grid.create_message(arrays, "train", node, "1")])
    assert set(reply.content) == {"arrays", "metrics", RECORD_KEY}
    assert len(reply.content[RECORD_KEY]["note"]) < 2000
    assert not list(Path(tmp_path).iterdir())


def test_scores_need_no_hand_written_settings(tmp_path):
    app = audited(
        client_app(), scores={"gradient_norm": GradientNorm()}, score_plan=ScorePlan(send=True)
    )
    _, data, _ = run(tmp_path / "run", app)
    scores = [r for r in data.records if r.name == "gradient_norm"]
    assert {r.client_id for r in scores if r.value} == {0, 1}


def test_where_scores_cannot_be_had_the_update_is_sent_all_the_same(tmp_path):
    app = audited(
        client_app(optimizer=lambda p: torch.optim.Adam(p)),
        scores={"gradient_norm": GradientNorm()},
    )
    _, data, _ = run(tmp_path / "run", app)
    assert len(checks(data)) == 2
    assert any("Neither scores" in event.message for event in data.events)


def test_a_defense_acts_on_what_is_sent_or_the_client_refuses(tmp_path):
    noise = GaussianNoise(noise_std=0.1)
    _, data, _ = run(tmp_path / "a", audited(client_app(), defense=noise))
    assert [r.value for r in checks(data)] == [0.0, 0.0]
    assert any("defended by GaussianNoise" in event.message for event in data.events)
    adam = client_app(optimizer=lambda p: torch.optim.Adam(p))
    result, data, _ = run(tmp_path / "b", audited(adam, defense=noise))
    assert not result.arrays
    assert any("Adam" in event.message for event in data.events)
    with pytest.raises(ValueError, match="encode"):
        audited(ClientApp(), defense=MixUp(k=2))


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": lambda p: torch.optim.Adam(p)},
        {"optimizer": nesterov},
        {"on_gradients": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)},
        {"loss": lambda model, logits, labels: F.cross_entropy(logits, labels)
            + 0.1 * sum(p.square().sum() for p in model.parameters())},
    ],
    ids=["adam", "nesterov", "clipped gradients", "a penalty"],
)  # fmt: skip
@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_defense_of_the_update_alone_takes_any_training(tmp_path, training, batch_norm):
    model = network(batch_norm)
    pruned = GradientPruning(prune_ratio=0.9)
    plain = one_reply(client_app(batch_norm=batch_norm, **training), model)
    app = audit(
        client_app(batch_norm=batch_norm, **training), defense=pruned, folder=tmp_path, seed=1
    )
    sent = one_reply(app, model)
    names = [name for name, _ in model.named_parameters()]
    start = {name: value.detach() for name, value in model.state_dict().items()}
    delta = {name: plain[name] - start[name] for name in names}
    expected = prune_update(delta, 0.9)
    for name in names:
        torch.testing.assert_close(sent[name] - start[name], expected[name], atol=1e-6, rtol=0)
    assert all(torch.equal(sent[name], plain[name]) for name in plain if name not in names)
    (own,) = tmp_path.iterdir()
    data = read_run(own)
    assert not data.events and [r.value for r in data.records if r.name == "images"] == [12.0]


def test_noise_relative_to_the_norm_is_as_long_as_the_update_of_adam():
    def adam(p):
        return torch.optim.Adam(p)

    plain = one_reply(client_app(optimizer=adam), network())
    noise = GaussianNoise(noise_std=1.0, relative_to="norm")
    sent = one_reply(audit(client_app(optimizer=adam), defense=noise), network())
    start = network().state_dict()
    ours = torch.cat([(sent[name] - plain[name]).flatten() for name in start])
    theirs = torch.cat([(plain[name] - start[name]).flatten() for name in start])
    count = len(ours)  # the length of n normal draws has a relative deviation of 1/√(2n)
    assert abs(float(ours.norm() / theirs.norm()) - 1) < 5 / (2 * count) ** 0.5


@pytest.mark.parametrize(
    ("defense", "reason"),
    [
        (GaussianNoise(noise_std=0.1), "the training's learning_rate cannot be told"),
        (PercentilePrivacy(), "the training's num_steps cannot be told"),
        (DPSGD(), "DPSGD needs local_round"),
    ],
)
def test_a_defense_that_needs_the_training_is_refused_in_words(defense, reason):
    adam = client_app(optimizer=lambda p: torch.optim.Adam(p))
    grid = InlineGrid(audit(adam, defense=defense, share="reasons"), 1)
    (node,) = grid.get_node_ids()
    content = RecordDict({"arrays": ArrayRecord(network().state_dict())})
    (reply,) = grid.send_and_receive([grid.create_message(content, "train", node, "1")])
    assert reply.has_error()
    said = reply.error.reason
    assert "the optimizer is Adam, and no SGD" in said and reason in said
    assert "GaussianNoise(noise_std=0.1, relative_to='norm')" in said


def test_where_nothing_tells_that_parameters_are_sent_no_defense_is_applied():
    def changed(message, context, call_next):
        reply = call_next(message, context)
        arrays = reply.content["arrays"].to_torch_state_dict()
        reply.content["arrays"] = ArrayRecord({k: 2 * v + 1 for k, v in arrays.items()})
        return reply

    adam = client_app(optimizer=lambda p: torch.optim.Adam(p), mods=[changed])
    grid = InlineGrid(audit(adam, defense=GradientPruning(), share="reasons"), 1)
    (node,) = grid.get_node_ids()
    content = RecordDict({"arrays": ArrayRecord(network().state_dict())})
    (reply,) = grid.send_and_receive([grid.create_message(content, "train", node, "1")])
    assert reply.has_error() and "not the parameters of the captured model" in reply.error.reason


def test_what_is_no_defense_is_refused_before_training(unchecked):
    with pytest.raises(
        ValueError, match=r"defense must be a Defense, or the name of one, got 0\.9"
    ):
        audit(ClientApp(), defense=0.9)


def one_reply(app, model):
    """The tensors that one client sends in answer to a model."""
    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict())})
    (reply,) = grid.send_and_receive([grid.create_message(content, "train", node, "1")])
    assert not reply.has_error(), reply.error
    return reply.content["arrays"].to_torch_state_dict()


def test_the_report_names_a_defense_that_clients_tell_and_a_schedule_of_fewer_samples_is_doubted(
    tmp_path,
):
    app = audited(client_app(), defense=GaussianNoise(noise_std=0.1), share="replay")
    given = {"spec": SPEC, "schedule": LocalSchedule(0.1), "attack": "idlg", "max_seconds": 0.1}
    _, data, _ = run(tmp_path / "run", app, **given)
    told = [
        event.message for event in data.events if "trains on 1 of its 12 samples" in event.message
    ]
    assert len(told) == 2 and "give a batch_size of 12 or more" in told[0]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "GaussianNoise (as clients say)" in page and "without a defense" not in page
    _, data, _ = run(tmp_path / "whole", app, **{**given, "schedule": LocalSchedule(0.1, 1, 12)})
    assert not any("samples, and the client" in event.message for event in data.events)
