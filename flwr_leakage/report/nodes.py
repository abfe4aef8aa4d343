"""Give short numbers to clients that are known only by the long id of their Flower node."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from flwr_leakage.measurements import MAX_CLIENT
from flwr_leakage.records import RunEvent
from flwr_leakage.report.index import who
from flwr_leakage.tracking import RunData

NODES = "Clients that told no partition are numbered as they were first seen: "
"""The first words of the event that tells which Flower node a client's number stands for."""

_IDS = re.compile(r"(\bnode )?(?<![\w.])(\d{10,20})(?![\w.])")


def with_short_names(run: RunData) -> RunData:
    """Return the run with short numbers for clients that are known only by their Flower node's id.

    These clients are numbered in the order in which they were first seen, after the largest
    partition id and from 1 on. The numbers replace the ids in all texts, and one event says which
    is which; stored records and image files keep the ids.
    """
    seen = dict.fromkeys(record.client_id for record in run.records)
    nodes = [client for client in seen if client > MAX_CLIENT]
    if not nodes:
        return run
    first = 1 + max((client for client in seen if client <= MAX_CLIENT), default=0)
    numbers = {node: place for place, node in enumerate(nodes, max(first, 1))}

    def written(text: str) -> str:
        def short(found: re.Match[str]) -> str:
            number = numbers.get(int(found[2]))
            if number is None:
                return found[0]
            return who(number) if found[1] else str(number)

        return _IDS.sub(short, text) if text else text

    def named(entries: Iterable[Any], text: str = "") -> tuple[Any, ...]:
        return tuple(
            replace(
                each,
                client_id=numbers.get(each.client_id, each.client_id),
                **({text: written(getattr(each, text))} if text else {}),
            )
            for each in entries
        )

    told = ", ".join(f"{who(number)} is node {node}" for node, number in numbers.items())
    event = RunEvent(run.records[0].run, 0, -1, "info", f"{NODES}{told}.")
    return replace(
        run,
        records=named(run.records, "note"),
        events=(*named(run.events, "message"), event),
        images=named(run.images),
        texts=named(run.texts),
    )
