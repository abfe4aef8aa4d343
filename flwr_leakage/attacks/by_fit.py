"""Attack an update if the normalisation (mean and deviation) of the client's inputs is unknown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flwr_leakage.attacks.base import Attack, ProgressCallback
from flwr_leakage.attacks.budget import Stopwatch
from flwr_leakage.attacks.evidence import Evidence
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.one_by_one import NORMALISATION, PROVEN_INPUTS, doubted, remarked
from flwr_leakage.attacks.problem import pose
from flwr_leakage.attacks.strongest import Strongest
from flwr_leakage.conventions import Claim, possible_specs, read_normalization
from flwr_leakage.records import InputSpec, Reconstruction

BEYOND_BOX = 0.01
"""Largest distance from [0, 1] at which a pixel still counts as valid under a normalisation. The
value is the root mean square error of an image at 40 dB. A larger one would rule out fewer
normalisations."""

LEAST_TIME = 0.05
"""Least share of the allowed CPU seconds that all remaining tries of normalisations may take
together, however long the earlier tries took. The value was chosen on development draws; no results
are kept."""

GUESSED = (
    "The normalisation is not known and not shown by the inputs. The pixels are those of the one "
    "that fits best, and are not proven."
)
"""The sentence that tells the user that a guessed normalisation leaves pixels unproven, even if the
network's inputs are proven."""


def by_fit(
    attack: Attack, job: AttackJob, progress: ProgressCallback | None = None
) -> list[Reconstruction]:
    """Return an attack's reconstruction for each observation, under the best normalisation.

    If the normalisation of ``job.spec`` is known, the attack simply runs. Otherwise it first runs
    without bounds on the inputs. There are three cases:

    1. The values found are those of pixels, such as k / 255, under exactly one normalisation. This
       one is right (:func:`flwr_leakage.conventions.read_normalization`).
    2. The values found do not show the normalisation, but their gradient meets the observed one.
       All normalisations that put these values into the range of pixels are possible. The narrower
       that range is in network inputs, the likelier are values that fill it.
    3. Otherwise the attack runs under each public normalisation. These are compared by the energy
       of their results (:class:`flwr_leakage.attacks.evidence.Evidence`).

    In cases 2 and 3 the normalisation is chosen that minimises −2 log of a density of network
    inputs, which contains −2 Σ log σ with the deviation σ of each input's channel. The density's
    logarithm is summed over all observations of these cases, which share one normalisation.

    Each result's ``spec`` is the normalisation, and ``stats["normalisation"]`` is ``read off`` in
    case 1, else ``by fit``. All runs share half of ``job.max_seconds``, or of the limit of a
    :class:`Strongest` if that is smaller. If its share ended the best run, the attack runs once
    more under that run's normalisation, for the rest of the time.
    """
    specs = possible_specs(job.spec)
    if len(specs) == 1:
        return attack(job, progress)
    if isinstance(attack, Strongest) and attack.max_seconds is not None:
        job = replace(job, max_seconds=min(attack.max_seconds, job.max_seconds or math.inf))
    jobs = [job.take([i]) for i in range(len(job.observations))]
    tries = [_Tries.of(attack, one, specs, _of_all(progress, 0, len(jobs))) for one in jobs]
    undecided = [each.energies for each in tries if each.shown is None and each.energies]

    def total(spec: InputSpec) -> float:
        return sum(energies.get(spec, math.inf) for energies in undecided)

    answers = []
    for done, (one, each) in enumerate(zip(jobs, tries, strict=True)):
        if each.shown is not None:
            answers.append(_marked(each.first, each.shown, "read off"))
        elif not each.energies:
            answers.append(each.first)
        else:
            ranks = {spec: (total(spec), own) for spec, own in each.energies.items()}
            best = min(ranks, key=ranks.__getitem__)
            tell = _of_all(progress, done, len(jobs))
            answers.append(_marked(each.end(attack, one, best, tell), best, "by fit"))
    return answers


def _of_all(progress: ProgressCallback | None, done: int, total: int) -> ProgressCallback | None:
    """Return a callback that tells ``progress`` how many of all observations are finished.

    A run of the attack calls the returned function, and knows its own observation alone.
    """
    if progress is None:
        return None
    return lambda now: progress(replace(now, done=done, total=total))


