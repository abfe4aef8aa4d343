"""The time that an attack had, and where that ended it."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flwr_leakage.report.attempts import Attempt, Fates, all_exact
from flwr_leakage.report.index import Index, count
from flwr_leakage.report.words import several

MAX_GROUPS = 3


def time_limit(metadata: Mapping[str, Any]) -> float | None:
    """CPU seconds that the attack had for an update; ``None`` for no limit, or an unknown one.

    It is the smaller one of the run's ``server.attack_max_seconds`` and the attack's own
    ``max_seconds``. Where updates were kept to be attacked later, another limit may have been
    given then, so that it is unknown.
    """
    config = metadata.get("config")
    if not isinstance(config, Mapping):
        return None
    server, attack = (
        node if isinstance(node := config.get(key), Mapping) else {} for key in ("server", "attack")
    )
    if server.get("attack_later"):
        return None
    limits = (server.get("attack_max_seconds"), attack.get("max_seconds"))
    known = [x for x in limits if isinstance(x, int | float) and not isinstance(x, bool)]
    return min(known, default=None)


def ended(index: Index, found: Sequence[Attempt]) -> set[tuple[int, int]]:
    """The (round, client) of every update on which the time limit ended the attack.

    Not those that it cut short once nothing was left to find: where the chosen attack had solved
    the update, or every image is exact.
    """
    stopped = {key[:2] for key in index.series("attack", "stopped_by_budget")}
    told = index.series("attack", "objective").items()
    return stopped - all_exact(found) - {key[:2] for key, record in told if _solved(record.note)}


def _solved(note: str) -> bool:
    """Whether the note of an attack by several says that the chosen one solved the update."""
    chosen = re.search(r"(?:^|; )([^;]+) chosen: (.*)", note)
    return chosen is not None and f"; {chosen[1]} solved" in f"; {chosen[2]}"


def ended_by_time(
    index: Index, fate: Fates, found: Sequence[Attempt], limit: float | None
) -> tuple[str, ...]:
    """Say on whose updates the time limit ended the attack; nothing where it ended none."""
    stopped = ended(index, found)
    if not stopped:
        return ()
    seconds = f" of {limit:g} CPU seconds" if limit is not None else ""
    updates = count(len(fate.answered), "update")
    whole = f"The time limit{seconds} ended the attack on {len(stopped)} of {updates}"
    return (
        f"{whole} ({_where(stopped)}): more time may find more, and what was found there depends "
        f"on the speed of the machine. That less is found in later rounds is no sign of "
        f"safety where the limit ended the attack.",
    )


def _where(places: Collection[tuple[int, int]]) -> str:
    """Name clients with their rounds; those of the same rounds together."""
    rounds_of: dict[int, list[int]] = {}
    for server_round, client in sorted(places):
        rounds_of.setdefault(client, []).append(server_round)
    clients_in: dict[tuple[int, ...], list[int]] = {}
    for client, rounds in sorted(rounds_of.items()):
        clients_in.setdefault(tuple(rounds), []).append(client)
    groups = [
        f"{several(clients) if clients[0] >= 0 else 'the aggregate'} in {several(rounds, 'round')}"
        for rounds, clients in clients_in.items()
    ]
    left = sum(len(clients) for clients in list(clients_in.values())[MAX_GROUPS:])
    more = [count(left, "further client")] if left else []
    return "; ".join([*groups[:MAX_GROUPS], *more])
