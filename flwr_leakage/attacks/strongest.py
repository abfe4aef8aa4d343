"""A portfolio of attacks, cheap ones first; the most likely candidate is kept."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from flwr_leakage.attacks.base import Attack, AttackProgress, DeclaresShare, ProgressCallback
from flwr_leakage.attacks.budget import Budget, Stopwatch, stop_mark
from flwr_leakage.attacks.denoising import Denoising
from flwr_leakage.attacks.evidence import Evidence, Judgement
from flwr_leakage.attacks.exact.analytic import POSTERIOR
from flwr_leakage.attacks.exact.pixel_box import in_box
from flwr_leakage.attacks.finish import Finish
from flwr_leakage.attacks.fusion import Candidate, fuse
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.problem import pose
from flwr_leakage.attacks.scale import unscaled
from flwr_leakage.records import Batch, Observation, Part, PartOutcome, Reconstruction


@dataclass(frozen=True)
class Strongest:
    """Try attacks one after another on the targets that are not solved yet.

    All candidates are judged alike, whatever objective the attack itself used: by the energy of
    :class:`flwr_leakage.attacks.evidence.Evidence`, misfit plus a prior of images. The distance of
    gradients alone would prefer a candidate that fits the noise.

    A target is *solved*, and no further attack is run on it, once a candidate's gradient meets the
    observed one within ``tolerance``, or explains an update with noise to that noise, or once an
    attack has proven all of its samples, or answers a pruned update by the mean of what is likely
    given all that was kept, which its gradient meets to rounding. An answer is brought into the box
    of valid pixels before it is judged, and a proof that does not survive that is none
    (:func:`flwr_leakage.attacks.exact.pixel_box.in_box`).

    ``finish`` goes on from each candidate that is not far less likely than the best, so that they
    are compared where they lead, unless samples are proven or rounding is all that is left. Its
    answer is one more candidate. Where an update was noised, ``denoising`` goes on instead.

    An attack among ``attacks`` that is itself a :class:`flwr_leakage.attacks.finish.Finish` goes on
    from the likely candidates of those before it, most likely first, until one solves the target.
    It is for what is too dear for every candidate. Where a target is solved, but its gradient not
    yet met to rounding, it goes on from the winner. A noised update is left out: it would be
    fitted.

    Where nothing solved a target, the answer is the weighted mean of the
    candidates around the most likely one, if there are several; see
    :func:`flwr_leakage.attacks.fusion.fuse`.

    A result's ``parts`` tell what each attack said, what it took and why it refused. Its objective
    is the relative squared distance of gradients. Its stats are the winner's, with the winner's
    key as ``attack``, its own objective as ``own_objective``, its ``energy`` and ``misfit``, and
    ``stopped`` where the budget ended an attack, or left one out.

    As long as the budget is not spent, results depend on the job alone.

    Attributes:
        attacks: by name, in the order in which they are tried, attacks of their own and such as
            go on from others; one that does not fit a target refuses fast.
        tolerance: relative squared distance at which gradients meet, ≥ 0. Float32 parameters on
            the wire leave 1e-12 to 1e-8.
        max_seconds: CPU seconds for each target, > 0, or ``None`` for no limit. The job's own
            limit holds, too.
        share: of the CPU seconds that are left, what an attack may take if it is not the last, in
            (0, 1]: one that is slow on a large network leaves time to the others. An attack that
            :class:`~flwr_leakage.attacks.base.DeclaresShare` may take more near a solution.
        finish: how to go on from a candidate, or ``None``. It may take half as much as an attack.
        denoising: how to go on from it under noise, or ``None``. It may take as much.
    """

    attacks: Mapping[str, Attack | Finish]
    tolerance: float = 1e-7
    max_seconds: float | None = 120.0
    share: float = 0.5
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
        """Attack all observations; see :class:`flwr_leakage.attacks.base.Attack`."""
        limits = [each for each in (self.max_seconds, job.max_seconds) if each is not None]
        limit = min(limits, default=math.inf)
        targets = [_Target.of(job, observation, self.tolerance) for observation in job.observations]
        for name, attack in self.attacks.items():
            chosen = []
            for index, target in enumerate(targets):
                goes_on = isinstance(attack, Finish) and not target.is_done
                if target.is_solved and not goes_on:
                    target.leave_out(name, f"{target.winner} had solved it")
                elif target.seconds >= limit:
                    reason = f"the budget of {limit:g} s was spent"
                    target.leave_out(name, reason, stops=not target.is_solved)
                elif target.evidence is not None:
                    chosen.append(index)
            if not chosen:
                continue
            if isinstance(attack, Finish):
                for index in chosen:
                    self._end(job.take([index]), targets[index], name, attack, limit)
                continue
            left = limit - max(targets[index].seconds for index in chosen)
            share = 1.0 if name == list(self.attacks)[-1] else self.share
            if isinstance(attack, DeclaresShare):
                attack = attack.with_share(share)
            else:
                left *= share
            part = replace(job.take(chosen), max_seconds=left if left < math.inf else None)
            done = len(targets) - len(chosen)
            watch = Stopwatch()
            found = _attempt(attack, part, _within(progress, name, done, len(targets)))
            shares = _seconds(found, watch.seconds)
            for index, result, seconds in zip(chosen, found, shares, strict=True):
                targets[index].take(name, result, seconds)
                self._go_on(job.take([index]), targets[index], name, limit)
        for target in targets:
            target.fuse()
        if progress is not None:
            known = [t.best.objective for t in targets if math.isfinite(t.best.objective)]
            mean = sum(known) / len(known) if known else math.nan
            progress(AttackProgress(len(targets), len(targets), 1, 1, mean))
        return [target.result() for target in targets]

    def _go_on(self, job: AttackJob, target: "_Target", name: str, limit: float) -> None:
        """Go on from an attack's candidate if it may be the best, and the budget is not spent.

        One that meets the gradient is gone on from again, as long as that halves the distance.
        """
        assert target.evidence is not None
        attack: GoOn | None = None if self.finish is None else partial(_finish, self.finish)
        suffix = FINISHED
        if target.evidence.is_noised and self.denoising is not None:
            attack, suffix = partial(_denoise, self.denoising, target.evidence), DENOISED
        for _ in range(FINISHES):
            left = (limit - target.seconds) * self.share / 2  # there may be better ones to come
            if attack is None or target.is_done or left <= 0 or not target.may_lead(name):
                return
            before = target.candidates[name]
            watch = Stopwatch()
            part = replace(job, max_seconds=left if left < math.inf else None)
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
        """Go on from the likely candidates of other attacks until one solves the target."""
        assert target.evidence is not None
        if target.evidence.is_noised:
            target.leave_out(name, "it would fit the noise")
            return
        for origin, candidate in target.likely()[:ENDED]:
            left = (limit - target.seconds) * self.share
            if left <= 0:
                return
            watch = Stopwatch()
            part = replace(job, max_seconds=left if left < math.inf else None)
            (found,) = _attempt(partial(_finish, attack, candidate.batch), part, None)
            target.take(f"{origin} + {name}", found, watch.seconds)
            if found.batch is None or target.is_solved:
                return  # what refuses a target does so whatever the candidate


@dataclass
class _Target:
    """One observation on its way through the attacks.

    A solved one needs no further attack. It is done, too, and needs no finish, once its samples are
    proven or rounding is all that is left of what the client sent.
    """

    evidence: Evidence | None
    best: Reconstruction
    energy: float = math.inf
    plain: float = math.inf  # the least of candidates that were not gone on from
    seconds: float = 0.0
    is_solved: bool = False
    is_done: bool = False
    stopped: bool = False
    parts: list[Part] = field(default_factory=list)
    candidates: dict[str, Candidate] = field(default_factory=dict)

    @classmethod
    def of(cls, job: AttackJob, observation: Observation, tolerance: float) -> "_Target":
        try:
            problem = unscaled(pose(job.gradient_map, job.spec, observation, job.threat))
            evidence = Evidence.of(problem, tolerance)
        except (ValueError, RuntimeError) as error:
            return cls(None, Reconstruction(None, math.nan, error=str(error)))
        return cls(evidence, Reconstruction(None, math.nan, error="not attacked"))

    @property
    def winner(self) -> str:
        return str(self.best.stats.get("attack", ""))

    def leave_out(self, name: str, reason: str, stops: bool = False) -> None:
        """Note that an attack was not run."""
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
        """Judge what an attack answered, and keep it if it is the most likely so far: if so.

        Args:
            name: of the attack.
            result: its answer.
            seconds: that it took.
            fits_noise: whether that it explains a noised update is no reason to end the search:
                it began from another candidate, and may have fitted the noise.
            replaces: whether it takes the place of the candidate of its attack where both explain
                a noised update: they differ in the prior alone, and its own is the finer one.
        """
        assert self.evidence is not None
        self.seconds += seconds
        stopped = "stopped" in result.stats
        self.stopped |= stopped
        if result.batch is None:
            outcome: PartOutcome = "failed" if result.error.startswith(FAILED) else "refused"
            self.parts.append(Part(name, outcome, seconds=seconds, reason=result.error))
            if self.best.batch is None:
                self.best = result
            return False
        result = in_box(self.evidence.problem.spec, result)  # what is measured is judged
        assert result.batch is not None
        proven = _is_proven(result)
        scale = float(result.stats.get("scale", 1.0))
        if proven and scale != self.evidence.problem.scale:  # told by the samples themselves
            problem = self.evidence.problem.divided(scale / self.evidence.problem.scale)
            self.evidence = Evidence.of(problem, self.evidence.tolerance)
        judged = self.evidence.judge(result.batch)
        is_mean = POSTERIOR in result.stats and not self.evidence.is_noised
        is_done = proven or (judged.misfit <= 1 and (judged.is_met or is_mean))
        solved = judged.is_met or is_done or (judged.is_explained and not fits_noise)
        outcome = "solved" if solved else "stopped" if stopped else "found"
        reason = "proven" if proven else str(result.stats.get("stage", ""))
        if scale != 1:
            reason += f"{', ' if reason else ''}of an update that was scaled by {scale:.3g}"
        self.parts.append(Part(name, outcome, judged.distance, judged.energy, seconds, reason))
        origin = name.partition(" + ")[0]  # errors before and after a finish are the same
        rival = self.candidates.get(origin)
        if name == origin:
            self.plain = min(self.plain, judged.energy)
        is_better = rival is None or judged.energy < rival.energy
        is_best = self.best.batch is None or judged.energy < self.energy
        if replaces and rival is not None and judged.is_explained and rival.judged.is_explained:
            is_better, is_best = True, is_best or self.winner == rival.name
        if is_best:
            self.energy = judged.energy
            self.best = _judged(result, name, judged)
        self.is_solved |= solved
        self.is_done |= is_done
        if is_better:
            self.candidates[origin] = Candidate(name, result.batch, judged)
        return is_best

    def may_win(self, name: str, energy: float) -> bool:
        """Whether an attack's candidate is about as likely as one of an energy."""
        return self._has_weight(name, energy, LIKELY)

    def may_lead(self, name: str) -> bool:
        """Whether an attack's candidate is worth going on from.

        Beside one that was gone on from already, a better one may look unlikely, so that what
        counts is also the best of those that were not.
        """
        return self._has_weight(name, self.energy, FAR) or self.may_win(name, self.plain)

    def _has_weight(self, name: str, energy: float, least: float) -> bool:
        assert self.evidence is not None
        candidate = self.candidates.get(name)
        return candidate is not None and candidate.weight(energy, self.evidence) >= least

    def likely(self) -> list[tuple[str, Candidate]]:
        """The candidates that are about as likely as the best, it first, by their origin."""
        found = sorted(self.candidates.items(), key=lambda each: each[1].energy)
        return [each for each in found if self.may_win(each[0], self.energy)]

    def fuse(self) -> None:
        """Answer by the mean of the candidates, unless one solved it."""
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
        """The best candidate, with what every attack said and what all of them took."""
        stats = {**self.best.stats, "cpu_seconds": self.seconds}
        if self.evidence is not None and self.evidence.problem.scale != 1:
            stats["scale"] = self.evidence.problem.scale
        stats.pop("stopped", None)
        if self.stopped:
            stats["stopped"] = "budget"
        error = self.best.error
        if self.best.batch is None and len(self.parts) > 1:
            error = _merged(self.parts)
        return replace(self.best, stats=stats, error=error, parts=tuple(self.parts))


