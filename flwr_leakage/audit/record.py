"""Hand an audit's numbers, images and events to the tracker that stores them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from flwr_leakage.audit.note import ClientNote, ReplayResult
from flwr_leakage.audit.truth import Truth
from flwr_leakage.metrics.labels import class_indices
from flwr_leakage.records import (
    Direction,
    LeakageRecord,
    LocalSchedule,
    Measurement,
    Observation,
    Reconstruction,
    RecordKind,
    RunEvent,
    State,
    ThreatModel,
)
from flwr_leakage.tracking import KeepsTexts, TextRecord, Tracker
from flwr_leakage.tracking.text import plain_text

if TYPE_CHECKING:
    from flwr_leakage.attacks.labels.rehearsed import LabelEstimate
    from flwr_leakage.audit.attack import Attempt
    from flwr_leakage.audit.evaluate import Outcome
    from flwr_leakage.audit.large_clients import Probed
    from flwr_leakage.members import Membership
else:  # a client that records scores alone works without the packages that attacks need
    Attempt = LabelEstimate = Outcome = Probed = Membership = Any

SERVER = -1
"""The client id of records about the server or a whole round."""


Where = tuple[int, int]
"""The number of the round and the client id that a record is about; the id is −1 for the server."""

SPARED = "not scored:"
"""The beginning of the note of a sample that was not scored, as it was not chosen or the time for
scores was spent.
"""


@dataclass(frozen=True)
class Recorder:
    """A writer that turns the results of an audit into a run's records, by round, client and
    sample.

    Attributes:
        tracker: the tracker that stores the records.
        run: the run's name.
        sample: the word for a sample: ``image``, ``text``, or ``row`` of a table.
    """

    tracker: Tracker
    run: str
    sample: str = "image"

    def warning(self, server_round: int, client_id: int, message: str) -> None:
        """Record a warning: something went wrong, and the run goes on."""
        self.tracker.event(RunEvent(self.run, server_round, client_id, "warning", message))

    def error(self, server_round: int, message: str) -> None:
        """Record an error that ended the run, or makes the run's records worthless."""
        self.tracker.event(RunEvent(self.run, server_round, SERVER, "error", message))

    def information(self, server_round: int, client_id: int, message: str) -> None:
        """Record a message that reports no failure."""
        self.tracker.event(RunEvent(self.run, server_round, client_id, "info", message))

    def utility(
        self, server_round: int, name: str, value: float | None, unit: str, note: str = ""
    ) -> None:
        """Record a quantity of the global model, such as its test accuracy.

        ``value`` is ``None`` if it is not known; ``note`` is a remark, such as the value's source.
        """
        self._number((server_round, SERVER), -1, "utility", name, value, unit, note=note)

    def cost(self, server_round: int, name: str, seconds: float, client_id: int = SERVER) -> None:
        """Record the seconds that a part of the run took, under the name of that part."""
        self._number((server_round, client_id), -1, "cost", name, seconds, "s")

    def note(self, server_round: int, note: ClientNote) -> None:
        """Record a client's note on a round: its scores, the check of its update, and CPU seconds.

        The check is the result of replaying the client's training.
        """
        where = (server_round, note.client_id)
        for measurement in note.measurements:
            self._measurement(where, "score", measurement, SPARED)
        if note.replay is not None:
            self._replay(where, note.replay)
        for name in ("train_cpu_seconds", "score_cpu_seconds", "replay_cpu_seconds"):
            seconds = getattr(note, name)
            if seconds is not None and (seconds or not name.startswith("replay")):
                self.cost(server_round, name, seconds, note.client_id)

    def _replay(self, where: Where, replay: ReplayResult) -> None:
        """Record the result of a replay of a client's training, under a name that depends on the
        result.

        ``where`` is (round, client id). The name is ``replay_residual``, with the value ‖sent −
        replayed‖ / ‖sent − received‖ of the parameters; ``not_replayed`` if the round's training
        was not replayed; or ``replay_passed``, with the value 1, if the replay explains the update
        and the residual is not shared.
        """
        name, value = "replay_residual", replay.residual
        if replay.kind == "unchanged":
            name = "not_replayed"
        elif replay.explains and value is None:
            name, value = "replay_passed", 1.0
        self._number(where, -1, "check", name, value, "1", note=replay.sentence)

    def trained_otherwise(self, where: Where, differences: Sequence[str]) -> None:
        """Record in how many settings a client's training differs from what an attack assumes.

        ``where`` is (round, client id). The record's note is ``differences``, such as *learning
        rate 0.1, assumed 1*, in which parts may be a client's own words.
        """
        count, told = float(len(differences)), plain_text("; ".join(differences))
        self._number(where, -1, "check", "trained_otherwise", count, note=told)

    def client(
        self,
        where: Where,
        schedule: LocalSchedule | None,
        num_examples: int,
        kept_out: str,
        optimizer: str = "SGD",
    ) -> None:
        """Record a client's training as the server knows it, and why the client was not attacked.

        ``where`` is (round, client id). ``schedule`` is ``None`` if the client's steps are not
        known. ``kept_out`` is the reason in words, empty if the client was attacked, and
        ``optimizer`` is the class name of its optimizer.
        """
        count = float(num_examples)
        done = schedule.describe(num_examples, self.sample) if schedule else ""
        done += f", {optimizer}" * (bool(done) and optimizer != "SGD")
        self._number(where, -1, "client", "images", count, self.sample, note=done)
        if kept_out:
            self._number(where, -1, "client", "not_attacked", count, self.sample, note=kept_out)

    def not_attacked(self, seen: Observation, reason: str) -> None:
        """Record why an update was not attacked, if that became known after the call of
        :meth:`client`.
        """
        where, count = (seen.server_round, seen.client_id), float(seen.update.num_examples)
        self._number(where, -1, "client", "not_attacked", count, self.sample, note=reason)

    def samples(
        self, where: Where, truth: Truth, names: Sequence[str], numbers: Sequence[int]
    ) -> None:
        """Record the class and the identifying number of each private sample, which a simulation
        knows.

        ``where`` is (round, client id), and ``names`` are the names of the classes. ``numbers`` has
        for each sample a number that identifies it through all rounds. Texts for a model of the
        next token have no class.
        """
        targets = truth.private.targets
        has_class = targets.ndim == 1 or targets.is_floating_point()
        labels = class_indices(targets).tolist() if has_class else []
        for sample, label in enumerate(labels):
            name = names[label] if label < len(names) else str(label)
            self._number(where, sample, "client", "class", label, note=name)
        for sample, number in enumerate(numbers):
            self._number(where, sample, "client", "image", number)

    def what_if(
        self, where: Where, name: str, change: float, answer: Reconstruction, outcome: Outcome
    ) -> None:
        """Record the attack on an update as the defense ``name`` would have released it.

        ``where`` is (round, client id). The names of all records contain ``name``. ``answer`` is
        the attack's reconstruction, and ``outcome`` its evaluation. ``change`` is ‖released − raw‖
        / ‖raw‖ of the update, where raw is the undefended one. The training never used the released
        update.
        """
        stopped = float(_ended_by_time(answer))
        for what, value in (("relative_change", change), ("stopped_by_budget", stopped)):
            self._number(where, -1, "what_if", f"{name}/{what}", value, "1")
        self._measurements(where, "what_if", outcome, f"{name}/")
        self._samples_found(where, outcome, f"what_if_{name}")

    def membership(self, where: Where, made: Membership, is_member: Sequence[bool] | None) -> None:
        """Record the membership test of each candidate sample in one update.

        The evidence is recorded as 2 if algebra decides, 1 if members have lower statistics than
        others on average, and 0 if the test says nothing. The evidence's note tells the reason and
        the source of the null samples, which cannot be members. The power is the share of members
        that the test found, at 1 % of false alarms, when the round was repeated on null samples. If
        a candidate's statistic is below those of all null samples, its p-value is marked: as
        ``tail`` if a fitted tail gives it, else as an upper bound.

        ``where`` is (round, client id), ``made`` the result of the test, and ``is_member`` tells
        for each candidate whether the client trained on it; ``None`` outside of simulations.
        """
        strength = float({"none": 0, "statistical": 1, "exact": 2}[made.evidence])
        null = f"{made.null_size} null records (described as “{made.null_origin}”)"
        note = f"{made.evidence}, by {made.statistic}: {made.reason}; {null}"
        self._number(where, -1, "membership", "membership_evidence", strength, note=note)
        if made.rehearsal is not None:
            power = made.rehearsal.found / made.rehearsal.members
            self._number(where, -1, "membership", "membership_power", power, "1")
        says_nothing = made.evidence == "none"
        for sample in range(len(made.p_values)):
            p, corrected = float(made.p_values[sample]), float(made.corrected[sample])
            told = made.says(sample)
            state: State | Literal[""] = "upper bound" if bool(made.is_unresolved[sample]) else ""
            for name, value in (("p_value", p), ("corrected", corrected)):
                self._number(
                    where, sample, "membership", f"membership_{name}",
                    None if says_nothing else value, "1", "larger is safer", told, state=state,
                )  # fmt: skip
            for name in ("exact", "composite", "silent", "tail"):
                if bool(getattr(made, f"is_{name}")[sample]):
                    self._number(where, sample, "membership", f"membership_{name}", 1.0, note=told)
            if is_member is not None:
                held = float(is_member[sample])
                self._number(where, sample, "membership", "membership_truth", held)

    def attempt(self, server_round: int, attempt: Attempt, name: str = "attack") -> None:
        """Record the wall-clock and CPU seconds of a round's attack.

        The names of the two records begin with ``name``.
        """
        self.cost(server_round, f"{name}_wall_seconds", attempt.wall_seconds)
        self.cost(server_round, f"{name}_cpu_seconds", attempt.cpu_seconds)

    def outcome(
        self, where: Where, answer: Reconstruction, threat: ThreatModel, outcome: Outcome
    ) -> None:
        """Record the attack on a client: the final objective, the metrics, and the images or texts.

        ``where`` is (round, client id), ``answer`` the attack's reconstruction, and ``outcome`` its
        evaluation. The objective's note names the facts that ``threat`` grants the attacker, and
        what each attack achieved if several were tried.
        """
        objective = answer.objective if answer.batch is not None else None
        note = answer.error or "; ".join(filter(None, (threat.describe(), answer.summary)))
        self._number(where, -1, "attack", "objective", objective, "1", note=note)
        if _ended_by_time(answer):
            note = "the time budget ended the attack: more time may find more"
            self._number(where, -1, "attack", "stopped_by_budget", 1.0, "1", note=note)
        self._measurements(where, "metric", outcome)
        self._samples_found(where, outcome)

    def labels(
        self, where: Where, found: LabelEstimate | str, truth: Sequence[int] | None = None
    ) -> None:
        """Record the number of samples of each class that was inferred from an update, or why none
        was.

        ``where`` is (round, client id), and ``found`` the estimate, or the reason in words why
        there is none. ``truth`` is the true number of samples of each class; ``None`` where it is
        not known.
        """
        if isinstance(found, str):
            self._number(where, -1, "labels", "expected_right", None, note=found)
            return
        method = f"{found.method}, by {found.rehearsals} rehearsals on dummies"
        for name in ("expected_right", "least_right", "uniform_right"):
            self._number(where, -1, "labels", name, getattr(found, name), "1", note=method)
        for label, count in enumerate(found.counts.tolist()):
            self._number(where, label, "labels", "inferred", float(count), "image")
            if truth is not None:
                self._number(where, label, "labels", "true", float(truth[label]), "image")

    def probes(self, where: Where, several: Iterable[Probed]) -> None:
        """Record the attacks on probes, each the update of one step on a few of a client's images.

        The names of a probe's records begin with its number of images, such as ``4/psnr``. The CPU
        seconds are those of all probes. ``where`` is (round, client id).
        """
        seconds = 0.0
        for probed in several:
            (answer,) = probed.attempt.answers
            note = answer.error or answer.summary
            name = f"{probed.size}/stopped_by_budget"
            stopped = float(_ended_by_time(answer))
            self._number(where, -1, "probe", name, stopped, "1", note=note)
            self._measurements(where, "probe", probed.outcome, f"{probed.size}/")
            seconds += probed.attempt.cpu_seconds
        if seconds:
            self.cost(where[0], "probe_cpu_seconds", seconds, where[1])

    def blind_guess(self, server_round: int, pixels: Tensor) -> None:
        """Record the blind guess, an image made without any attack, to compare reconstructions
        with.

        ``pixels`` are (C, H, W) in [0, 1]. The token ids of a guess at texts are not recorded, as
        they are one token repeated.
        """
        if pixels.is_floating_point():
            self.tracker.image(server_round, SERVER, -1, "blind_guess", pixels)

    def decoded(self, where: Where, answer: Reconstruction, outcome: Outcome) -> None:
        """Record the samples that were decoded from the encodings (MixUp, InstaHide) of all rounds.

        The records' names begin with ``decoded_``; ``outcome`` evaluates the samples, and ``where``
        is (round, client id).
        """
        count = float(answer.stats["encodings"])
        self._number(where, -1, "attack", "decoded_encodings", count, "image")
        self._measurements(where, "attack", outcome, "decoded_")
        self._samples_found(where, outcome, "decoded")

    def _samples_found(self, where: Where, outcome: Outcome, role: str = "") -> None:
        """Record the images and texts of an outcome; ``where`` is (round, client id).

        With a ``role`` such as ``decoded``, only reconstructions are recorded, under this name.
        """
        for picture in outcome.pictures:
            if not role or picture.role == "reconstruction":
                named = (*where, picture.sample, role or picture.role)
                self.tracker.image(*named, picture.pixels)
        if isinstance(self.tracker, KeepsTexts):
            for text in outcome.texts:
                if not role or text.role == "reconstruction":
                    named = (*where, text.sample, role or text.role)
                    self.tracker.text(TextRecord(*named, len(text.ids), text.ids, text.words))

    def _measurements(
        self, where: Where, kind: RecordKind, outcome: Outcome, prefix: str = ""
    ) -> None:
        """Record an outcome's measurements as ``kind``, under names that begin with ``prefix``."""
        for measurement in outcome.measurements:
            named = replace(measurement, name=prefix + measurement.name)
            self._measurement(where, kind, named)

    def _measurement(
        self, where: Where, kind: RecordKind, measurement: Measurement, spared: str = "\0"
    ) -> None:
        """Record a measurement of a client in a round, by a record for each sample.

        ``where`` is (round, client id). Samples whose note begins with ``spared`` share a single
        record without a value; by default no note does.
        """
        count = len(measurement.values)
        notes = measurement.notes or ("",) * count
        errors = measurement.errors or (None,) * count
        nothing: State | Literal[""] = ""
        states = measurement.states or (nothing,) * count
        left_out = [note for note in notes if note.startswith(spared)]
        if left_out:
            told = f"{len(left_out)} of {count} samples {left_out[0]}"
            self._number(
                where, -1, kind, measurement.name, None,
                measurement.unit, measurement.direction, told,
            )  # fmt: skip
        for sample, (value, note, error, state) in enumerate(
            zip(measurement.values, notes, errors, states, strict=True)
        ):
            if note.startswith(spared):
                continue
            self._number(
                where, sample, kind, measurement.name, value,
                measurement.unit, measurement.direction, note, error, state,
            )  # fmt: skip

    def _number(
        self, where: Where, sample: int, kind: RecordKind, name: str,
        value: float | None, unit: str = "", direction: Direction = "", note: str = "",
        error: float | None = None, state: State | Literal[""] = "",
    ) -> None:  # fmt: skip
        self.tracker.log(
            LeakageRecord(
                self.run, *where, sample, kind, name, value, unit, direction, note, error, state
            )
        )  # fmt: skip


def _ended_by_time(answer: Reconstruction) -> bool:
    """Return whether the time limit ended the search for an answer."""
    return answer.stats.get("stopped") == "budget"
