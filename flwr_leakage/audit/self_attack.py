"""Attack a client's own update on the client, which compares the answer with its own samples."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flwr_leakage.attacks.base import Attack, failure
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.audit.attack import Attempt, attempt
from flwr_leakage.audit.evaluate import Outcome, evaluate
from flwr_leakage.audit.grant import disclose
from flwr_leakage.audit.large_clients import (
    PROBE_SECONDS,
    PROBE_SIZES,
    Probed,
    attack_probe,
    probes,
)
from flwr_leakage.audit.sharing import Sharing
from flwr_leakage.audit.truth import Truth
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Reference
from flwr_leakage.records import (
    Batch,
    Exposure,
    InputSpec,
    Measurement,
    Observation,
    Reconstruction,
    ThreatModel,
    Update,
)
from flwr_leakage.report.grades import Grade, grade
from flwr_leakage.values import require

PREFIX = "self_attack_"
"""The beginning of the names of the metrics that a client shares of its attack on its
own update.
"""


@dataclass(frozen=True)
class SelfAttacked:
    """The result of a client's attack on its own update.

    Attributes:
        attempt: the attack's answer, with its cost.
        outcome: the metrics and images; ``None`` where nothing was attacked.
        problem: why the answer says nothing about the update's safety; empty if there is no such
            reason.
        probes: the results of attacks on one step over a few of the samples, where the update
            itself is not attacked. These results are for the client's owner, and never shared.
    """

    attempt: Attempt
    outcome: Outcome | None = None
    problem: str = ""
    probes: tuple[Probed, ...] = ()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Return the metrics of the attack, with a value for each sample; empty if nothing was
        attacked.
        """
        return () if self.outcome is None else self.outcome.measurements

    @property
    def psnr(self) -> list[float]:
        """Return the PSNR in dB of the reconstruction of each sample that has one."""
        return [value for value in self._column("psnr") if value is not None]

    @property
    def grades(self) -> list[Grade]:
        """Return the grade of each sample that has one.

        A grade says how well a sample was recovered: ``exact``, ``recognisable``, ``partly`` or
        ``nothing`` (``flwr_leakage.report.grades``).
        """
        names = ("psnr", "blind_psnr", "ssim", "blind_ssim", "", "affine_psnr", "blind_affine_psnr")
        columns = [self._column(name) for name in names]  # LPIPS is in no self-attack
        found = [grade(*row) for row in zip(*columns, strict=True)]
        return [each for each in found if each is not None]

    def shared(self, sharing: Sharing) -> tuple[Measurement, ...]:
        """Return the metrics that the owner shares with the server, as ``self_attack_METRIC``."""
        return tuple(
            replace(found, name=PREFIX + found.name)
            for found in self.measurements
            if sharing.numbers or found.name in sharing.metrics
        )

    def _column(self, name: str) -> list[float | None]:
        columns = {found.name: list(found.values) for found in self.measurements}
        count = max((len(column) for column in columns.values()), default=0)
        return columns.get(name, [None] * count)


