"""What an honest-but-curious server does with what it observes: the walk, step by step."""

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from flwr_leakage.attacks.base import Attack, AttackProgress, ProgressCallback
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.audit.attack import attempt, describe_parts
from flwr_leakage.audit.decoding import Decoder
from flwr_leakage.audit.evaluate import evaluate
from flwr_leakage.audit.grant import Case, check_grantable, disclose, grant
from flwr_leakage.audit.kept import Kept, KeptObservations
from flwr_leakage.audit.note import ClientNote
from flwr_leakage.audit.progress import Progress, SilentProgress, count
from flwr_leakage.audit.record import Recorder
from flwr_leakage.audit.selection import Selection
from flwr_leakage.audit.targets import History, Target, find_targets
from flwr_leakage.audit.truth import ImageNumbers, Truth, TruthSource
from flwr_leakage.audit.what_if import WhatIfSource
from flwr_leakage.capture import differences
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Reference
from flwr_leakage.normalization import BatchNormMode
from flwr_leakage.records import InputSpec, LocalSchedule, Observation, Reconstruction, ThreatModel
from flwr_leakage.schedules import EpochSchedule, Schedule
from flwr_leakage.tracking import GuardedTracker, JsonlTracker, Tracker
from flwr_leakage.tracking.text import plain_text


