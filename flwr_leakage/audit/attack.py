"""Call an attack on a round's updates, and measure its cost; a failed attack is recorded, too."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flwr_leakage.attacks.base import Attack, ProgressCallback, failure
from flwr_leakage.attacks.by_fit import by_fit
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.records import Reconstruction


@dataclass(frozen=True)
class Attempt:
    """The answers of an attack on several targets (observed updates), and its cost.

    Attributes:
        answers: the reconstruction of each target, in the targets' order.
        wall_seconds: the elapsed seconds for all targets together.
        cpu_seconds: the CPU seconds of this process for all targets together.
        error: why the attack failed on all targets; empty if it did not.
    """

    answers: list[Reconstruction]
    wall_seconds: float
    cpu_seconds: float
    error: str = ""


def attempt(attack: Attack, job: AttackJob, progress: ProgressCallback | None = None) -> Attempt:
    """Return an attack's answers on all observations of a job, with their cost.

    An error of the attack becomes an answer without samples, which holds the error. If the attack
    fails on several observations together, each is attacked by itself, as a single one may be the
    cause. Where the normalisation of the inputs is unknown, several normalisations are tried, and
    the one that fits the update best is used (:func:`flwr_leakage.attacks.by_fit.by_fit`).
    ``progress`` is told how far the attack is.
    """
    wall, cpu = time.monotonic(), time.process_time()
    error = ""
    try:
        answers = by_fit(attack, job, progress)
        if len(answers) != len(job.observations):
            raise ValueError(
                f"an attack must give one answer for each of {len(job.observations)} targets, got "
                f"{len(answers)}."
            )
    except Exception as raised:  # an attack that fails must not end the training
        error = f"{type(raised).__name__}: {raised}"
        answers = [failure(error) for _ in job.observations]
        if len(job.observations) > 1:
            alone = [attempt(attack, job.take([i]), progress) for i in range(len(answers))]
            answers = [each.answers[0] for each in alone]
            error = error if all(each.error for each in alone) else ""
    return Attempt(answers, time.monotonic() - wall, time.process_time() - cpu, error)


def describe_parts(answers: Sequence[Reconstruction]) -> str:
    """Return a line on how far each of several attacks came on a round's targets.

    The line is empty if only one attack was tried. ``answers`` are the targets' reconstructions.

    Example:
        >>> from flwr_leakage.records import Part
        >>> parts = (Part("analytic", "refused", reason="no linear layer."), Part("idlg", "found"))
        >>> describe_parts([Reconstruction(None, 0.0, {"attack": "idlg"}, parts=parts)] * 2)
        'chosen: idlg 2. analytic: refused 2 (no linear layer); idlg: found 2'
    """
    chosen = Counter(answer.stats["attack"] for answer in answers if "attack" in answer.stats)
    outcomes: dict[str, Counter[str]] = {}
    reasons: dict[str, str] = {}
    for part in (part for answer in answers for part in answer.parts):
        outcomes.setdefault(part.name, Counter())[part.outcome] += 1
        if part.outcome not in ("solved", "found") and part.reason:
            reasons.setdefault(part.name, part.reason.rstrip("."))
    if not outcomes:
        return ""
    said = "; ".join(
        f"{name}: {_counted(counts)}" + (f" ({reasons[name]})" if name in reasons else "")
        for name, counts in outcomes.items()
    )
    return f"chosen: {_counted(chosen) or 'none'}. {said}"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
