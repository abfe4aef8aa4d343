"""Run Flower in one process, by a ``Grid`` that calls the ``ClientApp`` directly, without Ray.

Messages are serialized in Flower's wire format, and every node has its own ``Context``, so that an
app behaves as it does on Flower's runtimes. ``TaskIdentity`` is internal to Flower 1.41; this is
the only file that touches it.
"""

import itertools
import threading
from collections.abc import Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

SERVER_NODE_ID = 1

FIRST_NODE_ID = 1 << 32
"""The node id of the client with partition 0, which is larger than any number of a partition."""


class InlineGrid(Grid):
    """A Flower grid that serves its nodes one after the other, in the calling thread.

    Node ``FIRST_NODE_ID`` + i holds partition i. So node ids are the same in every run. As on
    Flower's runtimes, no node id is also the number of a partition.

    Args:
        client_app: the app that every node runs.
        num_clients: the number of nodes and of partitions, ≥ 1.
        run_config: the settings that the app finds in ``context.run_config``.
    """

    def __init__(
        self, client_app: ClientApp, num_clients: int, run_config: UserConfig | None = None
    ) -> None:
        if num_clients < 1:
            raise ValueError(f"num_clients must be at least 1, got {num_clients}.")
        self._app = client_app
        self._run = Run.create_empty(run_id=1)
        self._replies: dict[str, Message] = {}
        self._numbers = itertools.count()
        self._one_at_a_time = threading.Lock()
        self._contexts = {
            FIRST_NODE_ID + partition: Context(
                run_id=1,
                node_id=FIRST_NODE_ID + partition,
                node_config={"partition-id": partition, "num-partitions": num_clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for partition in range(num_clients)
        }
        TaskIdentity.task_id = 1
        TaskIdentity.run_id = 1
        TaskIdentity.node_id = SERVER_NODE_ID

    def set_run(self, run: Run) -> None:
        """Set the Flower run that the property ``run`` returns."""
        self._run = run

    @property
    def run(self) -> Run:
        """Return the Flower run that ``set_run`` has set."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message of the server with ``content`` to the node ``dst_node_id``."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, in the order of their partitions."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver each message to its node at once, and return for each the id by which its reply
        can be pulled.
        """
        ids = []
        for message in messages:
            identifier = f"{message.metadata.dst_node_id}-{next(self._numbers)}"
            # Servers of ``flwr.server`` call this from one thread per client, but clients must run
            # one after the other.
            with self._one_at_a_time:
                self._replies[identifier] = self._serve(message)
            ids.append(identifier)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the messages with these ids; each reply is returned only once."""
        return [self._replies.pop(key) for key in message_ids if key in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Deliver the messages to their nodes, and return the replies; ``timeout`` has no
        effect.
        """
        return self.pull_messages(self.push_messages(messages))

    def _serve(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        TaskIdentity.node_id = node_id
        try:
            return _through_the_wire(self._app(_through_the_wire(message), self._contexts[node_id]))
        # A node whose app fails replies with an error, as on Flower's runtimes.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        finally:
            TaskIdentity.node_id = SERVER_NODE_ID


def _through_the_wire(message: Message) -> Message:
    """Return a copy of a message that shares no object with it, made by serializing and reading it
    back.
    """
    return message_from_proto(message_to_proto(message))
