"""An attack on inputs of an unknown normalisation: each public one is tried, and the fit decides.

Where a normalisation is known, nothing is tried.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flwr_leakage.attacks.base import Attack, ProgressCallback
from flwr_leakage.attacks.budget import Stopwatch
from flwr_leakage.attacks.evidence import Evidence
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.problem import pose
from flwr_leakage.conventions import possible_specs, read_normalization
from flwr_leakage.records import InputSpec, Reconstruction

STANDARD: dict[str, Any] = {"mean": (0.5,), "std": (0.25,), "box": False}
"""Inputs of mean 0 and deviation 1 in no box."""

LEAST = 0.05
"""Share of the time that all tries left may take together, however long the others took."""

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
    each may take an equal share of what is left of a half. If the time ended the best one, the
    attack is run once more under its normalisation, for the rest.

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
    watch, limit = Stopwatch(), job.max_seconds
    best, least, answer = specs[0], math.inf, None
    # Most normalisations give inputs of about mean 0 and deviation 1.
    for tried, spec in enumerate([replace(specs[0], **STANDARD), *specs]):
        seconds = None
        if limit is not None:
            seconds = max(limit / 2 - watch.seconds, LEAST * limit) / (1 + len(specs) - tried)
        one = replace(job, spec=spec, max_seconds=seconds)
        (found,) = attack(one, progress)
        answer = answer or found
        if found.batch is None:
            continue
        if (shown := _shown(found, specs[0])) is not None:
            return _marked(found, shown, tried + 1)
        energy = _energy(one, found) if spec.box else math.inf
        if energy < least:
            best, least, answer = spec, energy, found
    assert answer is not None
    if answer.batch is None:
        return answer
    left = math.inf if limit is None else limit - watch.seconds
    if "stopped" in answer.stats and left > 0:
        one = replace(job, spec=best, max_seconds=left if left < math.inf else None)
        (found,) = attack(one, progress)
        if found.batch is not None and _energy(one, found) < least:
            answer = found
    return _marked(answer, _shown(answer, best) or best, 1 + len(specs))


def _shown(found: Reconstruction, told: InputSpec) -> InputSpec | None:
    """Return the normalisation that the values of an answer show, if they show one."""
    assert found.batch is not None
    shown = read_normalization(found.batch.inputs, found.spec or told, 0.0)
    return shown.spec if shown.claim in ("confirmed", "read off") else None


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