FINISHED = " + finish"
"""How the name of an attack ends whose candidate was gone on from."""

DENOISED = " + denoising"
"""… likewise, under noise."""

FAR = 1e-3
"""Weight from which an attack's own candidate is gone on from: a second may change it by far more
than what tells it from the best, as that of an attack that fits other equations."""

LIKELY = 0.1
"""… from which an attack among others goes on from it, too."""

FINISHES = 4
"""Times at most that one candidate is gone on from."""

ENDED = 3
"""Candidates at most that an attack among others goes on from."""

FUSED = "fusion"
"""The name of the mean of several attacks' candidates."""

FAILED = "an unforeseen "
"""How the reason begins where an attack raised an error."""


GoOn = Callable[..., list[Reconstruction]]
"""An attack whose first argument is the candidate to go on from."""


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
    """The attack's answers; whatever it raises becomes the answer, and the others go on."""
    try:
        return attack(job, progress)
    except Exception as error:  # a portfolio goes on without the attack that broke
        text = f"{FAILED}{type(error).__name__}: {error}"
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
    """Why no part found anything, each reason once."""
    names: dict[str, list[str]] = {}
    for part in parts:
        if part.reason:
            names.setdefault(part.reason, []).append(part.name)
    return "; ".join(f"{', '.join(who)}: {reason}" for reason, who in names.items())


def _is_proven(result: Reconstruction) -> bool:
    """Whether the attack itself proved every sample."""
    verdicts = result.stats.get("verdicts", ())
    return len(verdicts) > 0 and all(verdict == "proven" for verdict in verdicts)


def _seconds(found: list[Reconstruction], total: float) -> list[float]:
    """CPU seconds of each answer; what nobody told is shared by those that told nothing."""
    told = [result.stats.get("cpu_seconds") for result in found]
    rest = max(total - sum(each for each in told if each is not None), 0.0)
    silent = sum(each is None for each in told)
    return [rest / silent if each is None else float(each) for each in told]


def _within(
    progress: ProgressCallback | None, name: str, done: int, total: int
) -> ProgressCallback | None:
    """Progress of one attack on some targets: none is done before the last attack has had it."""
    if progress is None:
        return None

    def tell(p: AttackProgress) -> None:
        if math.isfinite(p.objective):  # an attack that refused has nothing to tell
            progress(replace(p, done=done, total=total, attack=name))

    return tell
