"""Run any attack from several starts, and keep the result with the least objective."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flwr_leakage.attacks.base import Attack, AttackProgress, ProgressCallback
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.records import Reconstruction


@dataclass(frozen=True)
class Restarts:
    """An attack that runs another one several times, and keeps the result of least objective.

    The other attack gets one job that contains each observation ``count`` times in a row, numbered
    by restart from 0. So an attack that solves many observations together also solves restarts
    together. Each restart has a random stream of its own, which does not depend on ``count``.

    A result's stats are those of the chosen restart, with its number as ``restart``. The stats
    ``cpu_seconds`` and ``gradients`` (the number of gradients that were computed) are summed over
    all restarts. Restarts share a job's ``max_seconds`` equally. As their objectives are compared,
    the attack must minimise the same function in all restarts, as every attack here does.

    Attributes:
        attack: the attack that is run several times.
        count: number of runs for each observation, ≥ 1.
    """

    attack: Attack
    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, got {self.count}.")

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction of the private samples for each observed update of a job."""
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
    """Return the reconstruction of least objective among the restarts of one observation.

    If all restarts failed, it is the first. Its stats ``cpu_seconds`` and ``gradients`` are the
    sums over all restarts, and ``restart`` is its index among ``candidates``.
    """

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
