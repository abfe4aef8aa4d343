"""Run several attacks on an update, cheap ones first, and keep the most likely result."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from flwr_leakage.attacks.base import Attack, AttackProgress, DeclaresShare, ProgressCallback
from flwr_leakage.attacks.budget import Budget, Stopwatch, stop_mark
from flwr_leakage.attacks.evidence import Candidate, Evidence, Judgement, fuse
from flwr_leakage.attacks.exact.analytic import POSTERIOR
from flwr_leakage.attacks.finish import Denoising, Finish
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.one_by_one import NORMALISATION, PROVEN_INPUTS, in_box, unscaled
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.records import Batch, Part, PartOutcome, Reconstruction


@dataclass(frozen=True)
class Strongest:
    """A portfolio: it tries attacks one after another on each observation until one is solved.

    The batch that an attack finds is a candidate. All candidates of an observation are compared by
    the energy of :class:`flwr_leakage.attacks.evidence.Evidence`, misfit plus a prior of images,
    whatever objective the attack itself used. The distance of gradients alone would prefer a
    candidate that fits the noise.

    An observation is *solved*, and no further attack is run on it, in four cases: a candidate's
    gradient meets the observed one within ``tolerance``; it explains a noised update to that noise;
    an attack has proven the network's inputs of all samples; or an attack finds the mean of the
    posterior for a pruned update, whose gradient meets all kept entries to rounding. A candidate is
    clamped to valid pixels before it is compared, unless its inputs are proven and contradict the
    assumed normalisation (:func:`flwr_leakage.attacks.one_by_one.in_box`).

    ``finish`` is an optimizer that continues from each candidate that is not far less likely than
    the best, so that candidates are compared at their minima, unless samples are proven or only
    rounding is left. Its result is one more candidate. For a noised update, ``denoising`` continues
    in its place: at once from a candidate that explains the update to its noise, and from others
    after all attacks.

    An attack among ``attacks`` may itself be a :class:`flwr_leakage.attacks.finish.Finish`, which
    starts from candidates of others. It continues from the likely candidates of the attacks before
    it, most likely first, until the observation is solved, and once more from those of the attacks
    after it. So it may be too slow to continue from every candidate. If an observation is solved,
    but its gradient is not yet met to rounding, it continues from the best candidate. It is not run
    on a noised update, as it would fit the noise.

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
            of ``batches_first``, on updates of several samples. There ``finish`` comes after them,
            and only if they do not solve the observation, as they gain more in a second.
        without_features: the names of attacks that are left out once an attack has proven the
            features (a layer's inputs) of all samples of a batch, and has fitted images to the
            equations that remain. The attacks left out only fit the gradient, which tells less.
        finish: the attack that continues from a candidate, or ``None``. It may take half as much
            time as an attack.
        denoising: the attack that continues from a candidate under noise, or ``None``. It may also
            take half as much time as an attack.
    """

    attacks: Mapping[str, Attack | Finish]
    tolerance: float = 1e-7
    max_seconds: float | None = 120.0
    share: float = 0.5
    last_resort: Collection[str] = ()
    batches_first: Collection[str] = ()
    behind_batches: Collection[str] = ()
    without_features: Collection[str] = ()
    finish: Finish | None = None
    denoising: Denoising | None = None

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
                goes_on = isinstance(attack, Finish) and not target.is_done
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
            if isinstance(attack, Finish):
                for index in chosen:
                    target = targets[index]
                    alone = target.alone(job, index)
                    self._end(alone, target, name, attack, limit)
                    if target.followed and not target.is_solved:
                        self._go_on(alone, target, target.followed, limit)
                    target.followed = ""
                continue
            left = min(targets[index].left(limit) for index in chosen)
            share = 1.0 if name == visits[-1][0] else self.share
            if isinstance(attack, DeclaresShare):
                attack = attack.with_share(share)
            else:
                left *= share
            posed = [problem for i in chosen if (problem := targets[i].problem) is not None]
            part = replace(job.take(chosen), max_seconds=_or_none(left), posed=posed)
            done = len(targets) - len(chosen)
            watch = Stopwatch()
            found = _attempt(attack, part, _within(progress, name, done, len(targets)))
            shares = _seconds(found, watch.seconds)
            for index, result, seconds in zip(chosen, found, shares, strict=True):
                targets[index].take(name, result, seconds)
                if targets[index].waits(name):
                    targets[index].waiting.append(name)
                elif self._is_followed(name, targets[index].num_samples):
                    targets[index].followed = name
                else:
                    self._go_on(targets[index].alone(job, index), targets[index], name, limit)
        for index, target in enumerate(targets):
            target.waiting.sort(key=lambda name: target.candidates[name].energy)
            for name in [] if target.is_solved else target.waiting[:MOST]:
                self._go_on(target.alone(job, index), target, name, limit)
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
        fresh = [name for name, each in self.attacks.items() if not isinstance(each, Finish)]
        visits: list[tuple[str, Callable[[int], bool]]] = []
        for name in self.attacks:
            visits.append((name, _several if name in later else _any))
            if name in later:
                visits += [(each, _several) for each in self.attacks if each in self.behind_batches]
            if fresh and name == fresh[-1]:
                visits += [(each, _one) for each in later]
                before = [seen for seen, _ in visits]
                visits += [(each, _any) for each in before if each not in fresh]
        return visits

    def _is_followed(self, name: str, count: int) -> bool:
        """Return whether an attack's result is directly continued by other attacks.

        These are the attacks that the setting ``behind_batches`` names. They follow those of
        ``batches_first`` on several samples.

        Args:
            name: the name of the attack.
            count: number of samples of the update.
        """
        return bool(self.behind_batches) and name in self.batches_first and _several(count)

    def _go_on(
        self, job: AttackJob, target: "_Target", name: str, limit: float, most: int = 4
    ) -> None:
        """Run ``finish`` or ``denoising`` from an attack's candidate, if it may become the best.

        If the result's gradient meets the observed one, this is repeated as long as the squared
        distance at least halves.

        Args:
            job: the job of this observation alone.
            target: the state of the observation, which is updated.
            name: the name of the attack.
            limit: CPU seconds for the observation in total.
            most: largest number of repetitions.
        """
        assert target.evidence is not None
        if job.spec.is_text:
            return  # no attack continues from token ids
        attack: GoOn | None = None if self.finish is None else partial(_finish, self.finish)
        suffix = FINISHED
        if target.evidence.is_noised and self.denoising is not None:
            attack, suffix = partial(_denoise, self.denoising, target.evidence), DENOISED
        for _ in range(most):
            left = target.left(limit) * self.share / 2  # a later one may be better
            if attack is None or target.is_done or left <= 0 or not target.may_lead(name):
                return
            before = target.candidates[name]
            watch = Stopwatch()
            part = replace(job, max_seconds=_or_none(left))
            (found,) = _attempt(partial(attack, before.batch), part, None)
            seconds = watch.seconds
            denoised = suffix == DENOISED
            target.take(name + suffix, found, seconds, fits_noise=True, replaces=denoised)
            after = target.candidates[name].judged
            if not (after.is_met and after.distance < before.judged.distance / 2):
                return

    def _end(
        self, job: AttackJob, target: "_Target", name: str, attack: Finish, limit: float
    ) -> None:
        """Run an attack of type ``Finish`` from the likely candidates of other attacks.

        It ends when the observation is solved, when the attack refuses it, or when no time is left.

        Args:
            job: the job of this observation alone.
            target: the state of the observation, which is updated.
            name: the name of the attack.
            attack: the attack that continues.
            limit: CPU seconds for the observation in total.
        """
        assert target.evidence is not None
        if target.evidence.is_noised:
            target.leave_out(name, "it would fit the noise")
            return
        for origin, candidate in target.likely()[:MOST]:
            if name in target.refused or (name, candidate.name) in target.ended:
                continue
            target.ended |= {(name, candidate.name), (name, f"{origin} + {name}")}
            left, inner = target.left(limit), attack.attack
            if left <= 0:
                return
            if isinstance(inner, DeclaresShare):
                attack = replace(attack, attack=inner.with_share(self.share))
            else:
                left *= self.share
            watch = Stopwatch()
            part = replace(job, max_seconds=_or_none(left))
            (found,) = _attempt(partial(_finish, attack, candidate.batch), part, None)
            target.take(f"{origin} + {name}", found, watch.seconds)
            if found.batch is None:
                # An attack that refuses a target would refuse it from every start.
                target.refused.add(name)
            if found.batch is None or target.is_solved:
                return


@dataclass
class _Target:
    """The state of one observation (target) between two attacks of a portfolio.

    A solved target needs no further attack. A target that is done also needs no continuation from a
    candidate: its samples are proven, or only rounding is left of the update.
    """

    evidence: Evidence | None
    best: Reconstruction
    problem: Problem | None = None
    energy: float = math.inf
    plain: float = math.inf  # least energy of the attacks' results before they were continued
    seconds: float = 0.0
    posing: float = 0.0
    judging: float = 0.0
    is_solved: bool = False
    is_done: bool = False
    stopped: bool = False
    parts: list[Part] = field(default_factory=list)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    features_of: str = ""
    waiting: list[str] = field(default_factory=list)
    followed: str = ""
    ended: set[tuple[str, str]] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    answers: dict[str, Reconstruction] = field(default_factory=dict)

    @classmethod
    def of(cls, job: AttackJob, index: int, tolerance: float, limit: float) -> "_Target":
        """Return the state of an observation before the first attack.

        The observation is checked and made a problem once for all attacks. If this fails, or takes
        longer than the limit, the state has no evidence, and no attack runs.

        Args:
            job: the job.
            index: the index of the observation.
            tolerance: relative squared distance up to which gradients count as equal.
            limit: CPU seconds for the observation in total.
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
            _ = evidence.told  # this judges every answer, so that its time must fit into the budget
            target.seconds = target.posing = watch.seconds
        return target

    def alone(self, job: AttackJob, index: int) -> AttackJob:
        """Return a job that holds this observation alone.

        Args:
            job: the job of all observations.
            index: the index of this observation in it.
        """
        assert self.problem is not None
        return replace(job.take([index]), posed=[self.problem])

    def left(self, limit: float) -> float:
        """Return the CPU seconds that the next attack may take, or 0 if they are too few to begin.

        The time that comparing the attack's result takes is kept back.

        Args:
            limit: CPU seconds for the observation in total.
        """
        left = limit - self.seconds - self.judging
        return left if left > self.least else 0.0

    @property
    def least(self) -> float:
        """About how many CPU seconds an attack takes up to the end of its first step.

        An attack begins with the work of turning the observation into a problem. A step takes about
        as long as comparing a result with the update a few times.
        """
        return self.posing + 3 * self.judging

    def spent(self, limit: float) -> str:
        """Return a sentence on why there is no time for another attack.

        Args:
            limit: CPU seconds for the observation in total.
        """
        needs = self.seconds + self.judging + self.least
        if self.seconds >= limit:
            return f"the budget of {limit:g} s was spent"
        which = "another" if any(part.seconds for part in self.parts) else "the first"
        return f"a budget of {limit:g} s was given, {which} attack needs {needs:.2g} s"

    @property
    def num_samples(self) -> int:
        return 0 if self.evidence is None else self.evidence.problem.num_samples

    def waits(self, name: str) -> bool:
        """Return whether continuing from an attack's candidate must wait for the other attacks.

        It must if the update is noised and the candidate does not explain it to the noise. Under
        noise, continuing costs more than most attacks, and another start may be far better.

        Args:
            name: the name of the attack.
        """
        assert self.evidence is not None
        candidate = self.candidates.get(name)
        is_noised = self.evidence.is_noised
        return candidate is not None and is_noised and not candidate.judged.is_explained

    @property
    def winner(self) -> str:
        return str(self.best.stats.get("attack", ""))

    def leave_out(self, name: str, reason: str, stops: bool = False) -> None:
        """Record that an attack was not run, unless an earlier outcome of it is recorded.

        Args:
            name: the name of the attack.
            reason: why it was not run, in words.
            stops: whether the budget is the reason.
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
        fits_noise: bool = False,
        replaces: bool = False,
    ) -> bool:
        """Compare an attack's result with the best so far, and return whether it is now the best.

        The result, or the reason why there is none, is recorded.

        Args:
            name: the name of the attack.
            result: the attack's result.
            seconds: the CPU seconds that the attack took.
            fits_noise: whether the result may have fitted the noise, as it began from another
                candidate. Then the search continues even if the result explains a noised update.
            replaces: whether the result replaces the candidate from which it began if both explain
                a noised update. Both then differ in the prior only, and the result's is the finer
                one.
        """
        assert self.evidence is not None
        self.seconds += seconds
        stopped = "stopped" in result.stats
        self.stopped |= stopped
        if result.batch is None:
            outcome: PartOutcome = "failed" if result.error.startswith(UNFORESEEN) else "refused"
            self.parts.append(Part(name, outcome, seconds=seconds, reason=result.error))
            # Findings of an attack, such as tokens without their order, are kept if later attacks
            # refuse.
            if self.best.batch is None and (result.stats or not self.best.stats):
                self.best = result
            return False
        result = in_box(self.evidence.problem.spec, result)  # the returned images are judged
        assert result.batch is not None
        proven = _is_proven(result)
        is_known = proven or _is_known(result)
        scale = float(result.stats.get("scale", 1.0))
        if is_known and scale != self.evidence.problem.scale:  # proven samples show the factor
            problem = self.evidence.problem.divided(scale / self.evidence.problem.scale)
            self.evidence = Evidence.of(problem, self.evidence.tolerance)
        if "features" in result.stats and "weight" in result.stats:
            told = self.evidence.told_by(result.stats["weight"], result.stats["features"])
            if told is not self.evidence:
                self._judge_by(told)
                self.features_of = name
        watch = Stopwatch()
        _ = self.evidence.told  # other evidence computes equations of its own
        judging = Stopwatch()
        judged = self.evidence.judge(result.batch)
        self.judging = max(self.judging, judging.seconds)
        self.seconds += watch.seconds
        is_mean = POSTERIOR in result.stats and not self.evidence.is_noised
        is_done = is_known or (judged.misfit <= 1 and (judged.is_met or is_mean))
        solved = judged.is_met or is_done or (judged.is_explained and not fits_noise)
        outcome = "solved" if solved else "stopped" if stopped else "found"
        reason = _proof(result) if proven else str(result.stats.get("stage", ""))
        if scale != 1:
            reason += f"{', ' if reason else ''}of an update that was scaled by {scale:.3g}"
        self.parts.append(Part(name, outcome, judged.distance, judged.energy, seconds, reason))
        origin = name.partition(" + ")[0]  # a candidate and its finish have the same errors
        rival = self.candidates.get(origin)
        if name == origin:
            self.plain = min(self.plain, judged.energy)
        is_better = rival is None or judged.energy < rival.energy
        is_best = self.best.batch is None or judged.energy < self.energy
        if replaces and rival is not None and judged.is_explained and rival.judged.is_explained:
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
        """Compare all results so far again, by other evidence, which also serves for later ones."""
        self.evidence = evidence
        for origin, old in self.candidates.items():
            new = Candidate(old.name, old.batch, evidence.judge(old.batch))
            self.candidates[origin] = new
            self.answers[origin] = _judged(self.answers[origin], new.name, new.judged)
        if self.candidates:
            leads = min(self.candidates, key=lambda origin: self.candidates[origin].energy)
            self.best, self.energy = self.answers[leads], self.candidates[leads].energy
            self.plain = self.energy

    def may_win(self, name: str, energy: float) -> bool:
        """Return whether an attack's result is about as likely as one of the given energy.

        It is if its weight in a mean of both, relative to the other one's, is at least a tenth.

        Args:
            name: the name of the attack.
            energy: −2 log posterior of the other result, up to a constant.
        """
        return self._has_weight(name, energy, 0.1)

    def may_lead(self, name: str) -> bool:
        """Return whether it is worth the time to continue from an attack's candidate.

        Continuing may change the energy by far more than the difference of two candidates, above
        all after an attack that fits other equations. So a weight of 1e-3 relative to the best
        candidate is enough. But once the best one has been continued, all others may look unlikely.
        So it is also enough to be about as likely as the best result of an attack by itself.
        """
        return self._has_weight(name, self.energy, 1e-3) or self.may_win(name, self.plain)

    def _has_weight(self, name: str, energy: float, least: float) -> bool:
        assert self.evidence is not None
        candidate = self.candidates.get(name)
        return candidate is not None and candidate.weight(energy, self.evidence) >= least

    def likely(self) -> list[tuple[str, Candidate]]:
        """Return the batches found so far that are about as likely as the best one.

        The most likely one comes first. Each entry is the name of the attack that found the batch
        at first, and the batch with its energy.
        """
        found = sorted(self.candidates.items(), key=lambda each: each[1].energy)
        return [each for each in found if self.may_win(each[0], self.energy)]

    def fuse(self) -> None:
        """Take a mean of the batches that attacks found as the result, if there is one.

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
"""Largest number of candidates that are continued after all attacks. Less likely ones have seldom
won."""

FINISHED = " + finish"
"""The end of an attack's name after ``finish`` continued from its candidate."""

DENOISED = " + denoising"
"""The end of an attack's name after ``denoising`` continued from its candidate."""

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


GoOn = Callable[..., list[Reconstruction]]
"""An attack whose first argument is the candidate to continue from."""


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


def _finish(
    finish: Finish, candidate: Batch, job: AttackJob, progress: ProgressCallback | None = None
) -> list[Reconstruction]:
    return [finish(job, candidate, progress)]


def _denoise(
    denoising: Denoising,
    evidence: Evidence,
    candidate: Batch,
    job: AttackJob,
    progress: ProgressCallback | None = None,
) -> list[Reconstruction]:
    budget = Budget.of(job.max_seconds)
    batch, steps = denoising(evidence, candidate, budget)
    stats = {"stage": f"{steps} steps", **stop_mark(budget.is_spent)}
    return [Reconstruction(batch, evidence.judge(batch).distance, stats)]


def _attempt(
    attack: Attack, job: AttackJob, progress: ProgressCallback | None
) -> list[Reconstruction]:
    """Return an attack's results for a job.

    If the attack raises an error, each result has no batch, and the error's text, so that a
    portfolio can continue with other attacks.
    """
    try:
        return attack(job, progress)
    except Exception as error:  # a portfolio continues without an attack that fails
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
    """Return a text with the reasons why no attack found anything.

    Each reason stands there once, after the names of the attacks that gave it.
    """
    names: dict[str, list[str]] = {}
    for part in parts:
        if part.reason:
            names.setdefault(part.reason, []).append(part.name)
    return "; ".join(f"{', '.join(who)}: {reason}" for reason, who in names.items())


def _is_proven(result: Reconstruction) -> bool:
    """Return whether a result's verdict is ``proven`` for every sample."""
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


def _seconds(found: list[Reconstruction], total: float) -> list[float]:
    """Return the CPU seconds of each result of one attack.

    They are the result's own ``stats["cpu_seconds"]``. Results without these share the rest of
    ``total`` equally.

    Args:
        found: the results.
        total: CPU seconds that the attack took for all of them.
    """
    stated = [result.stats.get("cpu_seconds") for result in found]
    rest = max(total - sum(each for each in stated if each is not None), 0.0)
    silent = sum(each is None for each in stated)
    return [rest / silent if each is None else float(each) for each in stated]


def _within(
    progress: ProgressCallback | None, name: str, done: int, total: int
) -> ProgressCallback | None:
    """Return a callback by which one attack of a portfolio reports its progress, or ``None``.

    It calls ``progress`` with the numbers of the whole portfolio and the attack's name.

    Args:
        progress: the callback of the portfolio, or ``None``.
        name: the name of the attack.
        done: number of observations that need no further attack.
        total: number of all observations.
    """
    if progress is None:
        return None

    def tell(p: AttackProgress) -> None:
        if math.isfinite(p.objective):  # an attack that refused has no objective
            progress(replace(p, done=done, total=total, attack=name))

    return tell
