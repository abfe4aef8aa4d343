"""The tables and notes of risk scores: by client, how sure they are, what was left out."""

from collections import Counter

from flwr_leakage.report.attempts import fates
from flwr_leakage.report.index import (
    MAX_ROWS,
    SPARED,
    Index,
    Table,
    by_client_of,
    count,
    heading,
    is_constant,
    label,
    median,
    number,
    unit_of,
)
from flwr_leakage.report.words import several

UNDEFENDED = (
    " δ is what a defense changed of an update. No defense changed these, so this number is 0 "
    "whatever the sample is; it tells samples apart in runs with a defense."
)


def left_out_by_plan(index: Index) -> tuple[str, ...]:
    """Say how many samples the plan of scoring left out."""
    names_by_share: dict[tuple[int, int], list[str]] = {}
    for name in index.names("score"):
        told = {k: SPARED.match(r.note) for k, r in index.series("score", name).items()}
        pairs = {
            key[:2]: tuple(int(text.replace(",", "")) for text in m.groups())
            for key, m in told.items() if m
        }  # fmt: skip
        if pairs:
            out, whole = (sum(numbers) for numbers in zip(*pairs.values(), strict=True))
            whole += sum(key[:2] not in pairs for key in told)  # clients of whom none was left out
            names_by_share.setdefault((out, whole), []).append(label(name))
    return tuple(
        f"{', '.join(names)}: {out:,} of {whole:,} samples (images of a client in a round) were "
        f"left out by the plan of scoring, which limits its cost (scoring.relative_cost): "
        f"{whole - out:,} were scored. The plots show those of them that were attacked too."
        for (out, whole), names in names_by_share.items()
    )


def constants(index: Index) -> tuple[str, ...]:
    """Name the scores that are one number throughout, and why: nothing of them could be drawn."""
    names_by_value: dict[tuple[str, str], list[str]] = {}
    for name in index.names("score"):
        series = index.series("score", name)
        if is_constant(series):
            known = [record for record in series.values() if record.value is not None]
            notes = {record.note for record in known}
            why = notes.pop() if len(notes) == 1 else ""
            names_by_value.setdefault((number(known[0].value), why), []).append(label(name))
    return tuple(
        f"{', '.join(names)}: {value} for every sample, hence with neither chart nor column."
        f"{f' The reason: {why}.' if why else ''}{UNDEFENDED * why.startswith('δ = 0')}"
        for (value, why), names in names_by_value.items()
    )


def scores_table(index: Index) -> Table:
    """Return one row a score: its median with the error bar of that value, and all states."""
    rows = []
    for name in index.names("score"):
        series = index.series("score", name)
        if is_constant(series):
            continue
        if not any(record.state or record.error is not None for record in series.values()):
            continue
        known = sorted(
            ((r.value, r.error) for r in series.values() if r.value is not None),
            key=lambda pair: pair[0],
        )
        typical = known[(len(known) - 1) // 2] if known else (None, None)
        bars = [e / abs(v) for v, e in known if e is not None and v]
        told = [record for record in series.values() if not SPARED.match(record.note)]
        states = Counter(record.state or "not said" for record in told)
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


def client_scores_table(index: Index, limit: int) -> Table:
    """Return one row a client with the median of each score, in the order of their numbers."""
    scores_of = {
        name: by_client_of(series)
        for name in index.names("score")
        if not is_constant(series := index.series("score", name))
    }
    clients = sorted({client for groups in scores_of.values() for client in groups})
    rows = tuple(
        (str(client), *(number(median(groups.get(client, []))) for groups in scores_of.values()))
        for client in clients[:limit]
    )
    left_out = len(clients) - len(rows)
    notes: tuple[str, ...] = ()
    if left_out:
        notes += (f"{count(left_out, 'further client')} left out.",)
    fate = fates(index)
    attacked = {client for _, client in (*fate.answered, *fate.unanswered)}
    untried = sorted(({client for _, client in fate.spared} - attacked) & set(clients))
    if attacked and untried and min(attacked) >= 0:
        verb = "was" if len(untried) == 1 else "were"
        notes += (
            f"{several(untried).capitalize()} {verb} not attacked: where a score makes them look "
            f"safe (as a large λmax does), nothing here has tested it.",
        )
    return Table(("client", *map(label, scores_of)), rows, notes, MAX_ROWS)
