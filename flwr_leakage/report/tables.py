"""The tables of the page: rounds, attacks, clients, costs, events."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from flwr_leakage.records import RunEvent
from flwr_leakage.report.index import (
    Index,
    Series,
    Table,
    by_client,
    by_round,
    count,
    decibel,
    heading,
    label,
    median,
    number,
    share,
    unit_of,
    values,
    who,
)
from flwr_leakage.report.verdict import failed_attacks


def rounds_table(index: Index, recovered_psnr: float) -> Table:
    """Return one row a round: images attacked and recovered, every metric, every utility."""
    metrics = [name for name in index.names("metric") if name != "psnr"]
    utilities = index.names("utility")
    attacked = index.attacked()
    psnr = index.series("metric", "psnr")
    columns = ["round"]
    if attacked:
        columns += ["attacked", "recovered"]
    if psnr:
        columns += ["PSNR median, dB", "PSNR highest", "PSNR lowest"]
    columns += [_metric_heading(name, index.series("metric", name)) for name in metrics]
    columns += [label(name) for name in utilities]
    attacked_in = Counter(key[0] for key in attacked)
    psnr_in = by_round(psnr)
    metrics_in = {name: by_round(index.series("metric", name)) for name in metrics}
    utilities_in = {name: by_round(index.series("utility", name)) for name in utilities}
    rows = []
    for server_round in index.rounds("metric", "utility"):
        known = psnr_in.get(server_round, [])
        total = attacked_in[server_round]
        row = [str(server_round) if server_round else "before"]
        if attacked:
            recovered = sum(value >= recovered_psnr for value in known)
            row += [str(total) if total else "–", share(recovered, total) if known else "–"]
        if psnr:
            row += [decibel(median(known)), decibel(max(known, default=None)),
                    decibel(min(known, default=None))]  # fmt: skip
        row += [_metric(name, metrics_in[name].get(server_round, [])) for name in metrics]
        row += [_utility(name, utilities_in[name].get(server_round, [])) for name in utilities]
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows), missing(index, "metric"))


def _is_share(name: str) -> bool:
    return name.endswith("accuracy")


def _metric_heading(name: str, series: Series) -> str:
    if _is_share(name):
        return label(name)
    return f"{heading(name, '' if unit_of(series) == 'pixel' else unit_of(series))} median"


def _metric(name: str, numbers: list[float]) -> str:
    if not numbers:
        return "–"
    return f"{100 * np.mean(numbers):.0f} %" if _is_share(name) else number(median(numbers))


def _utility(name: str, numbers: list[float]) -> str:
    value = median(numbers)
    if value is None or not _is_share(name):
        return number(value)
    return f"{100 * value:.1f} %"


def missing(index: Index, kind: str) -> tuple[str, ...]:
    """Say which quantities of a kind have missing values, how many, and why."""
    names_by_fate: dict[tuple[str, str], list[str]] = {}
    for name in index.names(kind):
        series = index.series(kind, name)
        absent = [record for record in series.values() if record.value is None]
        if not absent:
            continue
        amount = "all" if len(absent) == len(series) else f"{len(absent)} of {len(series)}"
        reasons = sorted({record.note for record in absent if record.note})
        said = "; ".join(reasons[:3]) or "no reason was recorded"
        more = f"; {count(len(reasons) - 3, 'further reason')}" if len(reasons) > 3 else ""
        names_by_fate.setdefault((amount, said + more), []).append(label(name))
    return tuple(
        f"{', '.join(names)}: {amount} missing ({reasons})."
        for (amount, reasons), names in names_by_fate.items()
    )


def scores_table(index: Index) -> Table:
    """Return one row a score: its median with the error bar of that value, and all states."""
    rows = []
    for name in index.names("score"):
        series = index.series("score", name)
        if not any(record.state or record.error is not None for record in series.values()):
            continue
        known = sorted(
            ((r.value, r.error) for r in series.values() if r.value is not None),
            key=lambda pair: pair[0],
        )
        typical = known[(len(known) - 1) // 2] if known else (None, None)
        bars = [e / abs(v) for v, e in known if e is not None and v]
        states = Counter(record.state or "not said" for record in series.values())
        rows.append(
            (
                heading(name, unit_of(series)),
                _with_bar(*typical),
                f"{100 * max(bars):.2g} %" if bars else "–",
                ", ".join(f"{amount:,} {state}" for state, amount in states.most_common()),
            )
        )
    return Table(("score", "median value", "widest error bar", "values"), tuple(rows))


def _with_bar(value: float | None, error: float | None) -> str:
    return number(value) if error is None else f"{number(value)} ± {number(error, 2)}"


def attacks_table(index: Index) -> Table:
    """Return one row a round with what the attacker itself can see of its success."""
    names = index.names("attack")
    values_in = {name: by_round(index.series("attack", name)) for name in names}
    clients = {key[:2] for name in names for key in index.series("attack", name)}
    clients_in = Counter(server_round for server_round, _ in clients)
    failed_in = Counter(server_round for server_round, _ in failed_attacks(index))
    rows = tuple(
        (
            str(server_round),
            str(clients_in[server_round]),
            str(failed_in[server_round]),
            *(number(median(values_in[name].get(server_round, []))) for name in names),
        )
        for server_round in index.rounds("attack")
    )
    columns = ("round", "updates attacked", "without result",
               *(f"{label(name)} median" for name in names))  # fmt: skip
    return Table(columns, rows, missing(index, "attack"))


def clients_table(
    index: Index, events: Sequence[RunEvent], recovered_psnr: float, limit: int
) -> Table:
    """Return one row a client: the client with the best reconstruction first."""
    psnr_of = by_client(index.series("metric", "psnr"))
    scores = index.names("score")
    scores_of = {name: by_client(index.series("score", name)) for name in scores}
    attacked = index.attacked()
    images_of = Counter(key[1] for key in attacked)
    rounds_of = Counter(client for _, client in {key[:2] for key in attacked})
    troubles_of = Counter(event.client_id for event in events if event.level != "info")
    clients = images_of.keys() | {client for client in troubles_of if client >= 0}
    clients |= {key[1] for name in scores for key in index.series("score", name)}

    def worst_first(client_id: int) -> tuple[float, int]:
        return -max(psnr_of.get(client_id, []), default=-math.inf), client_id

    columns = ["client"]
    if attacked:
        columns += ["rounds attacked", "images", "recovered", "PSNR median, dB", "PSNR highest"]
    columns += [f"{label(name)} median" for name in scores] + ["errors, warnings"]
    rows = []
    for client_id in sorted(clients, key=worst_first)[:limit]:
        known = psnr_of.get(client_id, [])
        row = [str(client_id) if client_id >= 0 else "aggregate"]
        if attacked:
            recovered = sum(value >= recovered_psnr for value in known)
            row += [str(rounds_of[client_id]), str(images_of[client_id]),
                    share(recovered, images_of[client_id]) if known else "–",
                    decibel(median(known)), decibel(max(known, default=None))]  # fmt: skip
        row += [number(median(scores_of[name].get(client_id, []))) for name in scores]
        rows.append((*row, str(troubles_of[client_id]) if client_id >= 0 else "–"))
    left_out = len(clients) - len(rows)
    notes = (f"{count(left_out, 'further client')} left out.",) if left_out else ()
    return Table(tuple(columns), tuple(rows), notes)


def events_table(events: Sequence[RunEvent], limit: int) -> Table:
    """Return errors and warnings, errors first, then what was merely noted."""
    order = {"error": 0, "warning": 1, "info": 2}
    ranked = sorted(events, key=lambda event: order[event.level])
    rows = tuple(
        (event.level, str(event.server_round or "–"), who(event.client_id), event.message)
        for event in ranked[:limit]
    )
    left_out = len(events) - len(rows)
    notes = (f"{count(left_out, 'further event')} left out; all are in records.jsonl.",)
    return Table(("level", "round", "where", "what happened"), rows, notes if left_out else ())


def costs_table(index: Index) -> Table:
    """Return one row a round and a total; each cost is summed over the clients."""
    names = index.names("cost")
    rounds = index.rounds("cost")
    values_in = {name: by_round(index.series("cost", name)) for name in names}
    rows = [
        (
            str(server_round) if server_round else "whole run",
            *(f"{sum(values_in[name].get(server_round, [])):,.2f}" for name in names),
        )
        for server_round in rounds
    ]
    totals = (f"{sum(values(index.series('cost', name))):,.2f}" for name in names)
    columns = tuple(_cost_heading(name, unit_of(index.series("cost", name))) for name in names)
    return Table(("round", *columns), (*rows, ("total", *totals)))


def _cost_heading(name: str, unit: str) -> str:
    words = label(name.removesuffix("_seconds"))
    return f"{words}, {'s' if name.endswith('_seconds') else unit or '1'}"
