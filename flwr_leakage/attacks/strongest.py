"""Run several attacks on an update, cheap ones first, and keep the most likely result."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from flwr_leakage.attacks.base import Attack, AttackProgress, DeclaresShare, ProgressCallback
from flwr_leakage.attacks.budget import Stopwatch, stop_mark
from flwr_leakage.attacks.evidence import Candidate, Evidence, Judgement, fuse
from flwr_leakage.attacks.exact.analytic import POSTERIOR
from flwr_leakage.attacks.finish import Continuation, Denoising, Finish
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.one_by_one import NORMALISATION, PROVEN_INPUTS, in_box, unscaled
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.records import Batch, Part, PartOutcome, Reconstruction


@dataclass(frozen=True)
class Strongest:
    """A portfolio: it tries attacks one after another on each observation until one is solved.

    The batch that an attack finds is a candidate. All candidates of an observation are compared by
    the energy of :class:`flwr_leakage.attacks.evidence.Evidence`, −2 log posterior up to a
    constant, whatever objective the attack itself used. The distance of gradients alone would
    prefer a candidate that fits the noise.

    An observation is *solved*, and no further attack is run on it, in four cases: a candidate's
    gradient meets the observed one within ``tolerance``; it explains a noised update to that noise;
    an attack has proven the network's inputs of all samples; or an attack finds the mean of the
    posterior for a pruned update, whose gradient meets all kept entries to rounding. A candidate is
    clamped to valid pixels before it is compared, unless its inputs are proven and contradict the
    assumed normalisation (:func:`flwr_leakage.attacks.one_by_one.in_box`).

    A *continuation* among ``attacks`` starts from the likely candidates of others, most likely
    first, until one solves the observation. Its answer is one more candidate. A
    :class:`flwr_leakage.attacks.finish.Finish` continues from the attacks before it, and once more
    from those after it. If an observation is solved, but its gradient is not yet met to rounding,
    the ``Finish`` continues from the best candidate. It is not run on a noised update, as it would
    fit the noise. A :class:`flwr_leakage.attacks.finish.Denoising` is run on noised updates only,
    after all attacks.

    If no attack solved an observation, the result is the weighted mean of the candidates around the
    most likely one, if there are several; see :func:`flwr_leakage.attacks.evidence.fuse`.

    ``parts`` of a result tell for each attack the outcome, the cost, and why it refused if it did.
    The objective of a result is the relative squared distance of gradients. Its stats are those of
    the best candidate. They also contain the name of its attack as ``attack``, the objective of
    that attack as ``own_objective``, its ``energy`` and ``misfit``, and ``stopped`` if the budget
    ended an attack, or left one out.

    As long as the budget is not spent, results depend on the job alone.

    Attributes:
        attacks: the attacks by name, in the order in which they are tried. Some may continue from
            the candidates of others. An attack refuses fast if it does not fit an observation.
        tolerance: relative squared distance up to which two gradients count as equal, ≥ 0. The
            rounding of sent parameters to float32 leaves 1e-12 to 1e-8.
        max_seconds: CPU seconds for each observation, > 0, or ``None`` for no limit. The job's own
            limit holds, too.
        share: share in (0, 1] of the remaining CPU seconds that an attack may take if it is not the
            last. So an attack that is slow on a large network leaves time to the others. An attack
            of the type :class:`~flwr_leakage.attacks.base.DeclaresShare` may take more near a
            solution.
        last_resort: the names of attacks that are tried only if no candidate explains half of the
            update, that is, if all have a distance above ½ or there is none. A name that is not in
            ``attacks`` changes nothing.
        batches_first: the names of attacks that work best on batches. On an update of one sample
            they come after all others that do not continue from a candidate.
        behind_batches: the names of attacks of type ``Finish`` that also continue right after each
            of ``batches_first``, on updates of several samples.
        without_features: the names of attacks that are left out once an attack has proven the
            features (a layer's inputs) of all samples of a batch, and has found images by the
            equations that these leave open. These attacks only fit the gradient, which tells less.
    """

    attacks: Mapping[str, Attack | Continuation]
    tolerance: float = 1e-7
    max_seconds: float | None = 120.0
    share: float = 0.5
    last_resort: Collection[str] = ()
    batches_first: Collection[str] = ()
    behind_batches: Collection[str] = ()
    without_features: Collection[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.attacks, Mapping) or not self.attacks:
            raise ValueError(
                f"attacks must be a mapping by name with at least one attack, got {self.attacks}."
            )
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"max_seconds must be positive or None, got {self.max_seconds}.")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {self.share}.")

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction of the private samples for each observed update of a job."""
        limits = [each for each in (self.max_seconds, job.max_seconds) if each is not None]
        limit = min(limits, default=math.inf)
        count = len(job.observations)
        targets = [_Target.of(job, index, self.tolerance, limit) for index in range(count)]
        visits = self._visits()
        for name, counts in visits:
            attack = self.attacks[name]
            chosen = []
            for index, target in enumerate(targets):
                goes_on = isinstance(attack, Continuation) and not target.is_done
                if target.evidence is None or not counts(target.num_samples):
                    continue
                if target.is_solved and not goes_on:
                    target.leave_out(name, f"{target.winner} had solved it")
                elif target.left(limit) <= 0:
                    target.leave_out(name, target.spent(limit), stops=not target.is_solved)
                elif name in self.last_resort and target.best.objective <= 0.5:
                    target.leave_out(name, f"{target.winner} explains most of the update")
                elif name in self.without_features and target.features_of:
                    reason = f"{target.features_of} has the features of all samples, this has none"
                    target.leave_out(name, reason)
                else:
                    chosen.append(index)
            if not chosen:
                continue
            if isinstance(attack, Continuation):
                for index in chosen:
                    target = targets[index]
                    self._continue(target.alone(job, index), target, name, attack, limit)
                continue
            share = 1.0 if name == visits[-1][0] else self.share
            if isinstance(attack, DeclaresShare):
                attack, share = attack.with_share(share), 1.0
            lefts = {index: targets[index].left(limit) for index in chosen}
            for together in _alike(lefts):
                left = share * min(lefts[index] for index in together)
                posed = [problem for i in together if (problem := targets[i].problem) is not None]
                part = replace(job.take(together), max_seconds=_or_none(left), posed=posed)
                done = sum(each.is_over(limit) for each in targets)
                watch = Stopwatch()
                found = _attempt(attack, part, _within(progress, name, done, len(targets)))
                shares = _seconds(found, watch.seconds)
                for index, result, seconds in zip(together, found, shares, strict=True):
                    targets[index].take(name, result, seconds)
        for target in targets:
            target.fuse()
        if progress is not None:
            known = [t.best.objective for t in targets if math.isfinite(t.best.objective)]
            mean = sum(known) / len(known) if known else math.nan
            progress(AttackProgress(len(targets), len(targets), 1, 1, mean))
        return [target.result() for target in targets]

    def _visits(self) -> list[tuple[str, Callable[[int], bool]]]:
        """Return the attacks in the order in which they run.

        Each entry is the name of an attack, and a function from the number of samples of an update
        to whether the attack runs on the update at this place in the order. A name may occur
        several times, as the place depends on the number of samples.
        """
        later = [name for name in self.attacks if name in self.batches_first]
        fresh = [n for n, each in self.attacks.items() if not isinstance(each, Continuation)]
        last = [name for name, each in self.attacks.items() if isinstance(each, Denoising)]
        visits: list[tuple[str, Callable[[int], bool]]] = []
        for name in self.attacks:
            if name not in last:
                visits.append((name, _several if name in later else _any))
            if name in later:
                visits += [(each, _several) for each in self.attacks if each in self.behind_batches]
            if fresh and name == fresh[-1]:
                visits += [(each, _one) for each in later]
                before = [seen for seen, _ in visits]
                visits += [(each, _any) for each in before if each not in fresh]
        return visits + [(each, _any) for each in last]

    def _continue(
        self, job: AttackJob, target: "_Target", name: str, attack: Continuation, limit: float
    ) -> None:
        """Run an attack that continues from the likely candidates of other attacks.

        The attack is a :class:`Finish` or a :class:`Denoising`. It is run until the observation is
        solved, until it refuses the observation, or until no time is left. The job has this
        observation alone, whose state ``target`` is updated. ``limit`` is the CPU seconds for the
        observation in total.
        """
        assert target.evidence is not None
        if job.spec.is_text:
            return  # no attack continues from token ids
        is_denoising = isinstance(attack, Denoising)
        if target.evidence.is_noised != is_denoising:
            reason = "it would fit the noise" if target.evidence.is_noised else "there is no noise"
            target.leave_out(name, reason)
            return
        for origin, candidate in target.likely()[:MOST]:
            if name in target.refused or (name, candidate.name) in target.ended:
                continue
            target.ended |= {(name, candidate.name), (name, f"{origin} + {name}")}
            left = target.left(limit)
            if left <= 0:
                return
            if isinstance(attack, Finish) and isinstance(attack.attack, DeclaresShare):
                attack = replace(attack, attack=attack.attack.with_share(self.share))
            else:
                left *= self.share
            watch = Stopwatch()
            part = replace(job, max_seconds=_or_none(left))
            start = partial(_started, attack, candidate.batch, target.evidence)
            (found,) = _attempt(start, part, None)
            target.take(f"{origin} + {name}", found, watch.seconds, is_denoised=is_denoising)
            if found.batch is None:
                # An attack that refuses an observation would refuse it from every candidate.
                target.refused.add(name)
            if found.batch is None or target.is_solved:
                return


@dataclass
class _Target:
    """The state of one observation (target) between two attacks of a portfolio.

    ``best`` is the most likely result so far, with its ``energy``, −2 log posterior. ``evidence``
    judges results; it is ``None`` if the observation cannot be attacked. A solved target needs no
    further attack. A target that is done also needs no continuation from a candidate: its samples
    are proven, or only rounding is left of the update.
    """

    evidence: Evidence | None
    best: Reconstruction
    problem: Problem | None = None
    energy: float = math.inf
    seconds: float = 0.0
    posing: float = 0.0
    judging: float = 0.0
    is_solved: bool = False
    is_done: bool = False
    stopped: bool = False
    parts: list[Part] = field(default_factory=list)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    features_of: str = ""
    ended: set[tuple[str, str]] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    answers: dict[str, Reconstruction] = field(default_factory=dict)

    @classmethod
    def of(cls, job: AttackJob, index: int, tolerance: float, limit: float) -> "_Target":
        """Return the state of an observation before the first attack.

        The observation is checked and turned into a problem once for all attacks. If this fails, or
        takes longer than ``limit`` CPU seconds, those for the observation in total, the state has
        no evidence, and no attack runs. ``tolerance`` is the relative squared distance up to which
        gradients count as equal.
        """
        watch = Stopwatch()
        try:
            problem = unscaled(job.problem(index))
            if watch.seconds >= limit:
                text = (
                    f"posing the update took {watch.seconds:.2g} CPU s of a budget of {limit:g} s"
                )
                stopped = Reconstruction(None, math.nan, stop_mark(True), error=text)
                return cls(None, stopped, seconds=watch.seconds, stopped=True)
            problem = problem.to(torch.float64)
            evidence = Evidence.of(problem, tolerance)
            judging = Stopwatch()
            evidence.gradient(_grey(problem))
        except (ValueError, RuntimeError) as error:
            return cls(None, Reconstruction(None, math.nan, error=str(error)))
        none = Reconstruction(None, math.nan, error="not attacked")
        target = cls(evidence, none, problem, seconds=watch.seconds, judging=judging.seconds)
        if target.left(limit) > 0:
            _ = evidence.told  # these equations judge every answer, and their time is budgeted, too
            target.seconds = target.posing = watch.seconds
        return target

    def alone(self, job: AttackJob, index: int) -> AttackJob:
        """Return the part of a job that holds one observation, given its ``index`` in the job."""
        assert self.problem is not None
        return replace(job.take([index]), posed=[self.problem])

    def left(self, limit: float) -> float:
        """Return the CPU seconds that the next attack may take, or 0 if they are too few to begin.

        They are the rest of ``limit``, the seconds for the observation in total. The time that
        comparing the attack's result takes is kept back.
        """
        left = limit - self.seconds - self.judging
        return left if left > self.least else 0.0

    def is_over(self, limit: float) -> bool:
        """Return whether only attacks that continue from another's batch may still begin.

        ``limit`` is the CPU seconds for the observation in total.
        """
        return self.evidence is None or self.is_solved or self.left(limit) <= 0

    @property
    def least(self) -> float:
        """An estimate of the CPU seconds that an attack takes until its first step has ended.

        An attack begins with the work of turning the observation into a problem. A step takes about
        as long as comparing a result with the update a few times.
        """
        return self.posing + 3 * self.judging

    def spent(self, limit: float) -> str:
        """Return a sentence on why there is no time for another attack.

        It names ``limit``, the CPU seconds for the observation in total.
        """
        needs = self.seconds + self.judging + self.least
        if self.seconds >= limit:
            return f"the budget of {limit:g} s was spent"
        which = "another" if any(part.seconds for part in self.parts) else "the first"
        return f"a budget of {limit:g} s was given, {which} attack needs {needs:.2g} s"

    @property
    def num_samples(self) -> int:
        return 0 if self.evidence is None else self.evidence.problem.num_samples

    @property
    def winner(self) -> str:
        return str(self.best.stats.get("attack", ""))

    def leave_out(self, name: str, reason: str, stops: bool = False) -> None:
        """Record the reason why an attack was not run, unless an earlier outcome of it is recorded.

        ``stops`` tells whether the budget is the reason.
        """
        told = (part.name == name or part.name.endswith(f" + {name}") for part in self.parts)
        if not any(told):
            self.parts.append(Part(name, "not run", reason=reason))
        self.stopped |= stops

    def take(
        self,
        name: str,
        result: Reconstruction,
        seconds: float,
        is_denoised: bool = False,
    ) -> bool:
        """Compare an attack's result with the best so far, and return whether it is now the best.

        The result, or the reason why there is none, is recorded.

        Args:
            name: the name of the attack.
            result: the attack's result.
            seconds: the CPU seconds that the attack took.
            is_denoised: whether the answer is that of a :class:`Denoising`. It may have fitted the
                noise, so that the search continues even if it explains the update. If the answer
                and the candidate that it started from both explain the update, the answer replaces
                the candidate: they differ in the prior only, and the answer's prior is the finer
                one.
        """
        assert self.evidence is not None
        self.seconds += seconds
        stopped = "stopped" in result.stats
        self.stopped |= stopped
        if result.batch is None:
            outcome: PartOutcome = "failed" if result.error.startswith(UNFORESEEN) else "refused"
            self.parts.append(Part(name, outcome, seconds=seconds, reason=result.error))
            # Findings of an attack in the stats of a result without a batch, such as tokens without
            # their order, are kept if later attacks refuse.
            if self.best.batch is None and (result.stats or not self.best.stats):
                self.best = result
            return False
        result = in_box(self.evidence.problem.spec, result)  # judge the images as they are returned
        assert result.batch is not None
        proven = _is_proven(result)
        is_known = proven or _is_known(result)
        scale = float(result.stats.get("scale", 1.0))
        if is_known and scale != self.evidence.problem.scale:  # the client's scaling is now known
            problem = self.evidence.problem.divided(scale / self.evidence.problem.scale)
            self.evidence = Evidence.of(problem, self.evidence.tolerance)
        if "features" in result.stats and "weight" in result.stats:
            told = self.evidence.told_by(result.stats["weight"], result.stats["features"])
            if told is not self.evidence:
                self._judge_by(told)
                self.features_of = name
        watch = Stopwatch()
        _ = self.evidence.told  # new evidence first computes its equations
        judging = Stopwatch()
        judged = self.evidence.judge(result.batch)
        self.judging = max(self.judging, judging.seconds)
        self.seconds += watch.seconds
        is_mean = POSTERIOR in result.stats and not self.evidence.is_noised
        is_done = is_known or (judged.misfit <= 1 and (judged.is_met or is_mean))
        solved = judged.is_met or is_done or (judged.is_explained and not is_denoised)
        outcome = "solved" if solved else "stopped" if stopped else "found"
        reason = _proof(result) if proven else str(result.stats.get("stage", ""))
        if scale != 1:
            reason += f"{', ' if reason else ''}of an update that was scaled by {scale:.3g}"
        self.parts.append(Part(name, outcome, judged.distance, judged.energy, seconds, reason))
        origin = name.partition(" + ")[0]  # a candidate and its continuation have the same errors
        rival = self.candidates.get(origin)
        is_better = rival is None or judged.energy < rival.energy
        is_best = self.best.batch is None or judged.energy < self.energy
        if is_denoised and rival and judged.is_explained and rival.judged.is_explained:
            is_better, is_best = True, is_best or self.winner == rival.name
        answer = _judged(result, name, judged)
        if is_best:
            self.energy, self.best = judged.energy, answer
        self.is_solved |= solved
        self.is_done |= is_done
        if is_better:
            self.candidates[origin] = Candidate(name, result.batch, judged)
            self.answers[origin] = answer
        return is_best

    def _judge_by(self, evidence: Evidence) -> None:
        """Judge all results so far anew by evidence that will judge later results, too.

        An example of new evidence is the equations that proven features (inputs of a layer) leave
        open.
        """
        self.evidence = evidence
        for origin, old in self.candidates.items():
            new = Candidate(old.name, old.batch, evidence.judge(old.batch))
            self.candidates[origin] = new
            self.answers[origin] = _judged(self.answers[origin], new.name, new.judged)
        if self.candidates:
            leads = min(self.candidates, key=lambda origin: self.candidates[origin].energy)
            self.best, self.energy = self.answers[leads], self.candidates[leads].energy

    def likely(self) -> list[tuple[str, Candidate]]:
        """Return the candidates whose weight in a mean is at least a tenth of the best one's.

        A candidate is a batch that an attack found. The most likely one is the first; see
        :meth:`Candidate.weight`. Each stands after the name of its attack.
        """
        evidence, found = self.evidence, sorted(self.candidates.items(), key=_by_energy)
        assert evidence is not None
        return [each for each in found if each[1].weight(self.energy, evidence) >= 0.1]

    def fuse(self) -> None:
        """Replace the best result by a weighted mean of the batches that several attacks found.

        Nothing changes if the observation is solved, or if
        :func:`flwr_leakage.attacks.evidence.fuse` finds no mean.
        """
        if self.is_solved or self.evidence is None or not math.isfinite(self.energy):
            return
        watch = Stopwatch()
        found = fuse(list(self.candidates.values()), self.evidence)
        if found is None:
            return
        seconds = watch.seconds
        self.seconds += seconds
        judged, text = found.judged, str(found)
        self.parts.append(Part(FUSED, "found", judged.distance, judged.energy, seconds, text))
        result = Reconstruction(found.batch, judged.distance, {"stage": text})
        self.best = _judged(result, FUSED, judged)

    def result(self) -> Reconstruction:
        """Return the best result, with the outcomes and the total CPU seconds of all attacks."""
        stats = {**self.best.stats, "cpu_seconds": self.seconds}
        if self.evidence is not None and self.evidence.problem.scale != 1:
            stats["scale"] = self.evidence.problem.scale
        if self.evidence is not None and self.evidence.problem.masks:
            stats["dropout"] = self.evidence.problem.masks
        stats.pop("stopped", None)
        if self.stopped:
            stats["stopped"] = "budget"
        error = self.best.error
        if self.best.batch is None and len(self.parts) > 1:
            error = _merged(self.parts)
        return replace(self.best, stats=stats, error=error, parts=tuple(self.parts))


MOST = 3
"""Largest number of candidates (batches that attacks found) from which another attack continues,
the most likely ones first. Each costs a run of the attack, and less likely ones seldom gave the
final result (no results are kept)."""

FUSED = "fusion"
"""The name of the mean of several attacks' candidates."""

UNFORESEEN = "an unforeseen "
"""The beginning of the reason why an attack has no result, if it raised an unexpected error."""


def _any(count: int) -> bool:
    return True


def _one(count: int) -> bool:
    return count == 1


def _several(count: int) -> bool:
    return count != 1


def _or_none(seconds: float) -> float | None:
    return seconds if seconds < math.inf else None


def _by_energy(item: tuple[str, Candidate]) -> float:
    return item[1].energy


def _grey(problem: Problem) -> Batch:
    """Return a batch of grey images, or of blank texts, for a problem.

    Its labels are those that the threat model grants, or else all class 0.
    """
    count, spec = problem.num_samples, problem.spec
    inputs = spec.blank(count, torch.zeros(()))
    if spec.next_token:
        return Batch(inputs, inputs)
    targets = problem.known_targets
    targets = torch.zeros(count, dtype=torch.long) if targets is None else targets
    return Batch(inputs, targets)


def _started(
    attack: Continuation,
    candidate: Batch,
    evidence: Evidence,
    job: AttackJob,
    progress: ProgressCallback | None = None,
) -> list[Reconstruction]:
    if isinstance(attack, Denoising):
        return [attack(job, candidate, evidence)]
    return [attack(job, candidate)]


def _attempt(
    attack: Attack, job: AttackJob, progress: ProgressCallback | None
) -> list[Reconstruction]:
    """Return an attack's results for a job.

    If the attack raises an error, each result has no batch, and the error's text, so that a
    portfolio can continue with other attacks.
    """
    try:
        return attack(job, progress)
    except Exception as error:  # an attack that fails must not end the portfolio
        text = f"{UNFORESEEN}{type(error).__name__}: {error}"
        return [Reconstruction(None, math.nan, error=text) for _ in job.observations]


def _judged(result: Reconstruction, name: str, judged: Judgement) -> Reconstruction:
    stats = {
        **result.stats,
        "attack": name,
        "own_objective": result.objective,
        "energy": judged.energy,
        "misfit": judged.misfit,
    }
    return replace(result, objective=judged.distance, stats=stats)


def _merged(parts: Sequence[Part]) -> str:
    """Return a text with the reasons why no attack found anything, given their outcomes.

    Each reason stands there once, after the names of the attacks that gave it.
    """
    names: dict[str, list[str]] = {}
    for part in parts:
        if part.reason:
            names.setdefault(part.reason, []).append(part.name)
    return "; ".join(f"{', '.join(who)}: {reason}" for reason, who in names.items())


def _is_proven(result: Reconstruction) -> bool:
    """Return whether a result's verdict on every sample is ``proven``, not just ``plausible``."""
    verdicts = result.stats.get("verdicts", ())
    return len(verdicts) > 0 and all(verdict == "proven" for verdict in verdicts)


def _proof(result: Reconstruction) -> str:
    """Return a text that says that all samples of a result are proven, for the user.

    It also says how the normalisation is known, on which the proof of pixels depends.
    """
    claim = result.stats.get(NORMALISATION)
    if claim == "read off":
        return f"proven. {result.stats['stage']}"
    return "proven, up to the normalisation that was told" if claim == "as told" else "proven"


def _is_known(result: Reconstruction) -> bool:
    """Return whether a result's network inputs are proven for every sample.

    Its pixels may still be unproven, as they also depend on the normalisation.
    """
    known = result.stats.get(PROVEN_INPUTS, 0) == len(result.stats.get("verdicts", ()))
    return known and PROVEN_INPUTS in result.stats


def _alike(lefts: Mapping[int, float]) -> list[list[int]]:
    """Return groups of observations that an attack takes together, by the CPU seconds left to each.

    ``lefts`` holds these seconds by the observation's index. In each group, every observation has
    at least half as much time as the one with most, so that one whose time is nearly spent does not
    cut the others short. A group lists its indices in ascending order.

    Example:
        >>> _alike({0: 60.0, 1: 58.0, 2: 5.0})
        [[0, 1], [2]]
    """
    groups: list[list[int]] = []
    for index in sorted(lefts, key=lambda index: -lefts[index]):
        if groups and lefts[index] >= lefts[groups[-1][0]] / 2:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]


def _seconds(found: list[Reconstruction], total: float) -> list[float]:
    """Return the CPU seconds of each result of one attack, which took ``total`` for all.

    They are the result's own ``stats["cpu_seconds"]``. Results without this entry share the rest of
    ``total`` equally.
    """
    stated = [result.stats.get("cpu_seconds") for result in found]
    rest = max(total - sum(each for each in stated if each is not None), 0.0)
    silent = sum(each is None for each in stated)
    return [rest / silent if each is None else float(each) for each in stated]


def _within(
    progress: ProgressCallback | None, name: str, done: int, total: int
) -> ProgressCallback | None:
    """Return a callback by which one attack of a portfolio reports its progress, or ``None``.

    It calls the portfolio's callback, unless that is ``None``, with the attack's name and the
    portfolio's numbers: ``total`` observations, of which ``done`` are solved or out of time.
    """
    if progress is None:
        return None

    def tell(p: AttackProgress) -> None:
        if math.isfinite(p.objective):  # an attack that refused has no objective
            progress(replace(p, done=done, total=total, attack=name))

    return tell
