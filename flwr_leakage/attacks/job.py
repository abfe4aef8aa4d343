"""All that an attack is given, in one frozen object."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import InputSpec, Observation, ThreatModel


@dataclass(frozen=True)
class AttackJob:
    """What a server knows and what it wants to know: the one argument of every attack.

    There is no field through which the truth could enter: what a threat model grants by fiat is
    in each observation's ``disclosed``, and used only where ``threat`` says so.

    Attributes:
        gradient_map: the public model and loss, in the BatchNorm mode of the clients.
        spec: the public facts about the data.
        observations: what the server saw, one a target; the same one several times in a row for
            several restarts of a target.
        threat: what the attacker knows besides.
        seed: of all random draws, ≥ 0.
        restarts: the number 0, 1, … of each observation's restart; empty where all are 0.
        max_seconds: CPU seconds that an attack may take for each observation. It then ends with
            the best that it has, and says so by ``stats["stopped"]``; ``None`` for no limit.

    Raises:
        ValueError: the seed is negative, there is not one restart number for each observation, or
            ``max_seconds`` is not positive.
    """

    gradient_map: GradientMap
    spec: InputSpec
    observations: Sequence[Observation]
    threat: ThreatModel
    seed: int = 0
    restarts: Sequence[int] = ()
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds must be positive or None, got {self.max_seconds}.")
        if self.seed < 0:
            raise ValueError(f"seed must be ≥ 0, got {self.seed}.")
        if self.restarts and len(self.restarts) != len(self.observations):
            raise ValueError(
                f"restarts must have one entry for each of {len(self.observations)} observations, "
                f"got {len(self.restarts)}."
            )

    def restart(self, index: int) -> int:
        """The number of the restart that observation ``index`` stands for."""
        return self.restarts[index] if self.restarts else 0

    def generator(
        self, index: int, purpose: str, *, same_for_restarts: bool = False
    ) -> torch.Generator:
        """The random stream of observation ``index`` for one purpose.

        It depends on the seed, on the observation's round and client, on the purpose and on the
        restart's number only: not on the other observations, on their order, nor on the process.

        Args:
            index: of the observation.
            purpose: names the stream.
            same_for_restarts: give all restarts of a target the stream of the first.
        """
        observation = self.observations[index]
        number = 0 if same_for_restarts else self.restart(index)
        return make_generator(
            self.seed,
            server_round=observation.server_round,
            client_id=max(observation.client_id, 0),
            purpose=f"{purpose}, restart {number}",
        )

    def take(self, indices: Iterable[int]) -> "AttackJob":
        """The same job on some of its observations, with their restart numbers."""
        chosen = list(indices)
        return replace(
            self,
            observations=[self.observations[i] for i in chosen],
            restarts=[self.restarts[i] for i in chosen] if self.restarts else (),
        )

    def by_target(self) -> list[list[int]]:
        """Indices of the observations, those that are restarts of one target together."""
        targets: list[list[int]] = []
        for index, observation in enumerate(self.observations):
            before = targets[-1][-1] if targets else None
            if (
                before is not None
                and observation is self.observations[before]
                and self.restart(index) > self.restart(before)
            ):
                targets[-1].append(index)
            else:
                targets.append([index])
        return targets
