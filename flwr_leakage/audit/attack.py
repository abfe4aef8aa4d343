"""One call of the attack on a round's targets, with its cost; a failure is an answer too."""

import time
from dataclasses import dataclass

from flwr_leakage.attacks.base import Attack, ProgressCallback, failure
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.records import Reconstruction


@dataclass(frozen=True)
class Attempt:
    """What an attack answered, and what it took.

    Attributes:
        answers: one for each target, in their order.
        wall_seconds: elapsed time for all targets together.
        cpu_seconds: CPU time of this process for all targets together.
        error: why the attack failed as a whole, or empty.
    """

    answers: list[Reconstruction]
    wall_seconds: float
    cpu_seconds: float
    error: str = ""


def attempt(attack: Attack, job: AttackJob, progress: ProgressCallback | None = None) -> Attempt:
    """Attack all observations together. Whatever the attack raises becomes the answer."""
    wall, cpu = time.monotonic(), time.process_time()
    error = ""
    try:
        answers = attack(job, progress)
        if len(answers) != len(job.observations):
            raise ValueError(
                f"an attack must give one answer for each of {len(job.observations)} targets, got "
                f"{len(answers)}."
            )
    except Exception as raised:  # an attack that fails must not end the training
        error = f"{type(raised).__name__}: {raised}"
        answers = [failure(error) for _ in job.observations]
    return Attempt(answers, time.monotonic() - wall, time.process_time() - cpu, error)
