"""A server's audit that takes from the clients' notes what its operator did not say."""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from flwr_leakage.audit.note import ClientNote
from flwr_leakage.audit.server_audit import ServerAudit
from flwr_leakage.capture import TrainingFacts
from flwr_leakage.metrics import Reference
from flwr_leakage.normalization import BatchNormMode
from flwr_leakage.records import InputSpec, LocalSchedule, Observation

UNTOLD_SPEC = InputSpec((1, 1, 1), 1)
"""In the place of inputs that no client has told of yet; nothing is attacked before."""

UNTOLD_SCHEDULE = LocalSchedule(1.0)
"""In the place of a schedule that each client tells."""


@dataclass(frozen=True)
class Given:
    """What the operator of the server said; ``None`` is taken from what clients tell.

    Attributes:
        spec: of the inputs.
        schedule: of local training.
        batch_norm: the mode that the clients train in.
        max_samples: most samples that a client's steps use for it to be attacked.
    """

    spec: InputSpec | None = None
    schedule: LocalSchedule | None = None
    batch_norm: BatchNormMode | None = None
    max_samples: int | None = None


@dataclass(frozen=True)
class _Assumed:
    """What an attack on one client assumes."""

    spec: InputSpec
    schedule: LocalSchedule
    batch_norm: BatchNormMode


@dataclass
class ToldAudit(ServerAudit):
    """Completes each observation by what its client told of its training.

    Clients may differ in their schedules. Where they differ in the inputs or the BatchNorm mode,
    those that are like most are attacked, and the others are recorded.

    Attributes:
        given: what is not taken from the clients.
    """

    given: Given = field(default_factory=Given)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._spared: dict[tuple[int, int], int] = {}

    def spare(self, server_round: int, client_id: int, num_examples: int) -> None:
        """Remember a client that is not attacked; ``inspect`` records what it tells."""
        self._spared[server_round, client_id] = num_examples

    def inspect(
        self,
        server_round: int,
        observations: list[Observation],
        notes: list[ClientNote],
        unknown: Set[int] = frozenset(),
        num_updates: int | None = None,
    ) -> None:
        """Complete the observations, then go on as always."""
        facts = {note.client_id: note.training for note in notes}
        for (when, client_id), num_examples in self._spared.items():
            reason = self.selection.refuses(when, client_id) or "no attack is configured"
            told = self._schedule_of(facts.get(client_id))
            self._recorder.client(when, client_id, told, num_examples, reason)
        self._spared = {}
        assumed, refused = self._assume_all(observations, facts)
        kinds = Counter((one.spec, one.batch_norm) for one in assumed.values())
        for (spec, mode), _ in kinds.most_common(1):
            self.spec = spec
            self._reference = self.reference or Reference.of(spec)
            self.gradient_map = self.gradient_map.with_batch_norm(mode)
        usual = (self.spec, self.gradient_map.batch_norm)
        for client_id, one in assumed.items():
            if (one.spec, one.batch_norm) != usual:
                refused[client_id] = "most have other inputs"
        if self.threat.view == "aggregate" and (reason := self._against_mean(assumed, refused)):
            refused = dict.fromkeys(assumed, reason) | refused
        attacked = []
        for seen in observations:
            client_id, update = seen.client_id, seen.update
            if reason := refused.get(client_id, ""):
                self.warn_once(
                    server_round, client_id, f"client {client_id} was not attacked: {reason}."
                )
                told = self._schedule_of(facts.get(client_id))
                self._recorder.client(server_round, client_id, told, update.num_examples, reason)
                continue
            update = replace(update, schedule=assumed[client_id].schedule)
            attacked.append(replace(seen, update=update))
        super().inspect(server_round, attacked, notes, unknown, num_updates)

    def _assume_all(
        self, observations: list[Observation], facts: Mapping[int, TrainingFacts | None]
    ) -> tuple[dict[int, _Assumed], dict[int, str]]:
        """By client, what is assumed of it, or why it cannot be attacked."""
        assumed, refused = {}, {}
        for seen in observations:
            try:
                one = self._assume(facts.get(seen.client_id))
                self._check_size(one.schedule)
                assumed[seen.client_id] = one
            except ValueError as error:
                refused[seen.client_id] = str(error)
        return assumed, refused

    def _schedule_of(self, told: TrainingFacts | None) -> LocalSchedule | None:
        """What is given, else what a client told, if a schedule says it."""
        if self.given.schedule or told is None:
            return self.given.schedule
        return None if told.unscheduled else told.schedule()

    def _assume(self, told: TrainingFacts | None) -> _Assumed:
        """What a client told, and what was given in its place.

        Raises:
            ValueError: something is neither given nor told.
        """
        given = self.given
        if told is None and (given.spec is None or given.schedule is None):
            raise ValueError("it told nothing of its training; give observe a spec and a schedule")
        spec = given.spec or _of(told).spec()
        schedule = given.schedule or _of(told).schedule()
        mode = given.batch_norm or "running"
        if given.batch_norm is None and told is not None and told.batch_norm == "batch":
            mode = "batch"
        return _Assumed(spec, schedule, mode)

    def _check_size(self, schedule: LocalSchedule) -> None:
        """Refuse an attack that would take too long.

        Raises:
            ValueError: the steps use more than ``max_samples``.
        """
        if self._is_too_large(used := _samples_of(schedule)):
            raise ValueError(
                f"its {schedule.num_steps} steps of {schedule.batch_size} samples use {used:,}, "
                f"more than max_samples={self.given.max_samples}"
            )

    def _against_mean(self, assumed: Mapping[int, _Assumed], refused: Mapping[int, str]) -> str:
        """Why a mean update cannot be attacked: it is of all clients, or of none."""
        if refused:
            return f"the mean update holds that of client {min(refused)}, which cannot be"
        used = sum(_samples_of(one.schedule) for one in assumed.values())
        if self._is_too_large(used):
            return (
                f"the steps of the {len(assumed)} clients in the mean update use {used:,} samples, "
                f"more than max_samples={self.given.max_samples}"
            )
        return ""

    def _is_too_large(self, used: int) -> bool:
        limit = self.given.max_samples
        return self.attack is not None and limit is not None and used > limit

    def _assumed_of(
        self, note: ClientNote
    ) -> tuple[LocalSchedule, InputSpec, BatchNormMode] | None:
        try:
            one = self._assume(note.training)
        except ValueError:  # recorded by ``inspect``
            return None
        return one.schedule, one.spec, one.batch_norm


def _samples_of(schedule: LocalSchedule) -> int:
    return schedule.num_steps * schedule.batch_size


def _of(told: TrainingFacts | None) -> TrainingFacts:
    if told is None:
        raise ValueError("it told nothing of its training")
    return told