@dataclass(frozen=True)
class SelfAttack:
    """The settings of a client's attack on its own update, made after the client's defense.

    The attack is given what the server observes, and the facts that ``threat`` grants. The client's
    samples are used only afterwards, to evaluate the answer. An attack that fails is no evidence of
    safety.

    Attributes:
        attack: the attack.
        threat: the facts beside the update that the server is assumed to know.
        evaluator: the object that computes the metrics; PSNR, SSIM and labels by default.
        reference: the reconstruction without any attack, with which answers are compared; the mean
            colour by default.
        every: the number of rounds from one attack to the next, ≥ 1; the first round is attacked.
        max_samples: the largest number of samples that the steps of an attacked round use, all
            steps together; ``None`` for no limit.
        max_seconds: the CPU seconds that an attack may take; ``None`` for no limit.
        seed: the seed of the attack's draws, ≥ 0.
        probe_sizes: numbers of samples; empty for none. If an update is too large to be attacked,
            updates of one step on these numbers of samples are attacked instead.
        probe_seconds: the CPU seconds that the attack on one such step may take.
    """

    attack: Attack
    threat: ThreatModel = field(default_factory=ThreatModel)
    evaluator: Evaluator | None = None
    reference: Reference | None = None
    every: int = 1
    max_samples: int | None = 64
    max_seconds: float | None = 60.0
    seed: int = 0
    probe_sizes: Sequence[int] = PROBE_SIZES
    probe_seconds: float = PROBE_SECONDS

    def __post_init__(self) -> None:
        require(self, "be at least 1", "every")
        require(self, "be at least 1", "max_samples", optional=True)
        require(self, "be positive", "max_seconds", optional=True)
        object.__setattr__(self, "probe_sizes", tuple(self.probe_sizes))
        if min((*self.probe_sizes, self.probe_seconds)) <= 0:
            raise ValueError(
                f"probe_sizes and probe_seconds must be positive, got {self.probe_sizes} and "
                f"{self.probe_seconds}."
            )
        if self.threat.view != "single" or self.threat.rounds != 1:
            raise ValueError(
                f"a client attacks its own update of one round, got {self.threat.describe()}."
            )

    def includes(self, server_round: int) -> bool:
        """Return whether a round, counted from 1, is attacked."""
        return (server_round - 1) % self.every == 0

    def run(
        self,
        gradient_map: GradientMap,
        spec: InputSpec,
        exposure: Exposure,
        *,
        server_round: int,
        client_id: int,
    ) -> SelfAttacked:
        """Return the result of attacking a client's defended update, compared with its samples.

        ``exposure`` holds the client's samples, its parameters and the update as it is sent.
        """
        released = exposure.released
        seen = Observation(
            server_round, client_id, exposure.params, exposure.buffers, _plain(released)
        )
        if problem := self._against(exposure):
            found = self.probe(gradient_map, spec, seen, exposure.private)
            return SelfAttacked(Attempt([failure(problem)], 0.0, 0.0), None, problem, found)
        truth = Truth(exposure.private, exposure.defended)
        seen = replace(seen, disclosed=disclose(seen, self.threat, gradient_map, truth))
        job = AttackJob(
            gradient_map, spec, [seen], self.threat, self.seed, max_seconds=self.max_seconds
        )
        made = attempt(self.attack, job)
        (answer,) = made.answers
        reference = self.reference or Reference.of(spec)
        try:
            outcome = evaluate(answer, truth, self.evaluator or Evaluator(), spec, reference)
        except Exception as error:  # the training goes on after any error
            return SelfAttacked(made, None, f"its answer cannot be measured: {error}")
        return SelfAttacked(made, outcome, self._doubt(answer, outcome, len(exposure.private)))

    def probe(
        self, gradient_map: GradientMap, spec: InputSpec, seen: Observation, private: Batch
    ) -> tuple[Probed, ...]:
        """Return the results of attacking updates of one step on a few of a client's samples.

        There is a result for each of ``probe_sizes`` that is at most the number of the client's
        samples, ``private``, with which the answer is compared. The parameters and the learning
        rate are those of the update ``seen``. The attack is given the labels if the threat model
        grants them, and no batch statistics.
        """
        found = []
        threat, seconds = replace(self.threat, batch_norm="none"), self.probe_seconds
        evaluator, reference = self.evaluator or Evaluator(), self.reference or Reference.of(spec)
        for one, truth in probes(gradient_map, seen, Truth(private, private), self.probe_sizes):
            job = AttackJob(gradient_map, spec, [one], threat, self.seed, max_seconds=seconds)
            found.append(attack_probe(self.attack, job, truth, evaluator, reference))
        return tuple(found)

    def _doubt(self, answer: Reconstruction, outcome: Outcome, count: int) -> str:
        """Return why an answer says nothing about the update's safety; empty if nothing speaks
        against it.

        ``count`` is the number of private samples.
        """
        if answer.batch is None:
            return answer.error or "no reconstruction"
        near = ("psnr", "token_accuracy")  # there are grades of images and grades of texts
        reached = next((m.values for m in outcome.measurements if m.name in near), ())
        measured = sum(value is not None for value in reached)
        if measured < count:
            return f"{measured} of {count} samples have a number"
        if answer.stats.get("stopped") == "budget":
            return f"it was ended by its budget of {self.max_seconds:g} CPU seconds"
        return ""

    def _against(self, exposure: Exposure) -> str:
        """Return in words why a client's update is not attacked; empty if it is attacked."""
        raw = exposure.raw
        used = raw.schedule.num_samples_used(raw.num_examples)
        taken = raw.schedule.num_steps * raw.schedule.batch_size
        if self.max_samples is not None and taken > self.max_samples:
            return (
                f"its {raw.schedule.num_steps} steps of {raw.schedule.batch_size} samples use more "
                f"than max_samples={self.max_samples}"
            )
        if used != len(exposure.private):
            return f"only {len(exposure.private)} of the {used} samples that it used were kept"
        return ""


def _plain(update: Update) -> Update:
    return replace(update, delta={name: value.detach() for name, value in update.delta.items()})
