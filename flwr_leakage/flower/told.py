"""Audit on a server, with missing settings read from the notes that clients put beside their
updates.
"""

from collections import Counter
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace

from flwr_leakage.audit.assumed import Assumed, Inputs
from flwr_leakage.audit.note import ClientNote
from flwr_leakage.audit.server_audit import ServerAudit
from flwr_leakage.capture import TrainingFacts
from flwr_leakage.capture.facts import SEVERAL_LABELS
from flwr_leakage.normalization import BatchNormMode
from flwr_leakage.records import InputSpec, LocalSchedule, Observation

UNTOLD_SPEC = InputSpec((1, 1, 1), 1)
"""The audit's input spec as long as no client has told one. Nothing is attacked under this spec."""

UNTOLD_SCHEDULE = LocalSchedule(1.0)
"""The placeholder for the audit's schedule if the operator gave none. Each client is attacked under
the schedule that it told."""


@dataclass(frozen=True)
class Given:
    """The settings that the server's operator gives. A setting that is ``None`` is read from the
    note that each client puts beside its update.

    Attributes:
        spec: shapes, classes and normalisation of the inputs.
        schedule: the schedule of local training.
        batch_norm: the mode of BatchNorm in the clients' training.
        max_samples: the largest number of samples that the steps of an attacked client use, all
            steps together.
    """

    spec: InputSpec | None = None
    schedule: LocalSchedule | None = None
    batch_norm: BatchNormMode | None = None
    max_samples: int | None = None


