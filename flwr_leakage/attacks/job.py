"""Define the job: the observed updates and the attacker's knowledge, as one argument of attacks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from flwr_leakage.attacks.problem import Problem, pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import InputSpec, Observation, ThreatModel


@dataclass(frozen=True)
class AttackJob:
    """The observations that a server attacks, and its knowledge: the one argument of every attack.

    No field can carry the private samples. Facts that a threat model may grant, such as labels, are
    in each observation's ``disclosed``, and are used only if ``threat`` grants them.

    Attributes:
        gradient_map: the public model and loss, in the BatchNorm mode of the clients.
        spec: the public facts about the data.
        observations: the updates that the server observed. One that is attacked from several starts
            stands here several times.
        threat: the facts beyond the update that the attacker knows, such as labels or BatchNorm
            statistics.
        seed: the seed of all random draws, ≥ 0.
        restarts: the number 0, 1, … of the start from which each observation is attacked; empty if
            all are 0.
        max_seconds: CPU seconds that an attack may take for each observation; ``None`` for no
            limit. At the limit the attack returns its best result, and sets ``stats["stopped"]``.
        posed: for each observation, the checked problem that
            :func:`flwr_leakage.attacks.problem.pose` made of it; empty if it has not been made yet.
            For a large network, making it again would cost seconds.

    Raises:
        ValueError: the seed is negative, there is not one restart number or posed problem for each
            observation, or ``max_seconds`` is not positive.
    """

    gradient_map: GradientMap
    spec: InputSpec
    observations: Sequence[Observation]
    threat: ThreatModel
    seed: int = 0
    restarts: Sequence[int] = ()
    max_seconds: float | None = None
    posed: Sequence[Problem] = ()

    def __post_init__(self) -> None:
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds must be positive or None, got {self.max_seconds}.")
        if self.seed < 0:
            raise ValueError(f"seed must be ≥ 0, got {self.seed}.")
        for name, entries in (("restarts", self.restarts), ("posed", self.posed)):
            if entries and len(entries) != len(self.observations):
                raise ValueError(
                    f"{name} must have one entry for each of {len(self.observations)} "
                    f"observations, got {len(entries)}."
                )

    def restart(self, index: int) -> int:
        """Return the number, from 0, of the start from which observation ``index`` is attacked."""
        return self.restarts[index] if self.restarts else 0

    def problem(self, index: int) -> Problem:
        """Return the problem of observation ``index``: network, gradient and schedule.

        It is limited to the knowledge that the threat model grants.

        Raises:
            ValueError: the observation is inconsistent or incomplete; see
                :func:`flwr_leakage.attacks.problem.pose`.
        """
        if self.posed:
            return self.posed[index]
        return pose(self.gradient_map, self.spec, self.observations[index], self.threat)

    def generator(self, index: int, purpose: str) -> torch.Generator:
        """Return the random stream of observation ``index`` for one purpose.

        It depends only on the seed, the observation's round and client, the purpose and the
        restart's number. It does not depend on the other observations, their order or the process.

        Args:
            index: the position of the observation in the job.
            purpose: the name of the purpose, which separates streams.
        """
        observation = self.observations[index]
        return make_generator(
            self.seed,
            server_round=observation.server_round,
            client_id=max(observation.client_id, 0),
            purpose=f"{purpose}, restart {self.restart(index)}",
        )

    def take(self, indices: Iterable[int]) -> "AttackJob":
        """Return the same job with the observations of the given indices, which may repeat."""
        chosen = list(indices)
        return replace(
            self,
            observations=[self.observations[i] for i in chosen],
            restarts=[self.restarts[i] for i in chosen] if self.restarts else (),
            posed=[self.posed[i] for i in chosen] if self.posed else (),
        )
