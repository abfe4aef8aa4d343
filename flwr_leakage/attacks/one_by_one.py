"""The loop of attacks that solve one target after another, and the check of exact ones."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from flwr_leakage.attacks.base import AttackProgress, ProgressCallback, failure, require_kind
from flwr_leakage.attacks.budget import Budget, Stopwatch
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.problem import Problem, pose
from flwr_leakage.attacks.scale import unscaled
from flwr_leakage.records import Reconstruction


class OneByOne(ABC):
    """An attack whose :meth:`solve` takes one problem, in float64.

    The stats of each result hold the CPU seconds that it took, as ``cpu_seconds``, and the factor
    by which the client scaled its update, as ``scale``, if that was told, and what it told of masks
    of dropout, as ``dropout``.

    Attributes:
        purpose: the name of the random streams of its targets.
        reads_text: whether it takes token ids, and nothing else.
    """

    purpose: ClassVar[str]
    reads_text: ClassVar[bool] = False

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Attack all observations; see :class:`flwr_leakage.attacks.base.Attack`."""
        results = []
        for index, observation in enumerate(job.observations):
            watch = Stopwatch()
            stream = job.generator(index, self.purpose)
            budget = Budget.of(job.max_seconds)
            try:
                require_kind(self, job.spec)
                problem = pose(job.gradient_map, job.spec, observation, job.threat)
                problem = unscaled(problem).to(torch.float64)
                found = self.solve(problem, stream, job.restart(index), budget)
                told: dict[str, Any] = {"scale": problem.scale} if problem.scale != 1 else {}
                told |= {"dropout": problem.masks} if problem.masks else {}
                stats = {**told, **found.stats, "cpu_seconds": watch.seconds}
                results.append(replace(found, stats=stats))
            except (ValueError, RuntimeError, ArithmeticError) as error:
                results.append(failure(error))
            if progress is not None:
                objective = results[-1].objective
                progress(AttackProgress(index + 1, len(job.observations), 1, 1, objective))
        return results

    @abstractmethod
    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the reconstruction of one problem.

        Args:
            problem: the problem in float64.
            generator: the random stream of this target and restart.
            restart: number of the restart, from 0; only the first takes a start that is not random,
                such as grey.
            budget: an attack that iterates ends with its best result once this is spent.

        Raises:
            ValueError: the attack does not fit the problem.
        """


@dataclass(frozen=True)
class Applicability:
    """The statement that an attack takes a problem. The attack may still fail to solve it.

    Attributes:
        gives_images: whether the attack returns images; otherwise it returns their features.
        reason: the layer or the equations that the attack uses, in words for the user.
    """

    gives_images: bool
    reason: str


class ExactAttack(OneByOne):
    """An attack that solves equations, and that can check beforehand whether a problem has them."""

    @abstractmethod
    def check(self, problem: Problem, generator: torch.Generator) -> Applicability:
        """Return how the attack applies to a problem, without solving it.

        Args:
            problem: the network and the observed update, in float64.
            generator: draws the random probes.

        Raises:
            ValueError: the attack does not apply. The message gives the same reason as the attack.
        """


def require_single_gradient(problem: Problem, who: str) -> None:
    """Raise ``ValueError`` unless the update is the plain gradient step of one sample.

    Args:
        problem: the observed update.
        who: the name of the attack, which begins the message.
    """
    if problem.num_samples != 1 or not problem.is_single_gradient:
        decay = " with weight decay" if problem.schedule.weight_decay else ""
        raise ValueError(
            f"{who} takes 1 sample in 1 plain step, got {problem.num_samples} samples in "
            f"{problem.schedule.num_steps} steps{decay}."
        )
