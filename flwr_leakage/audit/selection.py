"""Which of a round's updates are attacked."""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr_leakage.records import Observation


@dataclass(frozen=True)
class Selection:
    """Whom to attack and when.

    Attributes:
        every: rounds from one attack to the next, ≥ 1.
        first: the first round to attack, ≥ 1.
        clients: the partition ids to attack, or ``None`` for all.
        max_clients: at most so many in a round, the lowest ids first; ``None`` for no limit.
    """

    every: int = 1
    first: int = 1
    clients: Sequence[int] | None = None
    max_clients: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "first", "max_clients"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.clients is not None:
            object.__setattr__(self, "clients", tuple(self.clients))

    def includes(self, server_round: int, client_id: int) -> bool:
        """Whether a client's update may be attacked; ``max_clients`` may still leave it out."""
        return (
            server_round >= self.first
            and (server_round - self.first) % self.every == 0
            and (self.clients is None or client_id in self.clients)
        )

    def __call__(self, observations: Sequence[Observation]) -> list[Observation]:
        """Return the observations to attack, by client."""
        chosen = [
            observation
            for observation in observations
            if self.includes(observation.server_round, observation.client_id)
        ]
        return sorted(chosen, key=lambda observation: observation.client_id)[: self.max_clients]
