"""Run any attack from several starts, and keep the result with the least objective."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flwr_leakage.attacks.base import Attack, AttackProgress, ProgressCallback
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.records import Reconstruction


@dataclass(frozen=True)
class Restarts:
    """Attack every target several times, and keep the result with the least objective.

    The attack gets one job that contains each observation ``count`` times in a row, with the
    numbers of the restarts. So an attack that solves many targets together also solves restarts
    together. Each restart has a random stream of its own, so that restart r of a target is the same
    for any count.

    A result's stats are those of the chosen restart, with its number as ``restart``. CPU seconds
    and gradients are summed over all restarts. Restarts share a job's ``max_seconds`` equally.
    Their objectives are compared. So the attack must minimise the same function in all restarts, as
    every attack here does.

    Attributes:
        attack: the attack of each restart.
        count: number of restarts of a target, ≥ 1.
    """

    attack: Attack
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}.")

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Return a reconstruction for each observation of a job."""
        every = range(len(job.observations))
        repeated = replace(
            job.take(i for i in every for _ in range(self.count)),
            # Restarts of restarts are numbered consecutively, so that no two share a stream.
            restarts=[job.restart(i) * self.count + n for i in every for n in range(self.count)],
            max_seconds=None if job.max_seconds is None else job.max_seconds / self.count,
        )

        def tell(p: AttackProgress) -> None:  # progress is counted in targets, not in restarts
            assert progress is not None
            progress(replace(p, done=p.done // self.count, total=p.total // self.count))

        found = self.attack(repeated, None if progress is None else tell)
        return [choose(found[i * self.count : (i + 1) * self.count]) for i in every]


def choose(candidates: Sequence[Reconstruction]) -> Reconstruction:
    """Return the candidate of least objective, or the first if all failed, with all costs."""

    def objective(number: int) -> float:
        value = candidates[number].objective
        failed = candidates[number].batch is None or math.isnan(value)
        return math.inf if failed else value

    best = min(range(len(candidates)), key=objective)
    costs: dict[str, float] = {
        name: sum(each.stats.get(name, 0) for each in candidates)
        for name in ("cpu_seconds", "gradients")
        if name in candidates[best].stats
    }
    return replace(candidates[best], stats={**candidates[best].stats, **costs, "restart": best})
