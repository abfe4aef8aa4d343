"""What a client's record holds stands in the docs, and tells nothing of samples by default."""

import dataclasses
import json
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from torch import nn
from trained import Loop, network

from flwr_leakage.audit.gate import Gate
from flwr_leakage.audit.note import REPLAY_WORDS, ClientNote, ReplayResult
from flwr_leakage.audit.sharing import Sharing
from flwr_leakage.capture import TrainingFacts
from flwr_leakage.capture.facts import UNTOLD
from flwr_leakage.defenses import GaussianNoise, GradientPruning
from flwr_leakage.flower import ClientAudit, InlineGrid, LeakageMod, audit, encode
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.members import OwnRecords
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Measurement
from flwr_leakage.scores import GradientNorm

DOCS = Path(__file__).parents[2] / "docs" / "threat-model.md"
SPEC = InputSpec((1, 6, 6), 3, (0.5,), (0.5,))


def fields(note):
    """The names of all that a note's text holds, those of its parts with a dot."""
    content = json.loads(note.to_text())
    nested = {name: json.loads(content.pop(name)) for name in ("training", "replay")}
    return {*content, *(f"{part}.{name}" for part, values in nested.items() for name in values)}


def test_each_field_that_travels_stands_in_the_table():
    whole = ClientNote(1, training=TrainingFacts("SGD", 0.1), replay=ReplayResult("undone"))
    section = DOCS.read_text().partition("## What travels")[2]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall("`([^`]+)`", row)]
    assert sorted(listed) == sorted(fields(whole))


def clipped_and_noised(model):
    """The steps of DP-SGD on a whole mini-batch: the gradient is clipped, and noise is added."""
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad += 0.3 * torch.randn_like(parameter)


def batch(record):
    """Twelve images; one of them is another in the second candidate."""
    levels = torch.randint(9, 250, (12, 1, 6, 6), generator=make_generator(7))
    if record:
        levels[5] = torch.randint(20, 90, (1, 6, 6), generator=make_generator(8))
    return (levels.float() / 255 - 0.5) / 0.5


def told(record, mods=(), on_gradients=lambda model: None, server_round=1, count=12, **settings):
    """What a client sends beside its update where it trains on one of two candidate batches."""
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message, context):
        loop = Loop(images=batch(record), on_gradients=on_gradients)
        loop.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        state = ArrayRecord(loop.run().state_dict())
        metrics = MetricRecord({"num-examples": count} if count else {"loss": 0.5})
        return Message(RecordDict({"arrays": state, "metrics": metrics}), reply_to=message)

    grid = InlineGrid(audit(app, **settings), 1)
    replies = []
    for number in range(1, server_round + 1):
        config = ConfigRecord({"server-round": number, "clipping_norm": 0.05})
        content = RecordDict({"arrays": ArrayRecord(network().state_dict()), "config": config})
        (node,) = grid.get_node_ids()
        message = grid.create_message(content, "train", node, str(number))
        replies = grid.send_and_receive([message])
    (reply,) = replies
    assert not reply.has_error(), reply.error
    return reply.content["flwr-leakage"]["note"]


GAMES = {
    "as trained": {},
    "LocalDpMod": {"mods": [LocalDpMod(1.0, 1.0, 10.0, 1e-5)]},
    "clipping": {"mods": [fixedclipping_mod]},
    "noise in the steps": {"on_gradients": clipped_and_noised},
    "own noise": {"defense": GaussianNoise(noise_std=0.1)},
    "no number of samples": {"count": 0},
    "every round replayed": {"replay_every": 1},
    "a gate that may defend": {
        "scores": {"norm": GradientNorm()},
        "gate": Gate(scores={"gradient_norm": 1e9}, stronger=(GaussianNoise(noise_std=0.1),)),
    },
    "a gate of the client's own membership test": {
        "scores": {"members": OwnRecords(Batch(torch.rand(60, 1, 6, 6), torch.arange(60) % 3))},
        "gate": Gate(scores={"membership_share": 1.0}, stronger=(GaussianNoise(noise_std=0.1),)),
    },
}


@pytest.mark.parametrize(("game", "server_round"), list(product(GAMES, (1, 3))))
def test_a_record_is_the_same_whichever_sample_was_in_the_batch(game, server_round):
    first, second = (told(record, server_round=server_round, **GAMES[game]) for record in (0, 1))
    assert first == second
    note = ClientNote.from_text(first)
    assert (note.train_cpu_seconds, note.score_cpu_seconds, note.explained) == (None, None, "")
    assert note.replay.residual is None and note.replay.sentence in REPLAY_WORDS.values()
    if game not in ("as trained", "no number of samples", "every round replayed"):
        assert note.training == TrainingFacts("SGD", 0.1, unscheduled=UNTOLD)


@pytest.mark.parametrize("share", ["nothing", "everything"])
def test_under_noise_the_residual_travels_only_where_the_owner_shares_it(share):
    text = told(0, mods=[LocalDpMod(1.0, 1.0, 10.0, 1e-5)], share=share)
    note = ClientNote.from_text(text)
    assert note.replay.kind == "refuted"
    assert (note.replay.residual is not None) == (share == "everything")
    assert ("of its norm after training" in note.replay.sentence) == (share == "everything")
    assert (note.train_cpu_seconds is not None) == (share == "everything")
    assert bool(note.training.num_steps) == (share == "everything")


def test_the_owners_spec_is_told_and_nothing_else_of_the_samples():
    noise = {"defense": GaussianNoise(noise_std=0.1), "spec": SPEC}
    facts = ClientNote.from_text(told(0, **noise)).training
    assert facts.spec() == SPEC
    assert (facts.num_steps, facts.batch_size) == (0, 0)


def test_a_shared_score_does_not_tell_the_residual_in_its_notes():
    secret = "the update was changed by 0.37 of its norm"
    score = Measurement("lambda_max", (1.0,), "1", "", (f"of another model: {secret}",), 3)
    note = ClientNote(0, (score,), replay=ReplayResult("refuted", 0.37, secret))
    sent = Sharing().travelling(note, released_as_trained=True)
    assert "0.37" not in sent.to_text()
    assert "does not explain the update" in sent.measurements[0].notes[0]


def test_words_that_are_none_are_refused():
    with pytest.raises(ValueError, match="share must be"):
        Sharing.of("all")
    everything = Sharing.of("everything")
    assert all(getattr(everything, f.name) for f in dataclasses.fields(Sharing)[1:])
    assert Sharing.of(["psnr", "times"]) == Sharing(metrics=("psnr",), times=True)


def test_an_error_answer_tells_neither_labels_nor_paths(caplog, unchecked):
    app = ClientApp()
    settings = ClientAudit(
        GradientMap(network()), SPEC, LocalSchedule(0.1, 1, 4), GradientPruning(0.5)
    )

    @app.train(mods=[LeakageMod(settings)])
    def train(message, context):
        encode(torch.zeros(4, 1, 6, 6), torch.tensor([0, 1, 2, 77]))

    context = Context(1, 5, {}, RecordDict(), {})
    content = RecordDict({"arrays": ArrayRecord(network().state_dict())})
    InlineGrid(ClientApp(), 1)  # messages can be made within a run only
    with pytest.raises(ValueError) as raised:  # Flower sends the text of an app's own error
        app(Message(content, 5, "train"), context)
    assert "77" not in str(raised.value)
    assert "got 0 … 77" in caplog.text
