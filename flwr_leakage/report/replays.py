"""Whether what was attacked is what the clients trained: their replays, in the report's words."""

from flwr_leakage.capture import TOLERANCE
from flwr_leakage.report.index import Index, count, number

_CHECK = "replay_residual"
_SKIPPED = "not_replayed"
_MOST = 3
"""Rounds that are named."""


def has_replays(index: Index) -> bool:
    """Whether a client told of a replay of its training."""
    return bool(replay_clients(index))


def replay_clients(index: Index) -> set[int]:
    """The clients that told whether their training was replayed."""
    return {key[1] for name in (_CHECK, _SKIPPED) for key in index.series("check", name)}


def _by_client(index: Index) -> dict[int, list[tuple[float | None, str]]]:
    found: dict[int, list[tuple[float | None, str]]] = {}
    for (_, client, _), record in index.series("check", _CHECK).items():
        found.setdefault(client, []).append((record.value, record.note))
    return found


def _explains(residual: float | None) -> bool:
    return residual is not None and residual <= TOLERANCE


def replay_of_client(index: Index, client_id: int) -> str:
    """What is told of a client: its largest residual, in which rounds, or why there is none.

    Args:
        index: of the run.
        client_id: the partition id.
    """
    told = _by_client(index).get(client_id)
    skipped = {key for key in index.series("check", _SKIPPED) if key[1] == client_id}
    if not told:
        return f"not replayed in {_trainings(len(skipped))}" if skipped else "not captured"
    failed = [(value, note) for value, note in told if not _explains(value)]
    if failed:
        value, note = failed[-1]
        return note if value is None else note.removesuffix("; results are no evidence of safety")
    largest = max(value for value, _ in told if value is not None)
    found = f"explained to {number(largest)}" if largest else "explained exactly"
    if not skipped:
        return found
    rounds = [str(key[0]) for key in sorted(index.series("check", _CHECK)) if key[1] == client_id]
    named = ", ".join(rounds if len(rounds) <= _MOST else [*rounds[: _MOST - 1], "…", rounds[-1]])
    where = f"round{'s' * (len(rounds) > 1)} {named}"
    return f"{found} in {where}; not replayed in {len(skipped)} other{'s' * (len(skipped) > 1)}"


def _trainings(number: int) -> str:
    return f"its {number} trainings" if number > 1 else "its training"


def replay_warning(index: Index) -> tuple[str, ...]:
    """One sentence for the verdict, where the captured training does not explain every update."""
    by_client = _by_client(index)
    unexplained = [
        client
        for client, told in by_client.items()
        if not all(_explains(value) for value, _ in told)
    ]
    if not unexplained:
        return ()
    return (
        f"What {len(unexplained)} of {count(len(by_client), 'client')} trained does not explain "
        f"what was sent, or was not captured: results of these are no evidence of safety (see "
        f"Clients).",
    )
