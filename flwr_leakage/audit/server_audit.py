"""What an honest-but-curious server does with what it observes: attack, evaluate, record."""

import time
from dataclasses import dataclass, field, replace

from flwr_leakage.attacks.base import Attack, AttackProgress
from flwr_leakage.audit.progress import Progress, SilentProgress
from flwr_leakage.audit.targets import History, Selection, Target, Truth, TruthSource, aggregate
from flwr_leakage.flower.wire import ClientNote
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator
from flwr_leakage.normalization import StatelessBatchNorm
from flwr_leakage.params import Params
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import (
    Batch,
    Direction,
    Disclosure,
    InputSpec,
    LeakageRecord,
    LocalSchedule,
    Measurement,
    Observation,
    Reconstruction,
    RecordKind,
    RunEvent,
    ThreatModel,
)
from flwr_leakage.tracking import Tracker


@dataclass
class ServerAudit:
    """Attacks the selected updates of each round and records every number.

    Attributes:
        gradient_map: the public model and loss, in the BatchNorm mode of the clients.
        spec: the public facts about the data.
        schedule: the clients' local training, which the server sets.
        tracker: where numbers, events and images go.
        run: the run's name.
        attack: the attack, or ``None`` to record scores and failures only.
        threat: what the attacker knows.
        selection: whom to attack and when.
        evaluator: compares reconstructions with the truth, where there is one.
        truth: where the truth comes from; ``None`` outside of simulations, where labels and
            BatchNorm statistics can not be granted either.
        seed: of the attack's random draws.
        progress: what a person sees.
        num_rounds: for the progress only.
    """

    gradient_map: GradientMap
    spec: InputSpec
    schedule: LocalSchedule
    tracker: Tracker
    run: str = "audit"
    attack: Attack | None = None
    threat: ThreatModel = field(default_factory=ThreatModel)
    selection: Selection = field(default_factory=Selection)
    evaluator: Evaluator | None = None
    truth: TruthSource | None = None
    seed: int = 0
    progress: Progress = field(default_factory=SilentProgress)
    num_rounds: int | None = None

    def __post_init__(self) -> None:
        granted = self.threat.labels == "known" or self.threat.batch_norm == "exact"
        if granted and self.truth is None:
            raise ValueError(
                "labels='known' and batch_norm='exact' are granted by a simulation, which knows "
                f"the truth; got {self.threat.describe()} and no truth."
            )
        self._round_start = time.monotonic()
        self._history = History(self.threat.rounds)
        self._told_of_seeds = False
        self._remarks: dict[int, str] = {}

    def begin_round(self, server_round: int) -> None:
        """Note when a round starts."""
        self._round_start = time.monotonic()
        self.progress.status(f"{self._round_name(server_round)} · clients train")

    def warn(self, server_round: int, client_id: int, message: str) -> None:
        """Record that something went wrong; the run goes on."""
        self.tracker.event(RunEvent(self.run, server_round, client_id, "warning", message))
        self.progress.line(f"{self._round_name(server_round)} · {message.splitlines()[0][:200]}")

    def utility(self, server_round: int, name: str, value: float, unit: str = "1") -> None:
        """Record a quantity of the global model, such as its test accuracy."""
        self._log(server_round, -1, -1, "utility", name, value, unit)

    def inspect(
        self, server_round: int, observations: list[Observation], notes: list[ClientNote]
    ) -> None:
        """Record the clients' notes, attack the selected observations, evaluate, record."""
        received = time.monotonic()
        self._cost(server_round, "clients_wall_seconds", received - self._round_start)
        for note in notes:
            self._record_note(server_round, note)
        if self.attack is not None:
            self._attack_all(server_round, self._targets(server_round, observations))
        self._cost(server_round, "round_wall_seconds", time.monotonic() - self._round_start)
        self.progress.line(
            f"{self._round_name(server_round)} · {len(observations)} updates · "
            f"{time.monotonic() - self._round_start:.1f} s"
        )

    def _targets(self, server_round: int, observations: list[Observation]) -> list[Target]:
        chosen = self.selection(observations)
        if self.threat.view == "single" or not chosen:
            targets = [Target.of(observation) for observation in chosen]
        else:
            targets = [aggregate(chosen, self._uses_batch_statistics())]
        try:
            return [self._history.fuse(target) for target in targets]
        except ValueError as error:
            self.warn(server_round, -1, f"nothing was attacked: {error}")
            return []

    def _attack_all(self, server_round: int, targets: list[Target]) -> None:
        assert self.attack is not None
        prepared = [entry for target in targets if (entry := self._prepare(target))]
        if not prepared:
            return
        wall, cpu = time.monotonic(), time.process_time()
        name = self._round_name(server_round)
        self.progress.status(f"{name} · attack on {len(prepared)} updates")

        def report(progress: AttackProgress) -> None:
            self.progress.status(
                f"{name} · attack on {progress.total} updates · {progress.done} done · "
                f"iteration {progress.iteration}/{progress.iterations} · "
                f"objective {progress.objective:.3g}"
            )

        disclosed = [observation for _, observation, _ in prepared]
        generator = make_generator(self.seed, server_round=server_round, purpose="attack")
        try:
            answers = self.attack(
                self.gradient_map, self.spec, disclosed, self.threat, generator, report
            )
        except Exception as error:  # an attack that fails must not end the training
            reason = f"{type(error).__name__}: {error}"
            self.warn(server_round, -1, f"the attack failed: {reason}")
            answers = [Reconstruction(None, float("nan"), error=reason) for _ in prepared]
        self._cost(server_round, "attack_wall_seconds", time.monotonic() - wall)
        self._cost(server_round, "attack_cpu_seconds", time.process_time() - cpu)
        for (target, _, truth), answer in zip(prepared, answers, strict=True):
            self._record_answer(target.observation, truth, answer)

    def _uses_batch_statistics(self) -> bool:
        layers = self.gradient_map.model.modules()
        return self.gradient_map.batch_norm == "batch" and any(
            isinstance(layer, StatelessBatchNorm) for layer in layers
        )

    def _prepare(self, target: Target) -> tuple[Target, Observation, Truth | None] | None:
        """What the attack is given and what it is measured against; none where a client lies."""
        seen = target.observation
        try:
            truth = self._truth(target)
            earlier = tuple(replace(e, disclosed=self._disclose(e, truth)) for e in seen.earlier)
            disclosed = replace(seen, disclosed=self._disclose(seen, truth), earlier=earlier)
            return target, disclosed, truth
        except ValueError as error:
            self.warn(
                seen.server_round,
                seen.client_id,
                f"client {seen.client_id} was not attacked, as there is no truth: {error}",
            )
            return None

    def _truth(self, target: Target) -> Truth | None:
        """The samples that the local steps used; the others leave no trace to attack."""
        if self.truth is None:
            return None
        server_round = target.observation.server_round
        return target.join(
            [self.truth(server_round, client, count) for client, count in target.members]
        )

    def _disclose(self, target: Observation, truth: Truth | None) -> Disclosure:
        """Exactly what the threat model grants, and nothing else."""
        targets = statistics = None
        if truth is not None and self.threat.labels == "known":
            targets = truth.defended.targets
        if truth is not None and self.threat.batch_norm == "exact":
            statistics = self._statistics(target, truth.defended)
        return Disclosure(targets, statistics)

    def _statistics(self, target: Observation, batch: Batch) -> Params:
        first = target.update.schedule.slices(len(batch))[0]
        return self.gradient_map.statistics(target.params, batch.inputs[first], target.buffers)

    def _record_answer(
        self, target: Observation, truth: Truth | None, answer: Reconstruction
    ) -> None:
        server_round, client_id = target.server_round, target.client_id
        if answer.error:
            self.warn(server_round, client_id, f"client {client_id} not recovered: {answer.error}")
        objective = answer.objective if answer.batch is not None else None
        self._log(
            server_round, client_id, -1, "attack", "objective", objective,
            "1", note=answer.error or self.threat.describe(),
        )  # fmt: skip
        if truth is None or self.evaluator is None:
            if answer.batch is not None:
                pixels = self.spec.denormalize(answer.batch.inputs).clamp(0, 1)
                for sample, image in enumerate(pixels):
                    self.tracker.image(server_round, client_id, sample, "reconstruction", image)
            return
        evaluation = self.evaluator.evaluate(answer, truth.private, self.spec)
        for measurement in evaluation.measurements:
            self._record_measurement(server_round, client_id, "metric", measurement)
        originals = self.spec.denormalize(truth.private.inputs).clamp(0, 1)
        for sample, image in enumerate(originals):
            self.tracker.image(server_round, client_id, sample, "original", image)
            if evaluation.assignment[sample] >= 0:
                matched = evaluation.matched[sample]
                self.tracker.image(server_round, client_id, sample, "reconstruction", matched)

    def _tell_of_seeds(self, server_round: int, note: ClientNote) -> None:
        """Say once that the defenses' draws can be repeated: a simulation's, or a mistake."""
        if not note.reproducible or self._told_of_seeds:
            return
        self._told_of_seeds = True
        message = (
            "The defenses draw from a seed, so that the run can be repeated, and so can their "
            "noise: whoever knows the seed subtracts it. For simulations only; elsewhere leave "
            "ClientAudit(seed=None)."
        )
        if self.truth is None:
            self.warn(server_round, note.client_id, message)
        else:
            self.tracker.event(RunEvent(self.run, server_round, -1, "info", message))

    def _record_note(self, server_round: int, note: ClientNote) -> None:
        self._tell_of_seeds(server_round, note)
        if note.remark and self._remarks.get(note.client_id) != note.remark:
            self._remarks[note.client_id] = note.remark
            remark = f"client {note.client_id} says: {note.remark}"
            self.tracker.event(RunEvent(self.run, server_round, note.client_id, "info", remark))
        for measurement in note.measurements:
            self._record_measurement(server_round, note.client_id, "score", measurement)
        for name in ("train_cpu_seconds", "score_cpu_seconds"):
            self._log(server_round, note.client_id, -1, "cost", name, getattr(note, name), "s")

    def _record_measurement(
        self, server_round: int, client_id: int, kind: RecordKind, measurement: Measurement
    ) -> None:
        notes = measurement.notes or ("",) * len(measurement.values)
        for sample, (value, note) in enumerate(zip(measurement.values, notes, strict=True)):
            self._log(
                server_round, client_id, sample, kind, measurement.name, value,
                measurement.unit, measurement.direction, note,
            )  # fmt: skip

    def _cost(self, server_round: int, name: str, seconds: float) -> None:
        self._log(server_round, -1, -1, "cost", name, seconds, "s")

    def _log(
        self, server_round: int, client_id: int, sample: int, kind: RecordKind, name: str,
        value: float | None, unit: str = "", direction: Direction = "", note: str = "",
    ) -> None:  # fmt: skip
        self.tracker.log(
            LeakageRecord(
                self.run, server_round, client_id, sample, kind, name, value, unit, direction, note
            )
        )

    def _round_name(self, server_round: int) -> str:
        if server_round == 0:
            return "before the rounds"
        total = f"/{self.num_rounds}" if self.num_rounds else ""
        return f"round {server_round}{total}"
