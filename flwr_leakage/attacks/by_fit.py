"""An attack on inputs of an unknown normalisation: each public one is tried, and the fit decides.

Where a normalisation is known, nothing is tried.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from flwr_leakage.attacks.base import Attack, ProgressCallback
from flwr_leakage.attacks.budget import Stopwatch
from flwr_leakage.attacks.evidence import Evidence
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.problem import pose
from flwr_leakage.conventions import possible_specs, read_normalization
from flwr_leakage.records import InputSpec, Reconstruction

STANDARD = {
    "mean": (0.5,), "std": (0.25,), "box": False,
}  # fmt: skip
TRIED = "normalisations"
"""Key in the stats of an answer: the number of normalisations that were tried."""


def by_fit(
    attack: Attack, job: AttackJob, progress: ProgressCallback | None = None
) -> list[Reconstruction]:
    """Return the answers of an attack under the normalisation of each target that fits best.

    If ``job.spec`` is known, these are the attack's answers. Otherwise the attack is run without a
    box first, and then under one public normalisation after another, until the inputs that it finds
    show the normalisation themselves (:func:`flwr_leakage.conventions.read_normalization`). If no
    inputs do, the best is the one whose answer has the least energy
    (:class:`flwr_leakage.attacks.evidence.Evidence`), as a density of network inputs: −2 log of the
    posterior, with −2 Σ log σ for the scale of the prior, where σ is the deviation of each input's
    channel.

    The normalisation is ``spec`` of each answer. ``job.max_seconds`` is for all of them together:
    each may take an equal share of what is left.

    Args:
        attack: any attack.
        job: its knowledge.
        progress: a callback that is called from time to time.
    """
    specs = possible_specs(job.spec)
    if len(specs) == 1:
        return attack(job, progress)
    return [_one(attack, job.take([i]), specs, progress) for i in range(len(job.observations))]


def _one(
    attack: Attack, job: AttackJob, specs: Sequence[InputSpec], progress: ProgressCallback | None
) -> Reconstruction:
    """Return the answer for a job of one target."""
    watch = Stopwatch()
    best, least, answer = specs[0], math.inf, None
    # Most normalisations give inputs of about mean 0 and deviation 1.
    for tried, spec in enumerate([replace(specs[0], **STANDARD), *specs]):
        seconds = job.max_seconds
        if seconds is not None:
            seconds = (seconds - watch.seconds) / (1 + len(specs) - tried)
            if seconds <= 0:
                break
        one = replace(job, spec=spec, max_seconds=seconds)
        (found,) = attack(one, progress)
        answer = answer or found
        if found.batch is None:
            continue
        shown = read_normalization(found.batch.inputs, found.spec or specs[0], 0.0)
        if shown.spec is not None and shown.claim in ("confirmed", "read off"):
            return _marked(found, shown.spec, tried + 1)
        energy = _energy(one, found) if spec.box else math.inf
        if energy < least:
            best, least, answer = spec, energy, found
    assert answer is not None  # a limit is positive
    return answer if answer.batch is None else _marked(answer, best, tried + 1)


def _marked(found: Reconstruction, spec: InputSpec, tried: int) -> Reconstruction:
    return replace(found, spec=replace(spec, known=True), stats={**found.stats, TRIED: tried})


def _energy(job: AttackJob, found: Reconstruction) -> float:
    """Return −2 log of the posterior of the network's inputs, up to a constant of the target."""
    assert found.batch is not None
    problem = pose(job.gradient_map, job.spec, job.observations[0], job.threat)
    energy = Evidence.of(problem, 0.0).judge(found.batch).energy
    _, height, width = job.spec.shape
    scale = sum(math.log(std) for std in job.spec.std) * height * width
    return energy - 2 * len(found.batch.targets) * scale