@dataclass
class ServerAudit:
    """Attacks the selected updates of each round and records every number.

    Attributes:
        gradient_map: the public model and loss, in the BatchNorm mode of the clients.
        spec: the public facts about the data.
        schedule: the clients' local training, which the server sets: by steps or by epochs.
        tracker: where numbers, events and images go.
        run: the run's name.
        attack: the attack, or ``None`` to record scores and failures only.
        threat: what the attacker knows.
        selection: whom to attack and when.
        evaluator: compares reconstructions with the truth, where there is one.
        truth: where the truth comes from; ``None`` outside of simulations, where labels and
            BatchNorm statistics can not be granted either. It is not asked about clients that
            say they run by a config of their own.
        reference: the blind guess and the pool that reconstructions are measured against; by
            default the mean colour, and no pool.
        what_ifs: by name, what each update would have been under a defense. It is attacked in the
            same round and recorded under names of its own; training never sees it.
        seed: of the attack's random draws.
        progress: what a person sees.
        num_rounds: for the progress only.
        max_seconds: CPU seconds that the attack may take for each target; ``None`` for no limit
            but the attack's own.
        keep: where observations are kept to be attacked later, see ``attack_kept``; ``None``
            attacks within the round.
        own_config_clients: those that said they run by a config of their own, so far.
        images: the numbers of the images so far; set it to go on with those of an earlier audit.
    """

    gradient_map: GradientMap
    spec: InputSpec
    schedule: Schedule
    tracker: Tracker
    run: str = "audit"
    attack: Attack | None = None
    threat: ThreatModel = field(default_factory=ThreatModel)
    selection: Selection = field(default_factory=Selection)
    evaluator: Evaluator | None = None
    truth: TruthSource | None = None
    reference: Reference | None = None
    what_ifs: Mapping[str, WhatIfSource] = field(default_factory=dict)
    seed: int = 0
    progress: Progress = field(default_factory=SilentProgress)
    num_rounds: int | None = None
    max_seconds: float | None = None
    keep: KeptObservations | None = None

    def __post_init__(self) -> None:
        check_grantable(self.threat, self.truth)
        self._history = History(self.threat.rounds)
        self._decoder = Decoder(self.spec, self.seed) if self.threat.mixing == "known" else None
        self._reference = self.reference or Reference.of(self.spec)
        self._recorder = Recorder(GuardedTracker(self.tracker, self.progress.line), self.run)
        self.images = ImageNumbers()
        self._told_of_seeds = False
        self.own_config_clients: set[int] = set()
        self._remarks: dict[int, str] = {}
        self._warned: set[tuple[int, str]] = set()
        self._explained: dict[int, str] = {}
        self._round_start = time.monotonic()
        self._shown = 0  # the round of which the blind guess was recorded last

    @property
    def draws(self) -> bool:
        """Whether a part may draw from a process-wide generator: an attack, or a foreign one.

        A subclass that calls others says so.
        """
        parts = (self.tracker, self.progress, self.selection)
        own = tuple(map(type, parts)) == (JsonlTracker, SilentProgress, Selection)
        return self.attack is not None or self.keep is not None or not own

    def begin_round(self, server_round: int) -> None:
        """Note when a round starts."""
        self._round_start = time.monotonic()
        self.progress.status(f"{self._round_name(server_round)} · clients train")

    def warn(self, server_round: int, client_id: int, message: str) -> None:
        """Record that something went wrong; the run goes on. The text may be a client's."""
        self._recorder.warning(server_round, client_id, plain_text(message))
        self._tell(server_round, message)

    def error(self, server_round: int, message: str) -> None:
        """Record what ends the run, or makes its record worth nothing."""
        self._recorder.error(server_round, plain_text(message))
        self._tell(server_round, message)

    def inform(self, server_round: int, client_id: int, message: str) -> None:
        """Record what is worth knowing, and no failure."""
        self._recorder.information(server_round, client_id, plain_text(message))

    def wants(self, server_round: int, client_id: int) -> bool:
        """Whether a client's update may be attacked in a round, so that it has to be kept."""
        attacks = self.attack is not None or self.keep is not None
        return attacks and self.selection.includes(server_round, client_id)

    def warn_once(self, server_round: int, client_id: int, message: str) -> None:
        """The same, in the first round of a client only."""
        if (client_id, message) not in self._warned:
            self._warned.add((client_id, message))
            self.warn(server_round, client_id, message)

    def spare(self, server_round: int, client_id: int, num_examples: int) -> None:
        """Record that ``wants`` leaves a client out, whose update was then not kept, and why."""
        unconfigured = "no attack is configured"
        reason = self.selection.refuses(server_round, client_id) if self.attack else unconfigured
        schedule = self.schedule.for_client(num_examples)
        self._recorder.client(server_round, client_id, schedule, num_examples, reason)

    def utility(self, server_round: int, name: str, value: float, unit: str = "1") -> None:
        """Record a quantity of the global model, such as its test accuracy."""
        self._recorder.utility(server_round, name, value, unit)

    def inspect(
        self,
        server_round: int,
        observations: list[Observation],
        notes: list[ClientNote],
        unknown: Set[int] = frozenset(),
        num_updates: int | None = None,
    ) -> None:
        """Record the clients' notes; then grant, attack, evaluate and record each target.

        Args:
            server_round: counted from 1.
            observations: of the updates that ``wants`` names.
            notes: what the clients told.
            unknown: clients whose samples nobody can know, beside those that say so themselves.
            num_updates: received in the round; the number of observations by default.
        """
        self._recorder.cost(server_round, "clients_wall_seconds", self._elapsed())
        for note in notes:
            self._recorder.note(server_round, note)
            self._tell_of_settings(server_round, note)
            self._tell_of_training(server_round, note)
        left_out = self._left_out(observations)
        for seen in observations:
            update, reason = seen.update, left_out.get(seen.client_id, "")
            self._recorder.client(
                server_round, seen.client_id, update.schedule, update.num_examples, reason
            )
        unknown = unknown | self.own_config_clients  # also of those whose note is missing now
        if self.keep is not None:
            self._keep(self.keep, server_round, observations, unknown)
        else:
            self.attack_round(server_round, observations, unknown)
        self._recorder.cost(server_round, "round_wall_seconds", self._elapsed())
        updates = len(observations) if num_updates is None else num_updates
        self.progress.line(
            f"{self._round_name(server_round)} · {count(updates, 'update')} · "
            f"{self._elapsed():.1f} s"
        )

    def attack_round(
        self, server_round: int, observations: list[Observation], unknown: Set[int] = frozenset()
    ) -> None:
        """Grant, attack, evaluate and record each target of a round.

        Args:
            server_round: counted from 1.
            observations: of the updates that ``wants`` names.
            unknown: clients whose samples nobody can know.
        """
        if self.attack is None:
            return
        targets = self._targets(server_round, observations)
        cases = [case for target in targets if (case := self._grant(target, unknown))]
        for case, answer in self._answers(server_round, self.attack, cases):
            self._record(case, answer)
        for name, source in self.what_ifs.items():
            self._ask(server_round, self.attack, name, source, cases)

    def recall(self, server_round: int, observations: list[Observation]) -> None:
        """Take a round that was attacked before into account where rounds are attacked jointly."""
        self._targets(server_round, observations)

    def assume(self, spec: InputSpec, batch_norm: BatchNormMode) -> None:
        """Attack what comes next under these facts about the inputs and the training."""
        self.spec = spec
        self.gradient_map = self.gradient_map.with_batch_norm(batch_norm)
        self._reference = self.reference or Reference.of(spec)

    def _keep(
        self,
        keep: KeptObservations,
        server_round: int,
        observations: list[Observation],
        unknown: Set[int],
    ) -> None:
        """Keep what would be attacked, with the truth where a simulation knows it."""
        chosen = self.selection(observations)
        if not chosen:
            return
        mode = self.gradient_map.batch_norm
        several = [Kept(seen, self.spec, mode, self._truth(seen, unknown)) for seen in chosen]
        dropped = keep.keep(server_round, several)
        kept = f"{count(len(several), 'update')} of round {server_round} kept to be attacked later"
        self._recorder.information(server_round, -1, kept)
        for sentence in dropped:
            self.warn(server_round, -1, sentence)

    def _truth(self, seen: Observation, unknown: Set[int]) -> Truth | None:
        if self.truth is None or seen.client_id in unknown:
            return None
        try:
            return self.truth(seen.server_round, seen.client_id, seen.update.num_examples)
        except ValueError as error:
            reason = f"no truth of client {seen.client_id} was kept: {error}"
            self.warn(seen.server_round, seen.client_id, reason)
            return None

    def _left_out(self, observations: list[Observation]) -> dict[int, str]:
        """Why clients are not attacked, in words, by client."""
        if self.attack is None and self.keep is None:
            return {seen.client_id: "no attack is configured" for seen in observations}
        return self.selection.left_out(observations)

    def _ask(
        self, server_round: int, attack: Attack, name: str, source: WhatIfSource, cases: list[Case]
    ) -> None:
        """Attack what the same updates would have been under a defense."""
        asked: list[Case] = []
        changes: list[float] = []
        for case in cases:
            seen = case.observation
            if case.truth is None:
                continue  # nobody knows the samples
            if seen.client_id < 0 or seen.earlier:
                message = f"what if {name} was not asked: that is for one client and one round"
                self.warn_once(server_round, seen.client_id, message)
                continue
            try:
                found = source(seen)
            except ValueError as error:
                reason = f"client {seen.client_id} was not attacked under {name}: {error}"
                self.warn(server_round, seen.client_id, reason)
                continue
            disclosed = disclose(seen, self.threat, self.gradient_map, found.truth)
            asked.append(Case(replace(seen, update=found.update, disclosed=disclosed), found.truth))
            changes.append(found.relative_change)
        answers = self._answers(server_round, attack, asked, f"what if {name}")
        for (case, answer), change in zip(answers, changes, strict=True):
            outcome = evaluate(answer, case.truth, self.evaluator, self.spec, self._reference)
            client_id = case.observation.client_id
            self._recorder.what_if(server_round, client_id, name, change, answer, outcome)

    def _tell_of_settings(self, server_round: int, note: ClientNote) -> None:
        """Say once that draws can be repeated, and what a client says of itself."""
        if note.reproducible and not self._told_of_seeds:
            self._told_of_seeds = True
            message = (
                "The defenses draw from a seed, so that the run can be repeated, and so can their "
                "noise: whoever knows the seed subtracts it. For simulations only; elsewhere "
                "leave ClientAudit(seed=None)."
            )
            if self.truth is None:
                self.warn(server_round, note.client_id, message)
            else:
                self._recorder.information(server_round, -1, message)
        if note.own_config:
            self.own_config_clients.add(note.client_id)
        else:
            self.own_config_clients.discard(note.client_id)
        if note.remark and self._remarks.get(note.client_id) != note.remark:
            self._remarks[note.client_id] = note.remark
            remark = f"client {note.client_id} says: {note.remark}"
            if note.own_config:
                remark += " Its samples are unknown here: nothing is measured against them."
            self.inform(server_round, note.client_id, remark)
        if note.explained and self._explained.get(note.client_id) != note.explained:
            self._explained[note.client_id] = note.explained
            if note.replay is None:  # else its number and its sentence are recorded
                said = f"client {note.client_id} says: {note.explained}."
                self.inform(server_round, note.client_id, said)

    def _tell_of_training(self, server_round: int, note: ClientNote) -> None:
        """Say once of a client where it trains otherwise than is assumed, or not as captured."""
        said = []
        assumed = self._assumed_of(note)
        if note.training is not None and assumed is not None:
            other = differences(note.training, *assumed)
            if other:
                said.append(
                    f"it trained with {'; '.join(other)}. An attack that assumes otherwise may "
                    f"fail, and that is no evidence of safety"
                )
        if note.replay is not None and not note.replay.explains:
            said.append(note.replay.sentence)
        for sentence in said:
            self.warn_once(server_round, note.client_id, f"client {note.client_id}: {sentence}.")

    def _assumed_of(
        self, note: ClientNote
    ) -> tuple[LocalSchedule, InputSpec, BatchNormMode] | None:
        """What an attack on the client assumes; ``None`` where there is none to be had."""
        schedule = self.schedule
        if isinstance(schedule, EpochSchedule):
            if note.training is None:
                return None
            # Its steps follow from its number of samples, which its facts do not tell.
            schedule = replace(schedule.for_client(1), num_steps=note.training.num_steps)
        return schedule, self.spec, self.gradient_map.batch_norm

    def _targets(self, server_round: int, observations: list[Observation]) -> list[Target]:
        chosen = self.selection(observations)
        try:
            return find_targets(chosen, self.threat, self.gradient_map, self._history)
        except ValueError as error:
            self.warn(server_round, -1, f"nothing was attacked: {error}")
            return []

    def _grant(self, target: Target, unknown: Set[int]) -> Case | None:
        """What the attack is given and measured against; ``None`` where there is no such thing.

        Args:
            target: what is attacked.
            unknown: the clients whose samples nobody else can know.
        """
        seen = target.observation
        source = None if unknown & {client for client, _ in target.members} else self.truth
        try:
            check_grantable(self.threat, source)
            return grant(target, self.threat, self.gradient_map, source)
        except ValueError as error:
            reason = f"client {seen.client_id} was not attacked, as there is no truth: {error}"
            self.warn(seen.server_round, seen.client_id, reason)
            return None

    def _answers(
        self, server_round: int, attack: Attack, cases: list[Case], what: str = ""
    ) -> list[tuple[Case, Reconstruction]]:
        """Each case with the attack's answer; all are attacked together."""
        if not cases:
            return []
        name = " · ".join(filter(None, (self._round_name(server_round), what)))
        self.progress.status(f"{name} · attack on {count(len(cases), 'update')}")
        seen = [case.observation for case in cases]
        job = AttackJob(
            self.gradient_map,
            self.spec,
            seen,
            self.threat,
            self.seed,
            max_seconds=self.max_seconds,
        )
        made = attempt(attack, job, self._reporter(name))
        if made.error:
            self.warn(server_round, -1, f"{what}: the attack failed: {made.error}".lstrip(": "))
        self._recorder.attempt(server_round, made, "what_if" if what else "attack")
        if said := describe_parts(made.answers):
            self._recorder.information(server_round, -1, f"{what}: {said}".lstrip(": "))
        return list(zip(cases, made.answers, strict=True))

    def _record(self, case: Case, answer: Reconstruction) -> None:
        server_round, client_id = case.observation.server_round, case.observation.client_id
        if answer.error:
            self.warn(server_round, client_id, f"client {client_id} not recovered: {answer.error}")
        outcome = evaluate(answer, case.truth, self.evaluator, self.spec, self._reference)
        if case.truth is not None:
            if self.evaluator is not None and self._shown != server_round:
                self._shown = server_round
                self._recorder.blind_guess(server_round, self._reference.guess)
            names = self._reference.class_names
            numbers = self.images.of(client_id, case.truth.private)
            self._recorder.samples(server_round, client_id, case.truth, names, numbers)
        self._recorder.outcome(server_round, client_id, answer, self.threat, outcome)
        decoded = self._decoder(case, answer) if self._decoder else None
        if decoded is not None:
            found = evaluate(decoded, case.truth, self.evaluator, self.spec, self._reference)
            self._recorder.decoded(server_round, client_id, decoded, found)

    def _reporter(self, name: str) -> ProgressCallback:
        def report(progress: AttackProgress) -> None:
            part = f"{progress.attack} · " if progress.attack else ""
            self.progress.status(
                f"{name} · attack on {progress.total:,} · {progress.done} done · {part}"
                f"iteration {progress.iteration}/{progress.iterations} · "
                f"objective {progress.objective:.3g}"
            )

        return report

    def _tell(self, server_round: int, message: str) -> None:
        first = next(iter(message.splitlines()), "")
        self.progress.line(f"{self._round_name(server_round)} · {plain_text(first, 200)}")

    def _elapsed(self) -> float:
        """Seconds since the round began."""
        return time.monotonic() - self._round_start

    def _round_name(self, server_round: int) -> str:
        if server_round == 0:
            return "before the rounds"
        total = f"/{self.num_rounds}" if self.num_rounds else ""
        return f"round {server_round}{total}"