@dataclass(frozen=True)
class _Tries:
    """The results of attacks on one observation under the normalisations that were tried.

    Attributes:
        first: the result whose values show the normalisation. If there is none, it is the result
            without bounds on the inputs, or else the first one that has a batch.
        shown: the normalisation that the values of ``first`` show, or ``None``.
        energies: for each possible normalisation, −2 log density of the result under it, up to a
            constant. The least one belongs to the most likely normalisation.
        answers: the result under each normalisation that was tried. Under all others, the result is
            ``first``.
        seconds: CPU seconds that all runs took.
    """

    first: Reconstruction
    shown: InputSpec | None
    energies: dict[InputSpec, float]
    answers: dict[InputSpec, Reconstruction]
    seconds: float

    @classmethod
    def of(
        cls,
        attack: Attack,
        job: AttackJob,
        specs: Sequence[InputSpec],
        progress: ProgressCallback | None,
    ) -> "_Tries":
        """Return the results of an attack on one observation under each normalisation tried.

        ``specs`` holds the possible normalisations, as specs of the same inputs.
        """
        watch, limit = Stopwatch(), job.max_seconds
        energies: dict[InputSpec, float] = {}
        answers: dict[InputSpec, Reconstruction] = {}
        # The first run needs some normalisation, and most give inputs of about mean 0 and deviation
        # 1, as this one does.
        standard = replace(specs[0], mean=(0.5,), std=(0.25,), box=False)
        first: Reconstruction | None = None
        for tried, spec in enumerate([standard, *specs]):
            seconds = None
            if limit is not None:
                seconds = max(limit / 2 - watch.seconds, LEAST_TIME * limit) / (
                    1 + len(specs) - tried
                )
            one = replace(job, spec=spec, max_seconds=seconds)
            (found,) = attack(one, progress)
            if first is None or first.batch is None:
                first = found
            if found.batch is None:
                continue
            inputs = found.batch.inputs
            shown = read_normalization(inputs, found.spec or specs[0], 0.0)
            if shown.claim in ("confirmed", "read off"):
                return cls(found, shown.spec, {}, {}, watch.seconds)
            energy, distance = _judged(one, found)
            if spec.box:
                energies[spec], answers[spec] = energy - _scale(spec, len(inputs)), found
            elif distance <= Strongest.tolerance:
                held = [each for each in specs if _outside(found, each) <= BEYOND_BOX]
                narrow = {each: -_scale(each, len(inputs)) for each in held}
                return cls(found, None, narrow, {}, watch.seconds)
        assert first is not None
        return cls(first, None, energies, answers, watch.seconds)

    def end(
        self, attack: Attack, job: AttackJob, spec: InputSpec, progress: ProgressCallback | None
    ) -> Reconstruction:
        """Return the result under a chosen normalisation.

        If time ran out in the first run under this normalisation and some time is left, the attack
        runs once more. The more likely of both results is returned.
        """
        answer = self.answers.get(spec, self.first)
        left = math.inf if job.max_seconds is None else job.max_seconds - self.seconds
        if spec not in self.answers or "stopped" not in answer.stats or left <= 0:
            return answer
        one = replace(job, spec=spec, max_seconds=left if left < math.inf else None)
        (found,) = attack(one, progress)
        if found.batch is None or _judged(one, found) > _judged(one, answer):
            return answer
        return found


def _marked(found: Reconstruction, spec: InputSpec, claim: Claim) -> Reconstruction:
    """Return a result under a normalisation, whose source (``claim``) is written to its stats.

    ``spec`` is the normalisation, and ``claim`` is ``read off`` the pixels or guessed ``by fit``.
    If it is guessed, proven samples become ``plausible``, as their network inputs are proven, but
    not their pixels.
    """
    verdicts = found.stats.get("verdicts", ())
    stats = {**found.stats, NORMALISATION: claim}
    if "proven" in verdicts:
        stats[PROVEN_INPUTS] = verdicts.count("proven")
    if claim == "by fit" and stats.get(PROVEN_INPUTS):
        stats = remarked(doubted(stats), GUESSED)
    return replace(found, spec=spec, stats=stats)


def _judged(job: AttackJob, found: Reconstruction) -> tuple[float, float]:
    """Return the energy of a result's samples, and the distance of their gradient.

    The energy is −2 log posterior up to a constant. The distance is ``‖g − g*‖² / ‖g*‖²``, with the
    samples' gradient g and the observed g*.
    """
    assert found.batch is not None
    problem = pose(job.gradient_map, job.spec, job.observations[0], job.threat)
    judged = Evidence.of(problem, Strongest.tolerance).judge(found.batch)
    return judged.energy, judged.distance


def _outside(found: Reconstruction, spec: InputSpec) -> float:
    """Return the largest distance of a result's pixels from [0, 1].

    The pixels follow from its network inputs by the normalisation of ``spec``.
    """
    assert found.batch is not None
    pixels = spec.denormalize(found.batch.inputs)
    return float((pixels - pixels.clamp(0, 1)).abs().max())


def _scale(spec: InputSpec, count: int) -> float:
    """Return 2 Σ log σ over all input values of ``count`` samples.

    σ is the deviation by which the normalisation divides the value's channel.
    """
    _, height, width = spec.shape
    return 2 * count * height * width * sum(math.log(std) for std in spec.std)