@dataclass
class ToldAudit(ServerAudit):
    """A server audit that takes missing settings from each client's own account of its training.

    Clients may differ in their schedules, their inputs and their BatchNorm mode. Each client is
    attacked under its own account, so that a false account spoils no other client's audit. Inputs
    that the model does not accept, or that would need too much memory or time, are refused before
    anything is allocated.

    A client whose inputs fit no public normalisation, as after interpolation, is attacked under the
    normalisation that all other clients told, in this round or before. If they told several or
    none, all public normalisations are tried, and the one under which the attack fits the update
    best is used (:func:`flwr_leakage.attacks.by_fit.by_fit`).

    A mean update is attacked as if all its clients had trained as most of them said. A warning
    names each client whose account differs or is missing.

    Attributes:
        given: the operator's settings, which replace those of the clients.
    """

    given: Given = field(default_factory=Given)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._spared: dict[tuple[int, int], int] = {}
        # These are, by client id, the input specs of clients that told a public normalisation.
        self._specs: dict[int, InputSpec] = {}

    def spare(self, server_round: int, client_id: int, num_examples: int) -> None:
        """Note that a client with ``num_examples`` samples is not attacked in this round;
        :meth:`inspect` then records only its training.
        """
        self._spared[server_round, client_id] = num_examples

    def inspect(
        self,
        server_round: int,
        observations: list[Observation],
        notes: list[ClientNote],
        unknown: Set[int] = frozenset(),
        num_updates: int | None = None,
        inputs: Mapping[int, Inputs] | None = None,
    ) -> None:
        """Complete the observations with settings from the clients' notes, then attack as
        ``ServerAudit`` does.

        ``unknown`` are the clients whose samples an evaluator cannot know. ``num_updates`` is the
        number of updates that were aggregated; ``None`` if it is that of the observations.
        ``inputs`` are, by client id, the assumptions on inputs and loss that replace those that the
        client told.
        """
        facts = {note.client_id: note.training for note in notes}
        for (when, client_id), num_examples in self._spared.items():
            reason = self.selection.refuses(when, client_id) or "no attack is configured"
            told = self._schedule_of(facts.get(client_id))
            self._recorder.client((when, client_id), told, num_examples, reason)
        self._spared = {}
        self._remember(facts)
        assumed, refused = self._assume_all(observations, facts)
        if self.threat.view == "aggregate" and observations:
            assumed, refused = self._agree(server_round, observations, assumed, refused)
        attacked = []
        for seen in observations:
            client_id, update = seen.client_id, seen.update
            if reason := refused.get(client_id, ""):
                self.warn_once(
                    server_round, client_id, f"client {client_id} was not attacked: {reason}."
                )
                self._record_refused(seen, facts.get(client_id), reason)
                self._test_only(seen, facts.get(client_id), unknown)
                self._look_only(seen, facts.get(client_id), unknown)
                continue
            mixed = _mixes(facts.get(client_id))
            self._doubt(seen, assumed[client_id].schedule, facts.get(client_id))
            update = replace(update, schedule=assumed[client_id].schedule, mixed=mixed)
            attacked.append(replace(seen, update=update))
        told_inputs = {client: one.inputs for client, one in assumed.items()}
        super().inspect(
            server_round, attacked, notes, unknown, num_updates, {**told_inputs, **(inputs or {})}
        )

    def _doubt(
        self, seen: Observation, schedule: LocalSchedule, told: TrainingFacts | None
    ) -> None:
        """Warn if the schedule's steps do not use all samples of a client that told no number of
        steps.
        """
        count, used = seen.update.num_examples, schedule.num_samples_used(seen.update.num_examples)
        if (told is None or not told.num_steps) and used < count:
            self.warn_once(
                seen.server_round, seen.client_id,
                f"client {seen.client_id}: the schedule that observe was given trains on {used} of "
                f"its {count} samples, and the client does not tell its own. If it trains on more, "
                f"the attack fails, which is no evidence of safety: give a batch_size of "
                f"{count} or more.",
            )  # fmt: skip

    def _remember(self, facts: Mapping[int, TrainingFacts | None]) -> None:
        """Remember the public normalisations that clients told, for the attack on clients that told
        none.

        ``facts`` are, by client id, what each client told about its training.
        """
        for client_id, told in facts.items():
            with suppress(ValueError):  # a client that told no input spec is skipped
                if (spec := _of(told).spec()).known:
                    self._specs[client_id] = spec

    def _pooled(self, spec: InputSpec) -> InputSpec:
        """Return the spec of a client's inputs, with the normalisation that other clients told if
        its own is not known.

        A spec whose normalisation is known is returned as it is. If other clients with inputs of
        the same shape told several normalisations, the spec gets the most common one with ``known``
        false, so that an attack tries it first and other public ones afterwards.
        """
        if spec.known:
            return spec
        alike = (spec.shape, spec.num_classes)
        told = Counter(
            (one.mean, one.std)
            for one in self._specs.values()
            if (one.shape, one.num_classes) == alike
        )
        for (mean, std), _ in told.most_common(1):
            return replace(spec, mean=mean, std=std, known=len(told) == 1)
        return spec

    def _test_only(self, seen: Observation, told: TrainingFacts | None, unknown: Set[int]) -> None:
        """Test candidate samples for membership in an update that is not attacked.

        Nothing is done if the client's training is not known. ``unknown`` are the clients whose
        samples an evaluator cannot know.
        """
        if self.candidates is None or self.threat.view == "aggregate":
            return
        optimizer = "SGD"
        try:
            one = self._assume(told)
        # ``inspect`` records this error as the reason why the client is not attacked
        except ValueError:
            if told is None or told.optimizer == "SGD":
                return
            try:
                one = self._told_steps(told)
            # The client told no steps or no inputs, without which nothing can be tested.
            except ValueError:
                return
            optimizer = told.optimizer
        update = replace(seen.update, schedule=one.schedule, mixed=_mixes(told))
        complete = replace(seen, update=update)
        inputs, unknown = {seen.client_id: one.inputs}, unknown | self.own_config_clients
        self.test_members(seen.server_round, [complete], unknown, inputs, optimizer)

    def _record_refused(self, seen: Observation, told: TrainingFacts | None, reason: str) -> None:
        """Record why a client is not attacked, and its training as far as the client told it."""
        done, optimizer = self._schedule_of(told), "SGD"
        if done is None and told is not None and told.num_steps:
            done, optimizer = _steps_of(told), told.optimizer
        where, count = (seen.server_round, seen.client_id), seen.update.num_examples
        self._recorder.client(where, done, count, reason, optimizer)

    def _look_only(self, seen: Observation, told: TrainingFacts | None, unknown: Set[int]) -> None:
        """Infer the labels in an update of too many samples for attacks, if the client told its
        steps.

        ``unknown`` are the clients whose samples an evaluator cannot know.
        """
        if self.large_clients is None or self.threat.view == "aggregate":
            return
        count = seen.update.num_examples
        if not self.large_clients.includes(seen.server_round, count):
            return
        try:
            training = _of(told)
            one = self._told_steps(training)
        except ValueError as error:
            self._recorder.labels((seen.server_round, seen.client_id), str(error))
            return
        complete = replace(seen, update=replace(seen.update, schedule=one.schedule))
        unknown = unknown | self.own_config_clients
        self.look_at_large(complete, one.inputs, unknown, training.optimizer)

    def _told_steps(self, told: TrainingFacts) -> Assumed:
        """Return the steps that a client told and the facts on its inputs, whatever its optimizer.

        The steps, with their learning rate and batch size, are as the client told. The facts are
        the inputs' shape, classes and normalisation, and the BatchNorm mode: those given to the
        audit, or else those that the client told.

        Raises:
            ValueError: no facts of the inputs are given or told, or the client told no steps.
        """
        spec = self.given.spec or told.spec()
        if not told.num_steps:
            raise ValueError("it told neither its steps nor its batch size")
        mode = self.given.batch_norm or ("batch" if told.batch_norm == "batch" else "running")
        own = self.has_own_loss
        return Assumed(_steps_of(told), spec, mode, self._smoothing(told), own)

    def _smoothing(self, told: TrainingFacts | None) -> float:
        """Return the label smoothing that a client told; 0 if it told none, or the operator gave a
        loss.
        """
        return 0.0 if told is None or self.has_own_loss else told.label_smoothing

    def _assume_all(
        self, observations: list[Observation], facts: Mapping[int, TrainingFacts | None]
    ) -> tuple[dict[int, Assumed], dict[int, str]]:
        """Return the assumptions of an attack on each client, and why others cannot be attacked.

        Both results are keyed by client id. ``facts`` are those that clients told about their
        training.
        """
        assumed, refused = {}, {}
        for seen in observations:
            client_id = seen.client_id
            try:
                one = self._assume(facts.get(client_id))
                self._check(one)
                assumed[client_id] = one
            except ValueError as error:
                refused[client_id] = str(error).rstrip(".")
            # An error in one client's account must not stop the audit of other clients.
            except Exception as error:
                refused[client_id] = f"{type(error).__name__}: {error}"
        return assumed, refused

    def _agree(
        self,
        server_round: int,
        observations: list[Observation],
        assumed: Mapping[int, Assumed],
        refused: Mapping[int, str],
    ) -> tuple[dict[int, Assumed], dict[int, str]]:
        """Return the common assumptions about all clients of a mean update, or why it is refused.

        The assumptions are the schedule, the inputs and the BatchNorm mode that more than half of
        the clients told. If a client truly trained otherwise, the attack may fail; a false account
        of a minority changes nothing. The mean is refused if no such majority agrees, or if the
        steps of all clients use more than ``max_samples`` samples. Both results, the assumptions
        and the reasons of a refusal, are keyed by client id, and one of them is empty. ``assumed``
        are the assumptions about each client, and ``refused`` the reasons why some have none.
        """
        clients = [seen.client_id for seen in observations]
        common, count = Counter(assumed.values()).most_common(1)[0] if assumed else (None, 0)
        if common is None or 2 * count <= len(clients):
            first = f"; client {min(refused)}: {min(refused.items())[1]}" if refused else ""
            reason = f"no majority of the {len(clients)} clients in the mean update agrees{first}"
            return {}, {client: refused.get(client, reason) for client in clients}
        used = len(clients) * _samples_of(common.schedule)
        if self._is_too_large(used):
            reason = (
                f"the steps of the {len(clients)} clients in the mean update use {used:,} samples, "
                f"more than max_samples={self.given.max_samples}"
            )
            return {}, dict.fromkeys(clients, reason)
        for client in clients:
            if assumed.get(client) != common:
                other = refused.get(client, "another schedule or other inputs")
                self._recorder.trained_otherwise((server_round, client), [other])
                self.warn_once(
                    server_round, client,
                    f"client {client} is in a mean update that is attacked as if it had trained "
                    f"like most, and it says otherwise: "
                    f"{other}. An attack that fails is no evidence of safety.",
                )  # fmt: skip
        self.assume(common.inputs)
        return dict.fromkeys(clients, common), {}

    def _schedule_of(self, told: TrainingFacts | None) -> LocalSchedule | None:
        """Return the operator's schedule, or else the one that the client told, or else ``None``.

        ``None`` is returned, too, if no schedule can express the client's training.
        """
        if self.given.schedule or told is None:
            return self.given.schedule
        try:
            return told.schedule()
        except ValueError:
            return None

    def _assume(self, told: TrainingFacts | None) -> Assumed:
        """Return the assumptions of an attack on a client.

        Each assumption is the operator's setting; if the operator gave none, it is the setting that
        the client told.

        Raises:
            ValueError: a setting is neither given nor told.
        """
        given = self.given
        if told is None and (given.spec is None or given.schedule is None):
            raise ValueError("it told nothing of its training; give observe a spec and a schedule")
        spec = given.spec or self._pooled(_of(told).spec())
        schedule = given.schedule or _of(told).schedule()
        mode = given.batch_norm or "running"
        if given.batch_norm is None and told is not None and told.batch_norm == "batch":
            mode = "batch"
        return Assumed(schedule, spec, mode, self._smoothing(told), self.has_own_loss)

    def _check(self, one: Assumed) -> None:
        """Check that an attack would not take too long, and that the model accepts the assumed
        inputs.

        Raises:
            ValueError: the steps use more samples than ``max_samples``, or the model does not
                accept inputs of the told shape, or has another number of classes.
        """
        schedule = one.schedule
        if self._is_too_large(used := _samples_of(schedule)):
            raise ValueError(
                f"its {schedule.num_steps} steps of {schedule.batch_size} samples use {used:,}, "
                f"more than max_samples={self.given.max_samples}"
            )
        if self.given.spec is None and (self.attack is not None or self.keep is not None):
            needs = self._trials.needs(self.gradient_map.with_batch_norm(one.batch_norm), one.spec)
            if needs.num_classes != one.spec.num_classes:
                raise ValueError(
                    f"the model has {needs.num_classes} classes, and it told {one.spec.num_classes}"
                )

    def _is_too_large(self, used: int) -> bool:
        limit = self.given.max_samples
        return self.attack is not None and limit is not None and used > limit

    def _assumed_of(self, note: ClientNote) -> Assumed | None:
        try:
            return self._assume(note.training)
        # ``inspect`` records this error as the reason why the client is not attacked
        except ValueError:
            return None


def _samples_of(schedule: LocalSchedule) -> int:
    return schedule.num_steps * schedule.batch_size


def _mixes(told: TrainingFacts | None) -> bool:
    """Return whether a client's loss takes several labels for an input, as with MixUp."""
    return told is not None and told.loss == SEVERAL_LABELS


def _of(told: TrainingFacts | None) -> TrainingFacts:
    if told is None:
        raise ValueError("it told nothing of its training")
    return told


def _steps_of(told: TrainingFacts) -> LocalSchedule:
    """Return a schedule with the steps, batch size and learning rate that a client told, whatever
    its optimizer.
    """
    return LocalSchedule(
        told.learning_rate, told.num_steps, told.batch_size, told.momentum, told.weight_decay
    )
