"""A client holds the model that it scores against the update that it made."""

import dataclasses

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from scored import small_network

from flwr_leakage.flower import ClientAudit, InlineGrid, LeakageMod, encode
from flwr_leakage.flower.wire import RECORD_KEY, unpack_note
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.scores import GradientNorm
from flwr_leakage.scores.plan import ScorePlan

AUDIT = ClientAudit(
    GradientMap(small_network()),
    InputSpec((1, 6, 6), 4),
    LocalSchedule(0.5, 1, 4),
    scores={"gradient_norm": GradientNorm()},
    score_plan=ScorePlan(relative_cost=None, send=True),
    seed=0,
    share="everything",
)


def train(learning_rate):
    """A training loop with one step of SGD."""

    def call(message, context):
        network = small_network()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        generator = torch.Generator().manual_seed(1)
        images, labels = encode(torch.rand(4, 1, 6, 6, generator=generator), torch.arange(4))
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        torch.optim.SGD(network.parameters(), lr=learning_rate).step()
        content = {
            "arrays": ArrayRecord(network.state_dict()),
            "metrics": MetricRecord({"num-examples": 4}),
        }
        return Message(RecordDict(content), reply_to=message)

    return call


def play(audit, rates):
    """The notes of one client over several rounds."""
    client = ClientApp()
    remaining = iter(rates)

    @client.train(mods=[LeakageMod(audit)])
    def call(message, context):
        return train(next(remaining))(message, context)

    grid = InlineGrid(client, 1)
    (node,) = grid.get_node_ids()
    notes = []
    for server_round in range(1, len(rates) + 1):
        arrays = ArrayRecord(small_network().state_dict())
        content = {"arrays": arrays, "config": ConfigRecord({"server-round": server_round})}
        message = Message(RecordDict(content), node, MessageType.TRAIN)
        (reply,) = grid.send_and_receive([message])
        notes.append(unpack_note(reply.content[RECORD_KEY]))
    return notes


def test_a_right_schedule_explains_the_update_and_is_checked_once():
    first, second = play(AUDIT, [0.5, 0.1])
    assert first.explained.startswith("in round 1, the scored model explains the update to ")
    assert second.explained == first.explained
    assert not any(note for m in (*first.measurements, *second.measurements) for note in m.notes)


def test_a_wrong_one_is_told_beside_every_score_of_every_round():
    notes = play(AUDIT, [0.1, 0.1])
    for note in notes:
        assert "does not explain the update (relative distance 4)" in note.explained
        for measured in note.measurements:
            assert all("does not explain the update" in text for text in measured.notes)


def test_chosen_rounds_are_replayed_and_what_they_cost_is_told(unchecked):
    chosen = dataclasses.replace(AUDIT, scores={}, check_rounds=lambda number: number == 2)
    notes = play(chosen, [0.5, 0.5, 0.5])
    assert [note.replay is not None for note in notes] == [False, True, False]
    assert [(note.replay_cpu_seconds or 0) > 0 for note in notes] == [False, True, False]


def test_always_and_never(unchecked):
    always = dataclasses.replace(AUDIT, check_update="always")
    first, second = play(always, [0.5, 0.1])
    assert "explains the update" in first.explained
    assert "in round 2" in second.explained and "does not explain" in second.explained
    (silent,) = play(dataclasses.replace(AUDIT, check_update="never"), [0.1])
    assert not silent.explained
    with pytest.raises(ValueError, match="check_update must be 'once', 'always' or 'never'"):
        dataclasses.replace(AUDIT, check_update="sometimes")
