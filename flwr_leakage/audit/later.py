"""Attack the observations that a run has kept on disk, and add the results to the run's records."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.attacks.ray_tasks import RayTasks
from flwr_leakage.audit.kept import Kept, KeptObservations
from flwr_leakage.audit.server_audit import ServerAudit
from flwr_leakage.audit.truth import UNREADABLE, ImageNumbers, Truth
from flwr_leakage.records import Disclosure
from flwr_leakage.tracking import JsonlTracker, RunData, Tracker, read_run
from flwr_leakage.tracking.jsonl import write_private
from flwr_leakage.tracking.once import OnceTracker
from flwr_leakage.untrusted import MAX_RECORDS_BYTES, inside, read_file

KEPT = "kept"
"""The name of the folder, in a run folder, with the observations that are to be attacked later."""


FINISHED = "finished"
"""The name of the folder, in ``KEPT``, with the results of targets that were attacked. An attack
that was interrupted goes on from them.
"""

NUMBERS = "image_numbers.json"
"""The name of the file, in ``KEPT``, with the numbers that identify the attacked images through all
rounds. The file stays when a round is dropped.
"""

CLOSED = "closed"
"""The name of the empty file that marks, while a run's kept updates are attacked, that the run had
ended in order.
"""


@dataclass(frozen=True)
class KeptRun:
    """A run folder with observations kept for a later attack, and the settings of that attack.

    Attributes:
        folder: the folder of the run, which holds a folder ``kept``.
        audit_of: a function that takes a tracker and returns an audit like that of the run, with
            its attack. The audit must not write to the tracker before it attacks. Inputs,
            schedules, BatchNorm modes and truths are taken from the kept observations.
        chunk: the number of targets that are attacked together. If the process is killed, at most
            the work on these is lost.
        final_buffers: the buffers of the finished model, for the threat model
            ``batch_norm="final"``; ``None`` if they are not known.
        ray: the resources of a task on a Ray cluster, if the attacks run there.
    """

    folder: Path
    audit_of: Callable[[Tracker], ServerAudit]
    chunk: int = 1
    final_buffers: Mapping[str, Tensor] | None = None
    ray: RayTasks = field(default_factory=RayTasks)

    @property
    def kept(self) -> KeptObservations:
        """Return the observations that the run kept on disk to be attacked later.

        Raises:
            ValueError: the run kept no observation.
        """
        kept = KeptObservations(inside(self.folder, KEPT))
        if not kept.rounds():
            raise ValueError(f"expected kept observations in {kept.folder}, got none.")
        return kept

    @property
    def finished(self) -> Path:
        """Return the folder with the results of the targets that were attacked."""
        return inside(self.folder, f"{KEPT}/{FINISHED}")

    def audit(self, tracker: Tracker) -> tuple[ServerAudit, Disclosure]:
        """Return the audit of the run, which records to ``tracker``, and the disclosed facts.

        The facts are the BatchNorm statistics of the finished model, if the threat model grants
        them.

        Raises:
            ValueError: there is no attack, or no buffers of the finished model, although the threat
                model grants them.
        """
        later = self.audit_of(tracker)
        if later.attack is None:
            raise ValueError("the audit must have an attack, got None.")
        later.keep = None
        final = later.threat.batch_norm == "final"
        if final and self.final_buffers is None:
            raise ValueError(
                "batch_norm='final' takes the buffers of the finished model, got none."
            )
        return later, Disclosure(statistics=dict(self.final_buffers or {}) if final else None)


def walk(
    run: KeptRun, audit: ServerAudit, disclosed: Disclosure, stand_in: Attack
) -> Iterator[int]:
    """Go through the kept rounds that were not attacked yet, and call ``stand_in`` on their
    targets.

    Args:
        run: the run with the kept rounds.
        audit: the audit that ``KeptRun.audit`` returns, made with a tracker that stores nothing.
        disclosed: the BatchNorm statistics that the attack is given in all rounds, if any.
        stand_in: the attack that is called instead of the run's own.

    Yields:
        The number of each round after the call on its targets.

    Raises:
        ValueError: a file cannot be read; or a client's normalisation is not known, so that all
            targets of a round have to be attacked together.
    """
    audit.attack = stand_in
    for number in run.kept.rounds():
        if run.kept.is_done(number) and audit.threat.rounds == 1:
            continue
        several, problems = _read(run.kept, number, disclosed)
        if problems:
            raise ValueError(problems[0])
        if run.kept.is_done(number):
            audit.recall(number, [each.observation for each in several])
            continue
        for each in several:
            if not each.inputs.spec.known:
                raise ValueError(
                    f"the normalisation of client {each.observation.client_id} must be known in "
                    f"round {number}, as all targets of a round decide together which one it is: "
                    "call attack-kept without --shard."
                )
        _attack_round(audit, number, several)
        yield number


def attack_kept(run: KeptRun, workers: int | RayTasks = 1) -> int:
    """Attack the kept observations of a run folder, and return how many rounds were finished.

    The process may be killed at any moment and the function called again. Results of finished
    targets are then read from disk, and the records of an unfinished round are completed. Rounds
    that were attacked before are not attacked again. A round with an unreadable file remains to be
    attacked. The training may go on meanwhile; call this function again for the rounds that are
    kept later.

    Args:
        run: the run, and the settings of its attack.
        workers: the number of attacking processes, or the resources of a task on a Ray cluster.

    Raises:
        ValueError: there is no attack, nothing was kept, the file of the images' numbers cannot be
            read, or the threat model grants the finished model's statistics and these are not
            known.
    """
    kept = run.kept
    data, was_closed = read_run(run.folder), kept.folder / CLOSED
    tracker = OnceTracker.of(data)
    later, disclosed = run.audit(tracker)
    assert later.attack is not None
    later.attack = Parallel(later.attack, workers, run.chunk, str(run.finished))
    later.images = _read_numbers(kept.folder / NUMBERS)
    if all(map(kept.is_done, kept.rounds())) and (data.closed or not was_closed.exists()):
        was_closed.unlink(missing_ok=True)
        return 0
    if data.closed:  # this is checked before the record is opened, as a kill would leave it open
        write_private(was_closed, b"")
    tracker.tracker = file = JsonlTracker(run.folder, resume=True)
    _tell_of_missing_encodings(later, kept, data)
    done = sum(
        [_go_on(later, kept, server_round, file, disclosed) for server_round in kept.rounds()]
    )
    if was_closed.exists():  # otherwise the run was killed or still goes on, and its record says so
        file.close()
        was_closed.unlink()
    else:
        file.flush()
    return done


def _go_on(
    audit: ServerAudit,
    kept: KeptObservations,
    number: int,
    file: JsonlTracker,
    disclosed: Disclosure,
) -> bool:
    """Attack a kept round, or read its results again where later rounds need them.

    The round is ``number`` of those in ``kept``. Its records are written to ``file``, and the
    attack is given the facts ``disclosed``. Return whether all its observations were attacked now,
    for the first time.
    """
    is_done, decodes = kept.is_done(number), audit.threat.mixing == "known"
    if is_done and audit.threat.rounds == 1 and not decodes:
        return False
    several, problems = _read(kept, number, disclosed)
    if is_done and not decodes:
        audit.recall(number, [each.observation for each in several])
        return False
    for problem in problems:
        audit.warn(number, -1, problem)
    if problems and audit.threat.view == "aggregate":
        audit.warn(number, -1, f"round {number} was not attacked: its mean needs every update")
        return False
    # If the round was attacked before, its answers are read from disk, and no number is written
    # twice.
    _attack_round(audit, number, several)
    file.flush()
    if is_done:
        return False
    write_private(kept.folder / NUMBERS, audit.images.to_json().encode())
    if problems and number in kept.rounds():
        reason = "as some of its files cannot be read; call again when they can"
        audit.warn(number, -1, f"round {number} is not noted as attacked, {reason}")
        return False
    if not kept.set_done(number):
        audit.warn(number, -1, f"round {number} was dropped while it was attacked")
    return bool(several)


def _read(
    kept: KeptObservations, number: int, disclosed: Disclosure
) -> tuple[list[Kept], list[str]]:
    """Return a round's observations, and a sentence for each file that cannot be read.

    Each observation is given the facts ``disclosed``, which the threat model grants.
    """
    found, problems = kept.read(number)
    known = [
        replace(each, observation=replace(each.observation, disclosed=disclosed)) for each in found
    ]
    return known, problems


def _read_numbers(path: Path) -> ImageNumbers:
    if not os.path.lexists(path):
        return ImageNumbers()
    try:
        return ImageNumbers.from_json(read_file(path, MAX_RECORDS_BYTES).decode())
    except UNREADABLE as error:
        raise ValueError(f"expected image numbers in {path}, got {error}.") from error


def _tell_of_missing_encodings(audit: ServerAudit, kept: KeptObservations, run: RunData) -> None:
    """Record the rounds whose encodings (MixUp, InstaHide) cannot be decoded with those of later
    rounds.

    An earlier call decoded these encodings, and the rounds' observations were dropped since.
    """
    if audit.threat.mixing != "known":
        return
    decoded = {r.server_round for r in run.records if r.name == "decoded_encodings"}
    for number in sorted(decoded - set(kept.rounds())):
        reason = f"round {number} was dropped, so that its encodings are not decoded with later"
        audit.warn(number, -1, f"{reason} ones")


def _attack_round(audit: ServerAudit, server_round: int, several: list[Kept]) -> None:
    """Attack the kept observations of a round.

    Inputs, BatchNorm modes, losses and true samples are those that were kept with them.
    """
    if not several:
        return
    first = several[0]  # all members of a mean have the same assumptions
    audit.assume(first.inputs)
    inputs = {each.observation.client_id: each.inputs for each in several}
    truths = {each.observation.client_id: each.truth for each in several if each.truth is not None}

    def truth(server_round: int, client_id: int, num_examples: int) -> Truth:
        return truths[client_id]

    audit.truth = truth if truths else None
    unknown = {each.observation.client_id for each in several} - truths.keys()
    audit.attack_round(server_round, [each.observation for each in several], unknown, inputs)
