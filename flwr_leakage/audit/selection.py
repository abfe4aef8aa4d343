"""Choose the clients' updates that are attacked in a round."""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr_leakage.records import Observation
from flwr_leakage.values import require


@dataclass(frozen=True)
class Selection:
    """The choice of the rounds and the clients that are attacked.

    Attributes:
        every: the number of rounds from one attack to the next, ≥ 1.
        first: the first round to attack, ≥ 1.
        clients: the partition ids of the clients to attack; ``None`` for all.
        max_clients: the largest number of clients to attack in a round, in the order of their ids;
            ``None`` for no limit.
        max_examples: the largest number of samples that a client may report to be attacked;
            ``None`` for no limit.
    """

    every: int = 1
    first: int = 1
    clients: Sequence[int] | None = None
    max_clients: int | None = None
    max_examples: int | None = None

    def __post_init__(self) -> None:
        require(self, "be at least 1", "every", "first")
        require(self, "be at least 1", "max_clients", "max_examples", optional=True)
        if self.clients is not None:
            object.__setattr__(self, "clients", tuple(self.clients))

    def includes(self, server_round: int, client_id: int) -> bool:
        """Return whether a client may be attacked in a round.

        The limits ``max_clients`` and ``max_examples`` are not considered.
        """
        return not self.refuses(server_round, client_id)

    def refuses(self, server_round: int, client_id: int) -> str:
        """Return in words why a client is not attacked in a round; empty if the client may be
        attacked.

        The limits ``max_clients`` and ``max_examples`` are not considered.
        """
        if server_round < self.first or (server_round - self.first) % self.every:
            every = f"every {self.every} rounds " if self.every > 1 else ""
            return f"attacks run {every}from round {self.first} on"
        if self.clients is not None and client_id not in self.clients:
            return "the client was not selected"
        return ""

    def __call__(self, observations: Sequence[Observation]) -> list[Observation]:
        """Return the observations of a round that are attacked, in the order of client ids."""
        chosen = [observation for observation in observations if not self._against(observation)]
        return sorted(chosen, key=lambda observation: observation.client_id)[: self.max_clients]

    def left_out(self, observations: Sequence[Observation]) -> dict[int, str]:
        """Return the reasons in words why clients of a round are not attacked, by client id.

        Clients that are attacked have no entry.
        """
        chosen = {observation.client_id for observation in self(observations)}
        limit = f"at most {self.max_clients} clients are attacked in a round"
        return {
            observation.client_id: self._against(observation) or limit
            for observation in observations
            if observation.client_id not in chosen
        }

    def _against(self, observation: Observation) -> str:
        """Return in words why an update is not attacked; empty if the update may be attacked.

        The limit ``max_clients`` is not considered.
        """
        count = observation.update.num_examples
        refused = self.refuses(observation.server_round, observation.client_id)
        if refused:
            return refused
        if self.max_examples is not None and count > self.max_examples:
            return (
                f"{count:,} samples, more than the {self.max_examples:,} that are attacked at most"
            )
        return ""
