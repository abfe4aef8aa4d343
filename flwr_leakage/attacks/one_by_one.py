"""The loop of attacks that solve one target after another."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from flwr_leakage.attacks.base import AttackProgress, ProgressCallback, failure
from flwr_leakage.attacks.problem import Problem, pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import InputSpec, Observation, Reconstruction, ThreatModel


class OneByOne(ABC):
    """An attack whose :meth:`solve` takes one problem, in float64.

    Every target has a random stream of its own, so that its result does not depend on the others.

    Attributes:
        purpose: names the streams.
    """

    purpose: ClassVar[str]

    def __call__(
        self,
        gradient_map: GradientMap,
        spec: InputSpec,
        observations: Sequence[Observation],
        threat: ThreatModel,
        generator: torch.Generator,
        progress: ProgressCallback | None = None,
    ) -> list[Reconstruction]:
        """Attack all observations; see :class:`flwr_leakage.attacks.base.Attack`."""
        seed = int(torch.randint(2**31, (), generator=generator))
        results = []
        for index, observation in enumerate(observations):
            stream = make_generator(
                seed,
                server_round=observation.server_round,
                client_id=max(observation.client_id, 0),
                purpose=self.purpose,
            )
            try:
                problem = pose(gradient_map, spec, observation, threat).to(torch.float64)
                results.append(self.solve(problem, stream))
            except (ValueError, RuntimeError) as error:
                results.append(failure(error))
            if progress is not None:
                objective = results[-1].objective
                progress(AttackProgress(index + 1, len(observations), 1, 1, objective))
        return results

    @abstractmethod
    def solve(self, problem: Problem, generator: torch.Generator) -> Reconstruction:
        """Attack one problem.

        Raises:
            ValueError: the attack does not fit it.
        """
