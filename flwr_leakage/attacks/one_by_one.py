"""The loop of attacks that solve one target after another."""

from abc import ABC, abstractmethod
from dataclasses import replace
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
