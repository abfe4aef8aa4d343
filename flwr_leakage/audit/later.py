"""Attack what was kept, and add the results to the run that it was kept of."""

from collections.abc import Callable
from pathlib import Path

from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.audit.kept import Kept, KeptObservations
from flwr_leakage.audit.server_audit import ServerAudit
from flwr_leakage.audit.truth import Truth
from flwr_leakage.tracking import JsonlTracker, Tracker, read_run
from flwr_leakage.tracking.once import OnceTracker

KEPT = "kept"
"""The folder of a run folder that holds its observations."""


def attack_kept(
    folder: str | Path,
    audit_of: Callable[[Tracker], ServerAudit],
    workers: int = 1,
    chunk: int = 1,
) -> int:
    """Attack the kept observations of a run folder, round by round.

    It may be killed at any moment and called again: finished targets are read back, and what was
    recorded of an unfinished round is completed. Rounds that were attacked before are left alone.
    The training may go on meanwhile; call again for the rounds that are kept later.

    Args:
        folder: of the run, with the folder ``kept``.
        audit_of: makes an audit as that of the run, with its attack, that records to a tracker.
            Inputs, schedules, BatchNorm modes and truths are those that were kept.
        workers: processes that attack.
        chunk: targets attacked together in a process: what a kill loses at most.

    Returns:
        How many rounds were attacked.

    Raises:
        ValueError: there is no attack, or nothing was kept.
    """
    folder = Path(folder)
    kept = KeptObservations(folder / KEPT)
    if not kept.rounds():
        raise ValueError(f"expected kept observations in {kept.folder}, got none.")
    was_closed = read_run(folder).closed
    file = JsonlTracker(folder, resume=True)
    later = audit_of(OnceTracker.of(file, folder))
    if later.attack is None:
        raise ValueError("the audit must have an attack, got None.")
    later.attack = Parallel(later.attack, workers, chunk, str(kept.folder / "finished"))
    later.keep = None
    done = 0
    for server_round in kept.rounds():
        is_done = kept.is_done(server_round)
        if is_done and later.threat.rounds == 1:
            continue
        several, problems = kept.read(server_round)
        if is_done:  # of which later rounds make use
            later.recall(server_round, [each.observation for each in several])
            continue
        for problem in problems:
            later.warn(server_round, -1, problem)
        _attack_round(later, server_round, several)
        file.flush()
        kept.set_done(server_round)
        done += 1
    if was_closed:  # else it was killed, or still goes on, and its record says so
        file.close()
    else:
        file.flush()
    return done


def _attack_round(audit: ServerAudit, server_round: int, several: list[Kept]) -> None:
    """Attack a round under what was assumed of it when it was kept."""
    if not several:
        return
    first = several[0]  # what differs from most was not kept
    audit.assume(first.spec, first.batch_norm)
    truths = {each.observation.client_id: each.truth for each in several if each.truth is not None}

    def truth(server_round: int, client_id: int, num_examples: int) -> Truth:
        return truths[client_id]

    audit.truth = truth if truths else None
    unknown = {each.observation.client_id for each in several} - truths.keys()
    audit.attack_round(server_round, [each.observation for each in several], unknown)
