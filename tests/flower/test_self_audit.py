"""A client attacks itself, shares what its owner says, and holds back what is too risky."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from flwr_leakage.attacks import Analytic, GradientInversion
from flwr_leakage.audit.gate import Gate
from flwr_leakage.audit.self_attack import SelfAttack
from flwr_leakage.cli.app import app as command
from flwr_leakage.defenses import ErrorFeedback, GaussianNoise, GradientPruning
from flwr_leakage.flower import ClientAudit, InlineGrid, LeakageMod, audit, encode
from flwr_leakage.flower.wire import RECORD_KEY, unpack_note
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.members import OwnRecords
from flwr_leakage.records import Batch, InputSpec, LocalSchedule
from flwr_leakage.scores import GradientNorm
from flwr_leakage.tracking import read_run

SPEC = InputSpec((1, 12, 12), 3)
SCHEDULE = LocalSchedule(learning_rate=0.1, batch_size=1)
DLG = GradientInversion()
IMAGE = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(3))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 3))


def train(message, context):
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = encode(IMAGE.clone(), torch.tensor([1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=SCHEDULE.learning_rate)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def client(kind, **settings):
    app = ClientApp()
    if kind == "line":
        app.train()(train)
        return audit(app, spec=SPEC, **settings)
    mod = LeakageMod(ClientAudit(GradientMap(network()), SPEC, SCHEDULE, **settings))
    app.train(mods=[mod])(train)
    return app


def reply_of(app, server_round=1):
    config = ConfigRecord({"server-round": server_round})
    content = RecordDict({"arrays": ArrayRecord(network().state_dict()), "config": config})
    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(content, node, "train")])
    return reply, grid._contexts[node]


def shared(reply):
    return {m.name for m in unpack_note(reply.content[RECORD_KEY]).measurements}


@pytest.mark.parametrize("kind", ["line", "mod"])
@pytest.mark.parametrize(
    ("share", "names"),
    [("nothing", set()), (["psnr"], {"self_attack_psnr"})],
)
def test_the_server_is_told_what_the_owner_shares(kind, share, names):
    reply, context = reply_of(client(kind, attack=Analytic(), share=share))
    assert shared(reply) == names
    assert "self_attack_psnr" in str(context.state[RECORD_KEY]["round-1"])


@pytest.mark.parametrize("kind", ["line", "mod"])
def test_the_self_attack_measures_what_is_sent(kind, tmp_path):
    attack = {"attack": Analytic(), "folder": str(tmp_path)}
    reply_of(client(kind, **attack))
    reply_of(client(kind, defense=GaussianNoise(0.1), seed=0, **attack), server_round=2)
    run = read_run(tmp_path / "run-1-client-0")
    psnr = {r.server_round: r.value for r in run.records if r.name == "psnr"}
    assert psnr[1] > 60 > 25 > psnr[2]
    assert {image.role for image in run.images} == {"original", "reconstruction"}
    assert oct((tmp_path / "run-1-client-0").stat().st_mode)[-3:] == "700"


@pytest.mark.parametrize("kind", ["line", "mod"])
def test_the_gate_refuses_without_a_reason(kind, tmp_path):
    gate = Gate(grade="partly")
    more = {"truth": tmp_path / "truth"} if kind == "line" else {}
    reply, _ = reply_of(client(kind, attack=Analytic(), gate=gate, folder=str(tmp_path), **more))
    text = "flwr_leakage: this client's own policy keeps its update of this round back"
    assert reply.error.reason == text
    shown = CliRunner().invoke(command, ["client", str(tmp_path)], env={"COLUMNS": "200"})
    assert "does not pass" in shown.output, shown.output
    assert "self-attack: psnr" in shown.output


@pytest.mark.parametrize("kind", ["line", "mod"])
def test_the_gate_defends_more_strongly_until_it_passes(kind, tmp_path):
    stronger = (GaussianNoise(1e-6), GaussianNoise(1.0), GaussianNoise(10.0))
    gate = Gate(psnr=20.0, stronger=stronger)
    app = client(kind, attack=Analytic(), gate=gate, seed=0, folder=str(tmp_path))
    reply, _ = reply_of(app)
    plain, _ = reply_of(client(kind))
    change = [
        (reply.content["arrays"][name].numpy() - plain.content["arrays"][name].numpy()).std()
        for name in ("1.weight",)
    ]
    assert change[0] == pytest.approx(1.0 * SCHEDULE.learning_rate, rel=0.2)
    said = [e.message for e in read_run(tmp_path / "run-1-client-0").events]
    assert [("does not pass" in text) for text in said] == [True, True, False]
    assert "Gate" not in unpack_note(reply.content[RECORD_KEY]).remark


def test_a_gate_of_scores_scores_whatever_it_costs():
    settings = {"scores": {"g": GradientNorm()}, "gate": Gate(scores={"gradient_norm": 1e-9})}
    reply, context = reply_of(client("mod", **settings))
    assert reply.has_error()
    assert "gradient_norm may be" in str(context.state[RECORD_KEY]["round-1"])
    settings["gate"] = Gate(scores={"gradient_norm": 1e9})
    assert not reply_of(client("mod", **settings))[0].has_error()


@pytest.mark.parametrize("kind", ["line", "mod"])
def test_a_gate_sends_nothing_in_which_the_server_finds_the_clients_records(kind, tmp_path):
    draws = torch.Generator().manual_seed(9)
    null = Batch(torch.rand(400, 1, 12, 12, generator=draws), torch.arange(400) % 3)
    settings = {"scores": {"members": OwnRecords(null)}, "seed": 0}
    gate = Gate(scores={"membership_corrected": 0.01})
    reply, context = reply_of(client(kind, gate=gate, folder=str(tmp_path), **settings))
    assert "own policy" in reply.error.reason
    assert "membership_corrected may be" in str(context.state[RECORD_KEY]["round-1"])
    shown = CliRunner().invoke(command, ["client", str(tmp_path)], env={"COLUMNS": "300"})
    assert "it was in the update, by algebra" in shown.output, shown.output
    gate = Gate(scores={"membership_corrected": 0.01}, stronger=(GaussianNoise(10.0),))
    reply, _ = reply_of(client(kind, gate=gate, **settings))
    assert not reply.has_error() and shared(reply) == set()


def test_limits_on_what_is_never_measured_are_refused_at_once():
    with pytest.raises(ValueError, match="needs a self-attack in every round"):
        client("mod", gate=Gate(psnr=20.0), attack=SelfAttack(Analytic(), every=2))
    with pytest.raises(ValueError, match="there are no scores"):
        client("line", gate=Gate(scores={"lambda_max": 1.0}))
    with pytest.raises(ValueError, match="share must be"):
        client("line", share="all")


def doctored(message, context):
    """A training whose update is not what the captured steps made."""
    reply = train(message, context)
    state = reply.content["arrays"].to_torch_state_dict()
    reply.content["arrays"] = ArrayRecord({k: v + 1.0 for k, v in state.items()})
    return reply


def with_more(message, context):
    """A training that sends another record beside its model."""
    reply = train(message, context)
    reply.content["more"] = ArrayRecord({"raw": IMAGE})
    return reply


def with_another_array(message, context):
    """A training that sends an array that the server did not send."""
    reply = train(message, context)
    state = reply.content["arrays"].to_torch_state_dict()
    reply.content["arrays"] = ArrayRecord({**state, "raw": IMAGE})
    return reply


@pytest.mark.parametrize("training", [doctored, with_more, with_another_array])
def test_a_gate_lets_nothing_past_that_it_did_not_judge(training):
    app = ClientApp()
    app.train()(training)
    gate = Gate(scores={"gradient_norm": 1e9})
    guarded = audit(app, spec=SPEC, scores={"g": GradientNorm()}, gate=gate, replay_every=None)
    assert reply_of(guarded)[0].has_error()


@pytest.mark.parametrize("settings", [{"defense": GaussianNoise(1.0), "seed": 0},
                                      {"scores": {"g": GradientNorm()},
                                       "gate": Gate(scores={"gradient_norm": 1e9})}])  # fmt: skip
def test_a_server_that_sends_a_second_record_gets_no_update(settings):
    grid = InlineGrid(client("line", **settings), 1)
    (node,) = grid.get_node_ids()
    arrays = ArrayRecord(network().state_dict())
    content = RecordDict({"arrays": arrays, "other": ArrayRecord({"x": IMAGE})})
    (reply,) = grid.send_and_receive([Message(content, node, "train")])
    assert reply.has_error()


def test_samples_that_were_not_kept_are_no_evidence_of_safety():
    schedule = LocalSchedule(learning_rate=0.1, batch_size=1, num_steps=2)
    settings = {"scores": {"g": GradientNorm()}, "gate": Gate(scores={"gradient_norm": 1e9})}
    mod = LeakageMod(ClientAudit(GradientMap(network()), SPEC, schedule, max_samples=1, **settings))
    app = ClientApp()

    @app.train(mods=[mod])
    def two_steps(message, context):
        encode(IMAGE.clone(), torch.tensor([2]))
        reply = train(message, context)
        reply.content["metrics"] = MetricRecord({"num-examples": 2})
        return reply

    reply, context = reply_of(app)
    assert reply.has_error()
    assert "only 1 of the 2 samples" in str(context.state[RECORD_KEY]["round-1"])


def test_an_attack_cut_off_or_without_numbers_is_no_evidence_of_safety():
    attack = SelfAttack(DLG, max_seconds=1e-3)
    reply, context = reply_of(client("mod", attack=attack, gate=Gate(psnr=200.0)))
    assert reply.has_error()
    assert "its budget of 0.001 CPU seconds" in str(context.state[RECORD_KEY]["round-1"])
    with pytest.raises(ValueError, match="check_update"):
        client("mod", attack=Analytic(), gate=Gate(psnr=20.0), check_update="never")


@pytest.mark.parametrize("kind", ["mod", "line"])
def test_a_misspelt_score_of_a_gate_is_refused_before_any_work(kind):
    scores = {"norm": GradientNorm()}  # limits are of measurements, whatever the score is called
    client(kind, scores=scores, gate=Gate(scores={"gradient_norm": 1.0}))
    with pytest.raises(ValueError, match=r"measure \(gradient_norm\), got 'gradient_nrom', 'norm'"):
        client(kind, scores=scores, gate=Gate(scores={"gradient_nrom": 1.0, "norm": 1.0}))


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_the_owner_alone_sees_what_one_step_on_few_images_had_shown(tmp_path, optimizer):
    images = torch.rand(20, 1, 12, 12, generator=torch.Generator().manual_seed(5))

    def loop(message, context):
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
        for inputs in images.split(4):
            steps.zero_grad()
            F.cross_entropy(model(inputs), torch.zeros(4).long()).backward()
            steps.step()
        arrays = ArrayRecord(model.state_dict())
        content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 20})}
        return Message(RecordDict(content), reply_to=message)

    app = ClientApp()
    app.train()(loop)
    attack = SelfAttack(Analytic(), max_samples=4, probe_sizes=(1,))
    owned = audit(app, spec=SPEC, attack=attack, folder=tmp_path, share="everything")
    reply, _ = reply_of(owned)
    text = reply.content[RECORD_KEY]["note"]
    assert "probe" not in text and "psnr" not in text
    (folder,) = tmp_path.iterdir()
    psnr = [r.value for r in read_run(folder).records if r.name == "1/psnr" and r.kind == "probe"]
    assert len(psnr) == 1 and psnr[0] > 48.2


@pytest.mark.parametrize("kind", ["line", "mod"])
def test_what_error_feedback_leaves_out_is_sent_in_later_rounds(kind):
    defense = ErrorFeedback([GradientPruning(0.5)])
    app, start = client(kind, defense=defense), ArrayRecord(network().state_dict())
    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()

    def sent(server_round):
        config = ConfigRecord({"server-round": server_round})
        content = RecordDict({"arrays": start, "config": config})
        (reply,) = grid.send_and_receive([Message(content, node, "train")])
        state = reply.content["arrays"].to_torch_state_dict()
        assert set(reply.content.array_records) == {"arrays"}  # what is carried does not travel
        return torch.cat([(state[n] - v).flatten() for n, v in network().state_dict().items()])

    plain, _ = reply_of(client(kind))
    trained = plain.content["arrays"].to_torch_state_dict()
    raw = torch.cat([(trained[n] - v).flatten() for n, v in network().state_dict().items()])
    first, second = sent(1), sent(2)
    assert int((first != 0).sum()) < 0.6 * len(raw)
    torch.testing.assert_close(first[first != 0], raw[first != 0])
    left = grid._contexts[node].state["flwr-leakage-carried"].to_torch_state_dict()
    rest = torch.cat([left[name].flatten() for name in network().state_dict()])
    torch.testing.assert_close(first + second + rest, 2 * raw)


@pytest.mark.parametrize("kind", ["line", "mod"])
def test_an_update_that_is_kept_back_changes_nothing_of_what_is_carried(kind):
    gate, scores = Gate(scores={"gradient_norm": 1e-9}), {"g": GradientNorm()}
    defense = ErrorFeedback([GradientPruning(0.5)])
    reply, context = reply_of(client(kind, scores=scores, defense=defense, gate=gate))
    assert reply.has_error()
    assert "flwr-leakage-carried" not in context.state
