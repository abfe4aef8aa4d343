"""The in-process grid behaves as Flower's runtimes do."""

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from flwr_leakage.flower.inline_grid import FIRST_NODE_ID, SERVER_NODE_ID, InlineGrid


def _app(function):
    app = ClientApp()
    app.train()(function)
    return app


def _messages(grid, nodes=None, **content):
    nodes = grid.get_node_ids() if nodes is None else nodes
    return [
        grid.create_message(RecordDict(content), MessageType.TRAIN, node, "1") for node in nodes
    ]


def _echo(message, context):
    return Message(message.content, reply_to=message)


def test_nodes_hold_the_partitions_in_order():
    seen = []

    def note(message, context):
        seen.append((context.node_id, dict(context.node_config), dict(context.run_config)))
        return _echo(message, context)

    grid = InlineGrid(_app(note), 3, {"key": "value"})
    assert list(grid.get_node_ids()) == [FIRST_NODE_ID + i for i in range(3)]
    replies = grid.send_and_receive(_messages(grid))
    assert [reply.metadata.src_node_id for reply in replies] == [
        FIRST_NODE_ID + i for i in range(3)
    ]
    assert [config["partition-id"] for _, config, _ in seen] == [0, 1, 2]
    assert all(config["num-partitions"] == 3 for _, config, _ in seen)
    assert all(run_config == {"key": "value"} for _, _, run_config in seen)


def test_each_node_keeps_a_state_of_its_own_between_rounds():
    def count(message, context):
        record = context.state.setdefault("count", MetricRecord({"calls": 0}))
        record["calls"] += context.node_id - FIRST_NODE_ID + 1
        return Message(RecordDict({"count": record}), reply_to=message)

    grid = InlineGrid(_app(count), 2)
    for server_round in (1, 2, 3):
        replies = grid.send_and_receive(_messages(grid))
        calls = [reply.content["count"]["calls"] for reply in replies]
        assert calls == [server_round, 2 * server_round]


def test_no_object_is_shared_between_server_and_clients():
    kept = []

    def tamper(message, context):
        kept.append(message.content)
        message.content["config"]["secret"] = "changed"
        message.content["arrays"]["w"] = Array(np.ones(2))
        return Message(message.content, reply_to=message)

    grid = InlineGrid(_app(tamper), 1)
    arrays = ArrayRecord({"w": Array(np.zeros(2))})
    (message,) = _messages(grid, arrays=arrays, config=ConfigRecord({"secret": "sent"}))
    (reply,) = grid.send_and_receive([message])
    assert message.content["config"]["secret"] == "sent"
    assert arrays["w"].numpy().tolist() == [0, 0]
    assert reply.content["arrays"]["w"].numpy().tolist() == [1, 1]
    kept[0]["config"]["secret"] = "later"
    assert reply.content["config"]["secret"] == "changed"


def test_an_exception_is_an_error_reply_and_the_others_go_on():
    def fails(message, context):
        if context.node_id == FIRST_NODE_ID + 1:
            raise OSError("no space left")
        return _echo(message, context)

    grid = InlineGrid(_app(fails), 3)
    replies = list(grid.send_and_receive(_messages(grid)))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert "OSError: no space left" in replies[1].error.reason
    assert replies[1].metadata.src_node_id == FIRST_NODE_ID + 1


@pytest.mark.parametrize("answer", [None, "text"])
def test_an_answer_that_is_no_message_is_an_error_reply(answer):
    grid = InlineGrid(_app(lambda message, context: answer), 1)
    (reply,) = grid.send_and_receive(_messages(grid))
    assert reply.has_error()


def test_an_unknown_node_is_an_error_reply():
    grid = InlineGrid(_app(_echo), 1)
    (reply,) = grid.send_and_receive(_messages(grid, [99]))
    assert reply.has_error()
    assert reply.metadata.src_node_id == 99


@pytest.mark.parametrize("fails", [False, True])
def test_the_identity_is_the_nodes_inside_and_the_servers_outside(fails):
    inside = []

    def identify(message, context):
        inside.append(TaskIdentity.node_id)
        if fails:
            raise RuntimeError
        return _echo(message, context)

    grid = InlineGrid(_app(identify), 2)
    replies = list(grid.send_and_receive(_messages(grid)))
    assert inside == list(grid.get_node_ids())
    assert TaskIdentity.node_id == SERVER_NODE_ID
    assert all(reply.metadata.dst_node_id == SERVER_NODE_ID for reply in replies)


def test_replies_wait_until_they_are_pulled_and_are_handed_out_once():
    def tell(message, context):
        return Message(message.content, reply_to=message)

    grid = InlineGrid(_app(tell), 1)

    def push(*texts):
        messages = [_messages(grid, config=ConfigRecord({"text": t}))[0] for t in texts]
        return list(grid.push_messages(messages))

    def pull(*identifiers):
        return [reply.content["config"]["text"] for reply in grid.pull_messages(identifiers)]

    first, second = push("a", "b")
    assert pull(first) == ["a"]
    (third,) = push("c")
    assert pull(third, second) == ["c", "b"]
    assert pull(first, second, third, "unknown") == []


def test_no_clients_are_refused():
    with pytest.raises(ValueError, match="num_clients must be at least 1, got 0"):
        InlineGrid(_app(_echo), 0)
