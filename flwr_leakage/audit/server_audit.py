"""Attack the updates that an honest-but-curious server observes, round by round."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.nn import functional as F

from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.labels.rehearsed import LabelEstimate
from flwr_leakage.attacks.one_by_one import NORMALISATION
from flwr_leakage.attacks.parallel import RETRIED
from flwr_leakage.audit.assumed import Assumed, Inputs
from flwr_leakage.audit.attack import attempt, describe_parts
from flwr_leakage.audit.candidates import Candidates
from flwr_leakage.audit.decoding import Decoder
from flwr_leakage.audit.evaluate import evaluate
from flwr_leakage.audit.grant import Case, check_grantable, disclose, grant
from flwr_leakage.audit.kept import Kept, KeptObservations
from flwr_leakage.audit.large_clients import LabelRound, LargeClients, Probed, attack_probe, probes
from flwr_leakage.audit.needs import Trials
from flwr_leakage.audit.note import ClientNote
from flwr_leakage.audit.progress import Progress, SilentProgress, attack_reporter, count
from flwr_leakage.audit.record import Recorder
from flwr_leakage.audit.selection import Selection
from flwr_leakage.audit.targets import History, Target, find_targets
from flwr_leakage.audit.truth import ImageNumbers, Truth, TruthSource
from flwr_leakage.audit.turns import Once, in_turns, least, seconds_each
from flwr_leakage.audit.what_if import WhatIfSource
from flwr_leakage.capture.glance import some
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.measurements import KEPT_FOR_LATER, NOT_TESTED
from flwr_leakage.metrics import Evaluator, Reference
from flwr_leakage.metrics.labels import class_indices
from flwr_leakage.records import InputSpec, Observation, Reconstruction, ThreatModel
from flwr_leakage.schedules import EpochSchedule, Schedule
from flwr_leakage.tracking import GuardedTracker, JsonlTracker, Tracker
from flwr_leakage.tracking.text import plain_text

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class _Round:
    """The attack on the updates of one round, with the budget of CPU seconds that it may still
    take.
    """

    server_round: int
    attack: Attack
    budget: Budget


@dataclass
class ServerAudit:
    """The audit of an honest-but-curious server, which attacks and records updates in each round.

    Attributes:
        gradient_map: the public model and loss, with BatchNorm in the mode of the clients'
            training.
        spec: shapes, classes and normalisation of the inputs.
        schedule: the clients' local training, which the server sets: by steps or by epochs.
        tracker: the tracker that stores numbers, events and images.
        run: the run's name.
        attack: the attack; ``None`` to record only scores and failures.
        threat: the facts that the attacker is assumed to know, and whether it sees single updates
            or a mean.
        selection: the clients and rounds to attack.
        evaluator: the object that compares reconstructions with the true samples, where these are
            known.
        truth: the source of the clients' true samples; ``None`` outside of simulations, where
            labels and BatchNorm statistics cannot be granted either. The source is not asked about
            clients that say that they run by a config of their own.
        reference: the reconstruction without any attack, and the pool of other images, with which
            reconstructions are compared; by default the mean colour, and no pool.
        what_ifs: by name, defenses under which each update is computed anew. Such an update is
            attacked in the same round and recorded under names of its own; training never uses it.
        seed: the seed of the attack's random draws.
        progress: the display of the progress.
        num_rounds: the number of rounds, for the progress only.
        max_seconds: the CPU seconds that the attack may take for each target; ``None`` for no limit
            but the attack's own.
        what_if_max_seconds: the CPU seconds that the attack on an update under one of ``what_ifs``
            may take, if that is less than ``max_seconds``; ``None`` for ``max_seconds``.
        max_round_seconds: the CPU seconds that attacks may take in a round, for all targets
            together; ``None`` for no limit. Once they are spent, the other targets are recorded as
            not attacked; the order of targets is drawn anew in each round.
        max_bytes: the bytes that the attack on a target may need; ``None`` for no limit. They are
            estimated from the model, the shape of an input and the number of samples. A target
            beyond the limit is recorded as not attacked.
        keep: the store of observations to be attacked later, see ``attack_kept``; ``None`` attacks
            within the round.
        candidates: samples that are tested for membership in each update, even in updates that are
            too large to be attacked; ``None`` for none. The tests of a round may take
            ``max_round_seconds`` of their own.
        large_clients: the settings for updates of many images, of which only class counts are
            inferred; ``None`` for none.
        own_config_clients: the clients that have said that they run by a config of their own.
        images: the numbers that identify the images so far; set this attribute to continue the
            numbers of an earlier audit.
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
    what_if_max_seconds: float | None = None
    max_round_seconds: float | None = None
    max_bytes: int | None = None
    keep: KeptObservations | None = None
    candidates: Candidates | None = None
    large_clients: LargeClients | None = field(default_factory=LargeClients)

    def __post_init__(self) -> None:
        if not isinstance(self.threat, ThreatModel):
            raise TypeError(
                f"threat must be a ThreatModel, such as ThreatModel(view='aggregate'), got "
                f"{self.threat!r}."
            )
        check_grantable(self.threat, self.truth)
        for name in ("max_seconds", "what_if_max_seconds", "max_round_seconds", "max_bytes"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} must be positive or None, got {limit}.")
        self._given = self.gradient_map
        self._usual = Inputs(self.spec, self.gradient_map.batch_norm)
        self._trials = Trials(self.max_bytes, self.max_seconds)
        self._history = History(self.threat.rounds)
        self._decoder = Decoder(self.spec, self.seed) if self.threat.mixing == "known" else None
        self._reference = self.reference or Reference.of(self.spec)
        guarded = GuardedTracker(self.tracker, self.progress.line)
        self._recorder = Recorder(guarded, self.run, self.spec.sample)
        self.images = ImageNumbers()
        self._told_of_seeds = False
        self._told_of_room = False
        self.own_config_clients: set[int] = set()
        self._once = Once()
        self._round_start = time.monotonic()
        self._tests = Budget.of(self.max_round_seconds)
        self._labels: LabelRound | None = None
        self._probed = False
        self._shown = 0  # the latest round whose blind guess was recorded

    @property
    def has_own_loss(self) -> bool:
        """Return whether the audit was given another loss than the mean cross-entropy."""
        return self._given.loss is not F.cross_entropy

    @property
    def draws(self) -> bool:
        """Return whether the audit may draw random numbers from a generator of the whole process.

        An attack may draw from one, and so may a tracker, a display or a selection of the user's
        own. A subclass that calls further objects overrides this property.
        """
        parts = (self.tracker, self.progress, self.selection)
        own = tuple(map(type, parts)) == (JsonlTracker, SilentProgress, Selection)
        works = self.attack is not None or self.keep is not None or self.candidates is not None
        return works or not own

    def begin_round(self, server_round: int) -> None:
        """Note that a round begins now, and reset the CPU seconds of its membership tests."""
        self._round_start = time.monotonic()
        self._tests = Budget.of(self.max_round_seconds)
        self._labels = None
        self.progress.status(f"{self._round_name(server_round)} · clients train")

    def warn(self, server_round: int, client_id: int, message: str) -> None:
        """Record a warning: something went wrong, and the run goes on.

        ``client_id`` is −1 if the warning is about no client. The text may come from a client.
        """
        self._recorder.warning(server_round, client_id, plain_text(message))
        self._tell(server_round, message)

    def error(self, server_round: int, message: str) -> None:
        """Record an error that ends the run, or makes its records worthless."""
        self._recorder.error(server_round, plain_text(message))
        self._tell(server_round, message)

    def inform(self, server_round: int, client_id: int, message: str) -> None:
        """Record a message that reports no failure; ``client_id`` is −1 for no client."""
        self._recorder.information(server_round, client_id, plain_text(message))

    def wants(self, server_round: int, client_id: int) -> bool:
        """Return whether a client's update may be attacked in a round, and so must be observed."""
        attacks = self.attack is not None or self.keep is not None or self.candidates is not None
        return attacks and self.selection.includes(server_round, client_id)

    def warn_once(self, server_round: int, client_id: int, message: str) -> None:
        """Record a warning about a client, unless the same warning was recorded before.

        The number of different messages about a client is limited.
        """
        if said := self._once.says(client_id, message):
            self.warn(server_round, client_id, said)

    def inform_once(self, server_round: int, client_id: int, message: str) -> None:
        """Record a message about a client, unless the same message was recorded before.

        The number of different messages about a client is limited.
        """
        if said := self._once.says(client_id, message):
            self.inform(server_round, client_id, said)

    def learn_from(self, names: Collection[str]) -> None:
        """Restrict later attacks to the named parameters, the only ones that clients send.

        Attacks assume that the other parameters have the values of the given model.
        """
        trained = self.gradient_map.with_trained(names)
        if trained.trained != self.gradient_map.trained:
            self.gradient_map = trained

    def spare(self, server_round: int, client_id: int, num_examples: int) -> None:
        """Record that a client's update was not observed, and the reason why it is not attacked."""
        unconfigured = "no attack is configured"
        reason = self.selection.refuses(server_round, client_id) if self.attack else unconfigured
        schedule = self.schedule.for_client(num_examples)
        self._recorder.client((server_round, client_id), schedule, num_examples, reason)

    def utility(
        self,
        server_round: int,
        name: str,
        value: float | None,
        unit: str = "1",
        note: str = "",
    ) -> None:
        """Record a quantity of the global model, such as its test accuracy.

        ``value`` is ``None`` if the quantity is not known, and the unit of a pure number is 1.
        ``note`` tells the value's source, or why it is not known.
        """
        self._recorder.utility(server_round, name, value, unit, note)

    def inspect(
        self,
        server_round: int,
        observations: list[Observation],
        notes: list[ClientNote],
        unknown: Set[int] = frozenset(),
        num_updates: int | None = None,
        inputs: Mapping[int, Inputs] | None = None,
    ) -> None:
        """Record the clients' notes, then attack the selected updates, and evaluate and record
        each.

        Args:
            server_round: the number of the round, from 1.
            observations: the updates for which ``wants`` returned true.
            notes: the clients' notes.
            unknown: the ids of clients whose true samples nobody can know, beside those whose notes
                say that they run by a config of their own.
            num_updates: the number of updates received in the round; ``None`` for the number of
                observations.
            inputs: by client id, the input spec and the BatchNorm mode that an attack assumes in
                the place of ``spec`` and the model's mode.
        """
        inputs = inputs or {}
        self._recorder.cost(server_round, "clients_wall_seconds", self._elapsed())
        sizes = {seen.client_id: seen.update.num_examples for seen in observations}
        for note in notes:
            size = sizes.get(note.client_id)
            self._of_client(server_round, note.client_id, self._hear, server_round, note, size)
        left_out = self._left_out(observations)
        for seen in observations:
            where, reason = (server_round, seen.client_id), left_out.get(seen.client_id, "")
            self._recorder.client(where, seen.update.schedule, seen.update.num_examples, reason)
        # Nobody knows the samples of clients with a config of their own either. A client that said
        # so in an earlier round may have sent no note in this one.
        unknown = unknown | self.own_config_clients
        self.test_members(server_round, observations, unknown, inputs)
        for seen in observations:
            assumed = inputs.get(seen.client_id, self._usual)
            self.look_at_large(seen, assumed, unknown, is_attacked=seen.client_id not in left_out)
        if self.keep is not None:
            self._keep(self.keep, server_round, observations, unknown, inputs)
        else:
            self.attack_round(server_round, observations, unknown, inputs)
        self._recorder.cost(server_round, "round_wall_seconds", self._elapsed())
        updates = len(observations) if num_updates is None else num_updates
        self.progress.line(
            f"{self._round_name(server_round)} · {count(updates, 'update')} · "
            f"{self._elapsed():.1f} s"
        )

    def attack_round(
        self,
        server_round: int,
        observations: list[Observation],
        unknown: Set[int] = frozenset(),
        inputs: Mapping[int, Inputs] | None = None,
    ) -> None:
        """Attack the selected updates of a round, and evaluate and record each.

        ``unknown`` are the ids of clients whose true samples nobody can know. ``inputs`` are, by
        client id, the input spec and BatchNorm mode to assume instead of the audit's own.
        """
        if self.attack is None:
            return
        usual = self._usual
        cases: list[tuple[Inputs, Case]] = []
        for target in self._targets(server_round, observations):
            client = target.observation.client_id
            assumed = (inputs or {}).get(client, usual)
            case = self._of_client(server_round, client, self._prepare, target, assumed, unknown)
            cases += [(assumed, case)] if case else []
        budget = Budget.of(self.max_round_seconds)
        seconds = self.max_seconds
        if seconds is not None:
            seconds += len(self.what_ifs) * min(seconds, self.what_if_max_seconds or seconds)
        left = {id(case): case for _, case in cases}
        for part in in_turns(cases, budget, seconds, f"{self.seed}-{server_round}"):
            for assumed in dict.fromkeys(assumed for assumed, _ in part):
                self.assume(assumed)
                alike = [case for other, case in part if other == assumed]
                for together in self._trials.together(self.gradient_map, self.spec, alike):
                    self._attack(_Round(server_round, self.attack, budget), together)
            for _, case in part:
                del left[id(case)]
        if left:
            spent = f"the round's {self.max_round_seconds:g} CPU seconds were spent on others"
            for case in left.values():
                self._recorder.not_attacked(case.observation, spent)
            said = f"{len(left)} of {count(len(cases), 'target')} were not attacked: {spent}"
            self.warn(server_round, -1, f"{said} (max_round_seconds).")

    def test_members(
        self,
        server_round: int,
        observations: list[Observation],
        unknown: Set[int],
        inputs: Mapping[int, Inputs],
        optimizer: str = "SGD",
    ) -> None:
        """Test whether the candidate samples were used for the clients' updates, and record
        p-values.

        Each update is tested by itself; if the attacker sees only their mean, the mean is tested.

        Args:
            server_round: the number of the round, from 1.
            observations: the updates that are tested, attacked or not.
            unknown: the ids of clients whose true samples nobody can know, to compare the results
                with.
            inputs: by client id, a client's input spec and BatchNorm mode. Other clients have the
                audit's own ``spec`` and mode.
            optimizer: the class name of the optimizer with which these clients trained.
        """
        chosen = [o for o in observations if self.selection.includes(o.server_round, o.client_id)]
        if self.candidates is None or not chosen:
            return
        usual = self._usual
        parts = [[seen] for seen in chosen]
        if self.threat.view == "aggregate":
            parts = [chosen]
        for part in parts:
            client = part[0].client_id if len(parts) > 1 or len(part) == 1 else -1
            if self._tests.is_spent:
                spent = f"the round's {self.max_round_seconds:g} CPU seconds of tests were spent"
                self.warn_once(server_round, client, f"candidates were not tested: {spent}.")
                return
            assumed = inputs.get(part[0].client_id, usual)
            self._of_client(server_round, client, self._test, part, assumed, unknown, optimizer)

    def look_at_large(
        self,
        seen: Observation,
        assumed: Inputs,
        unknown: Set[int],
        optimizer: str = "SGD",
        is_attacked: bool = False,
    ) -> None:
        """Infer the number of samples of each class behind an update of many images, and record it.

        The update is ``seen``. In a simulation, the update of one step on a few of the images is
        attacked, too, unless ``is_attacked`` says that ``seen`` itself is. ``assumed`` are the
        input spec and the BatchNorm mode, ``unknown`` the clients whose true samples nobody can
        know, and ``optimizer`` is the class name of the client's optimizer.
        """
        if self.large_clients is None or self.threat.view == "aggregate":
            return
        if seen.update.num_examples < self.large_clients.min_examples:
            return
        arguments = seen, assumed, unknown, optimizer, is_attacked
        with torch.random.fork_rng(devices=[]):  # a user's model may draw random numbers in a pass
            self._of_client(seen.server_round, seen.client_id, self._look_at_large, *arguments)

    def _look_at_large(
        self,
        seen: Observation,
        assumed: Inputs,
        unknown: Set[int],
        optimizer: str,
        is_attacked: bool,
    ) -> None:
        large, count = self.large_clients, seen.update.num_examples
        assert large is not None
        spec, gradient_map = assumed.spec, assumed.map_of(self._given)
        probes_it = large.probe_sizes and self.attack is not None and not self._probed
        probes_it = probes_it and not is_attacked and self.evaluator is not None
        infers = large.includes(seen.server_round, count)
        if not (probes_it or infers):
            return
        truth = None
        if self.truth is not None and seen.client_id not in unknown:
            with suppress(ValueError):  # the record of an attack reports a missing truth already
                truth = self.truth(seen.server_round, seen.client_id, count)
        if infers:
            self._labels = self._labels or LabelRound(large, self.seed)
            began = time.process_time()
            true: list[int] | None = None
            if truth is not None and len(truth.private) == count:
                held = class_indices(truth.private.targets)
                true = torch.bincount(held, minlength=spec.num_classes).tolist()
            try:
                found: LabelEstimate | str = self._labels.infer(
                    gradient_map, spec, seen, optimizer, self._trials
                )
            except ValueError as error:
                found = str(error)
            self._recorder.labels((seen.server_round, seen.client_id), found, true)
            seconds = time.process_time() - began
            self._recorder.cost(seen.server_round, "labels_cpu_seconds", seconds, seen.client_id)
        if probes_it and truth is not None:
            self._probed = True
            self._probe(gradient_map, spec, seen, truth, large)

    def _probe(
        self,
        gradient_map: GradientMap,
        spec: InputSpec,
        seen: Observation,
        truth: Truth,
        large: LargeClients,
    ) -> None:
        """Attack updates of one step on a few of a client's images, and record the results.

        ``seen`` is the client's update, and ``truth`` holds its images. There is a step for each
        number of images in ``large.probe_sizes``.
        """
        assert self.attack is not None
        reference = self.reference or Reference.of(spec)
        made: list[Probed] = []
        try:
            for one, shown in probes(gradient_map, seen, truth, large.probe_sizes):
                if self._trials.refusal(gradient_map, spec, one):
                    return
                threat, seconds = replace(self.threat, rounds=1), large.probe_seconds
                job = AttackJob(gradient_map, spec, [one], threat, self.seed, max_seconds=seconds)
                made.append(attack_probe(self.attack, job, shown, self.evaluator, reference))
        finally:
            self._recorder.probes((seen.server_round, seen.client_id), made)

    def _test(
        self, part: list[Observation], assumed: Inputs, unknown: Set[int], optimizer: str
    ) -> None:
        """Test the candidates for membership in one update, or the mean of several, in ``part``.

        ``assumed`` are the inputs' spec and BatchNorm mode, ``unknown`` are the clients whose true
        samples nobody can know, and ``optimizer`` is the class name of the clients' optimizer.
        """
        assert self.candidates is not None
        spec, gradient_map = assumed.spec, assumed.map_of(self._given)
        threat = ThreatModel(view=self.threat.view)
        began = time.process_time()
        try:
            (target,) = find_targets(part, threat, gradient_map, History())
            seen = target.observation
            made = self.candidates.examine(gradient_map, spec, seen, self.seed, optimizer)
        except ValueError as error:
            first = part[0]
            message = f"{NOT_TESTED} for client {first.client_id}: {error}"
            self.warn_once(first.server_round, first.client_id, message)
            return
        if doubt := self.candidates.doubts(spec):
            self.warn_once(seen.server_round, seen.client_id, f"client {seen.client_id}: {doubt}.")
        truths = [self._truth(each, unknown) for each in part]
        held: list[bool] | None = None
        if all(truth is not None for truth in truths):
            rows = [self.candidates.are_among(truth.private) for truth in truths if truth]
            held = [any(column) for column in zip(*rows, strict=True)]
        self._recorder.membership((seen.server_round, seen.client_id), made, held)
        seconds = time.process_time() - began
        self._recorder.cost(seen.server_round, "membership_cpu_seconds", seconds, seen.client_id)

    def _prepare(self, target: Target, assumed: Inputs, unknown: Set[int]) -> Case | None:
        """Return a target with its true samples and the facts that the threat model grants.

        ``assumed`` are the inputs' spec and BatchNorm mode, ``unknown`` the clients whose true
        samples nobody can know. The result is ``None``, and the reason is recorded, if an attack
        would take too much memory or time.
        """
        seen, spec = target.observation, assumed.spec
        gradient_map = assumed.map_of(self._given)
        if reason := self._trials.refusal(gradient_map, spec, seen):
            self._recorder.not_attacked(seen, reason)
            message = f"client {seen.client_id} was not attacked: {reason}."
            self.warn_once(seen.server_round, seen.client_id, message)
            return None
        if back := _sent_back(seen, gradient_map):
            self.warn_once(
                seen.server_round,
                seen.client_id,
                f"client {seen.client_id}: sent back unchanged: {some(back)}. Either the client "
                "keeps its own, or there was no gradient, which is what the attack assumes; where "
                "it fails, that is no evidence of safety.",
            )
        return self._grant(target, unknown)

    def _attack(self, now: _Round, cases: list[Case]) -> None:
        """Attack several targets, ``cases``, together, then evaluate and record each answer.

        ``now`` holds the round's attack and its budget. The attack is repeated on the updates that
        each defense of ``what_ifs`` would have released.
        """
        for case, answer in self._answers(now, cases):
            client_id = case.observation.client_id
            self._of_client(now.server_round, client_id, self._record, case, answer)
        for name, source in self.what_ifs.items():
            self._ask(now, name, source, cases)

    def _hear(self, server_round: int, note: ClientNote, num_examples: int | None) -> None:
        """Record a client's note; ``num_examples`` is ``None`` if the update was not observed."""
        self._recorder.note(server_round, note)
        self._tell_of_settings(server_round, note)
        self._tell_of_training(server_round, note, num_examples)

    def _of_client(
        self, server_round: int, client_id: int, action: Callable[..., T], *args: Any
    ) -> T | None:
        """Return the result of ``action(*args)``, a function of the audit for one client.

        An error is recorded under the client's id, and ``None`` is returned, so that the audit goes
        on with the other clients.
        """
        try:
            return action(*args)
        except Exception as error:  # a client's input may cause any error
            _LOG.exception("flwr_leakage: the audit of client %d failed", client_id)
            reason = f"the audit of client {client_id} failed: {type(error).__name__}: {error}"
            self.warn(server_round, client_id, reason)
            return None

    def recall(self, server_round: int, observations: list[Observation]) -> None:
        """Remember a round that was attacked in an earlier run of this program.

        Later attacks on several rounds at once then use the round, too.
        """
        self._targets(server_round, observations)

    def assume(self, inputs: Inputs) -> None:
        """Make later attacks assume these inputs, this mode of BatchNorm and this loss."""
        self.spec, self.gradient_map = inputs.spec, inputs.map_of(self._given)
        self._usual = inputs
        self._reference = self.reference or Reference.of(inputs.spec)

    def _keep(
        self,
        keep: KeptObservations,
        server_round: int,
        observations: list[Observation],
        unknown: Set[int],
        inputs: Mapping[int, Inputs],
    ) -> None:
        """Keep the selected observations in the store ``keep``, to be attacked later.

        The true samples are kept, too, if a simulation knows them, but not of clients in
        ``unknown``. ``inputs`` are, by client id, the input spec and BatchNorm mode to assume.
        """
        chosen = self.selection(observations)
        if not chosen:
            return
        usual = self._usual
        several = [
            Kept(seen, inputs.get(seen.client_id, usual), self._truth(seen, unknown))
            for seen in chosen
        ]
        dropped = keep.keep(server_round, several)
        kept = f"{count(len(several), 'update')} of round {server_round} {KEPT_FOR_LATER}"
        self._recorder.information(server_round, -1, kept)
        if server_round in keep.rounds() and not self._told_of_room:
            self._told_of_room = True
            room = keep.room(server_round)
            if self.num_rounds is not None and room * self.selection.every < self.num_rounds:
                room_for = f"there is room for some {count(room, 'round')} of this size"
                self.warn(server_round, -1, f"{room_for}; beyond, kept_policy={keep.policy}")
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
        """Return the reasons in words why clients of these observations are not attacked, by client
        id.
        """
        if self.attack is None and self.keep is None:
            return {seen.client_id: "no attack is configured" for seen in observations}
        return self.selection.left_out(observations)

    def _ask(self, now: _Round, name: str, source: WhatIfSource, cases: list[Case]) -> None:
        """Attack the updates that the defense ``name`` would have released from the same training.

        ``now`` holds the round's attack and budget, and ``cases`` are the targets as they were
        sent. ``source`` returns, for an observation, the update under that defense.
        """
        asked: list[Case] = []
        changes: list[float] = []
        for case in cases:
            seen = case.observation
            if case.truth is None:
                continue  # nobody knows the samples of such a client
            if seen.client_id < 0 or seen.earlier:
                message = f"what if {name} was not asked: that is for one client and one round"
                self.warn_once(now.server_round, seen.client_id, message)
                continue
            try:
                found = source(seen)
            except ValueError as error:
                reason = f"client {seen.client_id} was not attacked under {name}: {error}"
                self.warn(now.server_round, seen.client_id, reason)
                continue
            disclosed = disclose(seen, self.threat, self.gradient_map, found.truth)
            asked.append(Case(replace(seen, update=found.update, disclosed=disclosed), found.truth))
            changes.append(found.relative_change)
        answers = self._answers(now, asked, f"what if {name}")
        for (case, answer), change in zip(answers, changes, strict=True):
            outcome = evaluate(answer, case.truth, self.evaluator, self.spec, self._reference)
            where = (now.server_round, case.observation.client_id)
            self._recorder.what_if(where, name, change, answer, outcome)

    def _tell_of_settings(self, server_round: int, note: ClientNote) -> None:
        """Record a client's remarks on its settings, and, once, that a defense draws
        from a seed.
        """
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
        for message in note.says():
            self.inform_once(server_round, note.client_id, message)

    def _tell_of_training(
        self, server_round: int, note: ClientNote, num_examples: int | None
    ) -> None:
        """Warn, once, if a client's training is not as assumed, or does not explain its update.

        A training does not explain the update if its replay gives another one. The differences from
        the assumption are recorded in each round. ``num_examples`` is the number of the client's
        samples, ``None`` if its update was not observed.
        """
        other = note.differs_from(self._assumed_of(note), num_examples)
        if other:
            self._recorder.trained_otherwise((server_round, note.client_id), other)
        for sentence in note.speaks_against(other):
            self.warn_once(server_round, note.client_id, f"client {note.client_id}: {sentence}.")

    def _assumed_of(self, note: ClientNote) -> Assumed | None:
        """Return the schedule, inputs and BatchNorm mode that an attack on a client assumes.

        The result is ``None`` if clients train by epochs and this client does not tell its steps.
        """
        schedule = self.schedule
        if isinstance(schedule, EpochSchedule):
            if note.training is None:
                return None
            # The note does not tell the client's number of samples, from which the steps would
            # follow. So a schedule for one sample is given the steps that the note tells.
            schedule = replace(schedule.for_client(1), num_steps=note.training.num_steps)
        return Assumed(schedule, *self._usual, self.has_own_loss)

    def _targets(self, server_round: int, observations: list[Observation]) -> list[Target]:
        chosen = self.selection(observations)
        # Updates become targets one by one, so that an update that does not fit the client's
        # earlier rounds raises an error for this client alone.
        parts = [chosen] if self.threat.view == "aggregate" else [[seen] for seen in chosen]
        targets = []
        for part in parts:
            try:
                targets += find_targets(part, self.threat, self.gradient_map, self._history)
            except ValueError as error:
                who = part[0].client_id if len(parts) > 1 else -1
                what = f"client {who} was not" if len(parts) > 1 else "nothing was"
                self.warn(server_round, who, f"{what} attacked: {error}")
        return targets

    def _grant(self, target: Target, unknown: Set[int]) -> Case | None:
        """Return a target with its true samples and the facts that the threat model grants.

        The result is ``None``, and the reason is recorded, if the threat model grants facts that
        nobody knows. Nobody knows the samples of the clients ``unknown``.
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
        self, now: _Round, cases: list[Case], what: str = ""
    ) -> list[tuple[Case, Reconstruction]]:
        """Attack the targets ``cases`` together, and return each with its answer.

        ``now`` holds the round's attack and budget. ``what`` names another defense, under which the
        updates were computed anew; ``what`` is empty for the updates that were sent.
        """
        if not cases:
            return []
        name = " · ".join(filter(None, (self._round_name(now.server_round), what)))
        self.progress.status(f"{name} · attack on {count(len(cases), 'update')}")
        seen = [case.observation for case in cases]
        limit = least(self.max_seconds, self.what_if_max_seconds if what else None)
        job = AttackJob(
            self.gradient_map,
            self.spec,
            seen,
            self.threat,
            self.seed,
            max_seconds=seconds_each(limit, now.budget, len(cases)),
        )
        made = attempt(now.attack, job, attack_reporter(self.progress, name))
        if made.error:
            self.warn(now.server_round, -1, f"{what}: the attack failed: {made.error}".lstrip(": "))
        self._recorder.attempt(now.server_round, made, "what_if" if what else "attack")
        if said := describe_parts(made.answers):
            self._recorder.information(now.server_round, -1, f"{what}: {said}".lstrip(": "))
        return list(zip(cases, made.answers, strict=True))

    def _record(self, case: Case, answer: Reconstruction) -> None:
        server_round, client_id = case.observation.server_round, case.observation.client_id
        where = (server_round, client_id)
        if answer.error:
            self.warn(server_round, client_id, f"client {client_id} not recovered: {answer.error}")
        if causes := answer.stats.get(RETRIED):
            self.warn(server_round, client_id, f"client {client_id} was attacked again: {causes}")
        if answer.stats.get(NORMALISATION) in ("read off", "refuted") and self.spec.known:
            self.warn_once(server_round, client_id, f"client {client_id}: {answer.stats['stage']}")
        elif answer.spec is not None:
            claim, by = answer.stats[NORMALISATION], answer.spec
            told = f"client {client_id} told no normalisation; {claim}: {by.mean} and {by.std}."
            self.inform_once(server_round, client_id, told)
        outcome = evaluate(answer, case.truth, self.evaluator, self.spec, self._reference)
        if case.truth is not None:
            if self.evaluator is not None and self._shown != server_round:
                self._shown = server_round
                self._recorder.blind_guess(server_round, self._reference.guess)
            names = self._reference.class_names
            numbers = self.images.of(client_id, case.truth.private)
            self._recorder.samples(where, case.truth, names, numbers)
        self._recorder.outcome(where, answer, self.threat, outcome)
        decoded = self._decoder(case, answer) if self._decoder else None
        if decoded is not None:
            found = evaluate(decoded, case.truth, self.evaluator, self.spec, self._reference)
            self._recorder.decoded(where, decoded, found)

    def _tell(self, server_round: int, message: str) -> None:
        first = next(iter(message.splitlines()), "")
        self.progress.line(f"{self._round_name(server_round)} · {plain_text(first, 200)}")

    def _elapsed(self) -> float:
        """Return the seconds since the round began."""
        return time.monotonic() - self._round_start

    def _round_name(self, server_round: int) -> str:
        if server_round == 0:
            return "before the rounds"
        total = f"/{self.num_rounds}" if self.num_rounds else ""
        return f"round {server_round}{total}"


def _sent_back(seen: Observation, gradient_map: GradientMap) -> list[str]:
    """Return the names of trained weights that a client sent back unchanged, if others changed.

    Biases are left out, as a defense that keeps an update's largest entries sets theirs to zero.
    """
    delta = seen.update.delta
    names = [name for name in delta if name in gradient_map.trained and delta[name].ndim > 1]
    back = [name for name in names if not bool(delta[name].any())]
    return back if len(back) < len(names) else []
