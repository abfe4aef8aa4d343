"""Make the report's tables: rounds, attacks, clients, classes, events, scores and costs."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import compress
from statistics import fmean

from flwr_leakage.records import RunEvent
from flwr_leakage.report.attempts import (
    Attempt,
    Fates,
    does,
    ended,
    fates,
    grouped_by_client,
    identified,
    risk,
    tally,
)
from flwr_leakage.report.grades import GRADES
from flwr_leakage.report.index import (
    RANKED,
    RANKED_CLIENTS,
    SPARED,
    Index,
    Series,
    Table,
    by_round,
    count,
    decibel,
    grouped,
    heading,
    is_constant,
    known,
    label,
    median,
    number,
    percent,
    several,
    share,
    unit_of,
    values,
    who,
)
from flwr_leakage.report.replays import replay_of_client, replays


def rounds_table(index: Index, found: Sequence[Attempt]) -> Table:
    """Return a table with one row per round: accuracy, grades, PSNR and other metrics of the
    attack.
    """
    hidden: tuple[str, ...] = (
        "psnr", "blind_psnr", "blind_ssim", "identification_rank",
        "affine_psnr", "blind_affine_psnr", "affine_identification_rank",
        # The metrics of texts have their own table, in which a text that was not recovered counts
        # as 0.
        "token_accuracy", "exact_text", "rouge_l", "blind_token_accuracy", "named_tokens",
    )  # fmt: skip
    known_metrics = [name for name in index.names("metric") if values(index.series("metric", name))]
    psnr_known = "psnr" in known_metrics
    # PSNR says the same as MSE and RMSE, and a table with more columns would not fit.
    hidden += ("mse", "rmse") * psnr_known
    metrics = [name for name in known_metrics if name not in hidden]
    utilities = index.names("utility")
    psnr, blind = index.series("metric", "psnr"), index.series("metric", "blind_psnr")
    columns = ["round", *(label(name) for name in utilities)]
    if found:
        columns += ["attempts", *GRADES]
    if psnr:
        columns += ["PSNR median, dB", "PSNR highest", "PSNR lowest", "blind guess median, dB"]
    columns += [_metric_heading(name, index.series("metric", name)) for name in metrics]
    found_in = grouped((attempt.key[0], attempt) for attempt in found)
    psnr_in, blind_in = by_round(psnr), by_round(blind)
    metrics_in = {name: by_round(index.series("metric", name)) for name in metrics}
    utilities_in = {name: by_round(index.series("utility", name)) for name in utilities}
    rows = []
    for server_round in index.rounds("metric", "utility"):
        reached, here = psnr_in.get(server_round, []), found_in.get(server_round, [])
        row = [str(server_round) if server_round else "before"]
        row += [_utility(name, utilities_in[name].get(server_round, [])) for name in utilities]
        if found:
            row += [str(len(here)) if here else "–", *_grades(here)]
        if psnr:
            row += [decibel(median(reached)), decibel(max(reached, default=None)),
                    decibel(min(reached, default=None)),
                    decibel(median(blind_in.get(server_round, [])))]  # fmt: skip
        row += [_metric(name, metrics_in[name].get(server_round, [])) for name in metrics]
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows), missing(index, "metric"))


def _grades(found: Sequence[Attempt]) -> list[str]:
    grades = tally(found)
    return [str(grades[name]) if grades.total() else "–" for name in GRADES]


def classes_table(found: Sequence[Attempt]) -> Table:
    """Return a table of the samples' classes, sorted by the worst leak of a class's sample.

    The table has no rows if no class is known.
    """
    by_class = grouped((attempt.label, attempt) for attempt in found if attempt.label)
    worst = {name: max(group, key=lambda a: a.leak) for name, group in by_class.items()}
    rows = tuple(
        (
            name,
            str(len(by_class[name])),
            *_grades(by_class[name]),
            decibel(worst[name].psnr),
            f"round {worst[name].key[0]}, {who(worst[name].key[1])}",
        )
        for name in sorted(sorted(by_class), key=lambda name: worst[name].leak, reverse=True)
    )
    columns = ("class", "attempts", *GRADES, "worst case, dB", "where")
    return Table(columns, rows, (), ("where",)).without_decibels()


def _is_share(name: str) -> bool:
    return name.endswith("accuracy")


def _metric_heading(name: str, series: Series) -> str:
    if _is_share(name):
        return label(name)
    return f"{heading(name, '' if unit_of(series) == 'pixel' else unit_of(series))} median"


def _metric(name: str, numbers: list[float]) -> str:
    if not numbers:
        return "–"
    return percent(fmean(numbers)) if _is_share(name) else number(median(numbers))


def _utility(name: str, numbers: list[float]) -> str:
    return percent(median(numbers), 1) if _is_share(name) else number(median(numbers))


def missing(index: Index, kind: str) -> tuple[str, ...]:
    """Return sentences on how many values of a kind of record, such as ``score``, are missing, and
    why.
    """
    names_by_fate: dict[tuple[str, str], list[str]] = {}
    lpips: list[str] = []
    for name in index.names(kind):
        series = index.series(kind, name)
        absent = [r for r in series.values() if r.value is None and not SPARED.match(r.note)]
        if not absent:
            continue
        whole = len(absent) + len(values(series))
        amount = "all" if len(absent) == whole else f"{len(absent)} of {whole}"
        reasons = sorted({record.note for record in absent if record.note})
        if name.startswith("lpips") and (told := without_weights(reasons, len(absent), whole)):
            lpips.append(told)
            continue
        said = "; ".join(reasons[:3]) or "no reason was recorded"
        more = f"; {count(len(reasons) - 3, 'further reason')}" if len(reasons) > 3 else ""
        names_by_fate.setdefault((amount, said + more), []).append(label(name))
    return (
        *lpips,
        *tuple(
            f"{', '.join(names)}: {amount} missing ({reasons})."
            for (amount, reasons), names in names_by_fate.items()
        ),
    )


def without_weights(reasons: Sequence[str], absent: int, whole: int) -> str:
    """Return a sentence if LPIPS was not measured for lack of its network's weights; else empty.

    The sentence replaces the recorded ``reasons``, which name folders. ``absent`` of ``whole``
    values are missing.

    Example:
        >>> without_weights(["no trained backbone is at hand (download is off)"], 3, 3)
        'LPIPS was not measured: its weights are not at hand.'
    """
    if not reasons or not all("no trained backbone is at hand" in why for why in reasons):
        return ""
    fetched = any("could not be fetched" in why for why in reasons)
    why = "could not be fetched (no network)" if fetched else "are not at hand"
    some = f" on {absent} of {whole} images" if absent < whole else ""
    return f"LPIPS was not measured{some}: its weights {why}."


def attacks_table(index: Index, found: Sequence[Attempt]) -> Table:
    """Return a table with one row per round: attacked updates, failures, and the attack's own
    numbers, such as its final objective.
    """
    names = [name for name in index.names("attack") if name != "stopped_by_budget"]
    stopped_in = Counter(server_round for server_round, _ in ended(index, found))
    values_in = {name: by_round(index.series("attack", name)) for name in names}
    clients = {key[:2] for name in names for key in index.series("attack", name)}
    clients_in = Counter(server_round for server_round, _ in clients)
    failed_in = Counter(server_round for server_round, _ in fates(index).unanswered)
    rows = tuple(
        (
            str(server_round),
            str(clients_in[server_round]),
            str(failed_in[server_round]),
            *([str(stopped_in[server_round])] * bool(stopped_in)),
            *(number(median(values_in[name].get(server_round, []))) for name in names),
        )
        for server_round in index.rounds("attack")
    )
    columns = ("round", "updates attacked", "without result",
               *(["ended by the time limit"] * bool(stopped_in)),
               *(f"{label(name)} median" for name in names))  # fmt: skip
    return Table(columns, rows, missing(index, "attack"))


DOES, TRAINED = "what it does a round", "a replay gives the update (before a defense)"


BECAUSE = "not attacked, because"


def clients_table(
    index: Index, events: Sequence[RunEvent], found: Sequence[Attempt], limit: int
) -> Table:
    """Return a table of at most ``limit`` attacked clients, those most at risk first."""
    by_client = grouped_by_client(found)
    attacked = _attacked(fates(index), found)
    # As sorting is stable, clients of equal risk keep the ascending order of their numbers.
    by_risk = sorted(sorted(attacked), key=lambda c: risk(by_client.get(c, [])), reverse=True)
    cells = {}
    for client in by_risk[:limit]:
        here = by_client.get(client, [])
        worst = max(here, key=lambda attempt: attempt.leak, default=None)
        tried = str(len(here)) if here else "–"
        reached = decibel(worst.psnr if worst else None)
        cells[client] = (tried, *_grades(here), reached, share(*identified(here)))
    by_decibels = any(attempt.psnr is not None for attempt in found)
    notes = (
        *_left_out("client", attacked, cells),
        *([RANKED, RANKED_CLIENTS] * by_decibels),
    )
    columns = ("attempts", *GRADES, "worst case, dB", "identified")
    return _of_clients(index, events, columns, cells, {}, notes).without_decibels()


def _of_clients(
    index: Index,
    events: Sequence[RunEvent],
    columns: Sequence[str],
    cells: Mapping[int, Sequence[str]],
    spared: Mapping[int, str],
    notes: tuple[str, ...],
) -> Table:
    """Return a table with a row for each client in ``cells``.

    ``cells`` holds a client's entries for ``columns``. Further columns tell its local training, why
    it was not attacked (``spared``), whether repeating its training gives its updates, and its
    errors. Columns without content are left out. ``notes`` stand below the table.
    """
    doing, replayed, troubles_of = does(index), replays(index, events), _troubles(events)
    is_replayed = bool(replayed.same or replayed.other or replayed.undone)
    has = (True, bool(doing), *[True] * len(columns), bool(spared), is_replayed, True)
    rows = (
        (
            str(client) if client >= 0 else "aggregate",
            doing.get(client, "–"),
            *own,
            spared.get(client, "–"),
            replay_of_client(replayed, client),
            str(troubles_of[client]) if client >= 0 else "–",
        )
        for client, own in cells.items()
    )
    headings = ("client", DOES, *columns, BECAUSE, TRAINED, "errors, warnings")
    shown = tuple(tuple(compress(row, has)) for row in rows)
    texts = (DOES, BECAUSE, TRAINED)
    return Table(tuple(compress(headings, has)), shown, notes, texts)


def unattacked_table(
    index: Index, events: Sequence[RunEvent], found: Sequence[Attempt], limit: int
) -> Table:
    """Return a table of at most ``limit`` clients that were never attacked, with the reasons."""
    fate = fates(index)
    attacked = _attacked(fate, found)
    hit_rounds = {server_round for server_round, _ in fate.attacked}
    # Later entries replace earlier ones of the same client. Reasons from rounds in which other
    # clients were attacked say most about a client, so they come last.
    ordered = sorted(fate.spared.items(), key=lambda item: (item[0][0] in hit_rounds, item[0]))
    spared = {client: reason for (_, client), reason in ordered}
    named = spared.keys() | {client for client in _troubles(events) if client >= 0}
    named |= {key[1] for key in index.series("check", "replay_residual")}
    clients = sorted(named - attacked)
    cells = dict.fromkeys(clients[:limit], ())
    return _of_clients(index, events, (), cells, spared, _left_out("client", clients, cells))


def _attacked(fate: Fates, found: Sequence[Attempt]) -> set[int]:
    hit = (*fate.attacked, *(attempt.key[:2] for attempt in found))
    return {client for _, client in hit}


def _troubles(events: Sequence[RunEvent]) -> Counter[int]:
    return Counter(event.client_id for event in events if event.level != "info")


def _left_out(
    noun: str, entries: Collection[object], rows: Collection[object], where: str = ""
) -> tuple[str, ...]:
    """Return a sentence on how many of the ``entries``, such as clients, have no row in a table
    with the given ``rows``; an empty tuple if all have one. ``where`` are words for where to find
    these entries.
    """
    left_out = len(entries) - len(rows)
    return (f"{count(left_out, f'further {noun}')} left out{where}.",) if left_out else ()


def events_table(events: Sequence[RunEvent], limit: int) -> Table:
    """Return a table of at most ``limit`` of the run's events, errors first."""
    order = {"error": 0, "warning": 1, "info": 2}
    ranked = sorted(events, key=lambda event: order[event.level])
    rows = tuple(
        (event.level, str(event.server_round or "–"), who(event.client_id), event.message)
        for event in ranked[:limit]
    )
    notes = _left_out("event", events, rows, "; all are in records.jsonl")
    return Table(("level", "round", "where", "what happened"), rows, notes)


UNDEFENDED = (
    " δ is what a defense changed of an update. No defense changed these, so this number is 0 "
    "whatever the sample is; it tells samples apart in runs with a defense."
)


def left_out_by_plan(index: Index) -> tuple[str, ...]:
    """Return sentences on how many samples were not scored, to limit the cost of scoring."""
    names_by_share: dict[tuple[int, int], list[str]] = {}
    for name in index.names("score"):
        told = {k: SPARED.match(r.note) for k, r in index.series("score", name).items()}
        pairs = {
            key[:2]: tuple(int(text.replace(",", "")) for text in m.groups())
            for key, m in told.items() if m
        }  # fmt: skip
        if pairs:
            out, whole = (sum(numbers) for numbers in zip(*pairs.values(), strict=True))
            # Clients without a note on left out samples had all of their samples scored, and these
            # count in ``whole``, too.
            whole += sum(key[:2] not in pairs for key in told)
            names_by_share.setdefault((out, whole), []).append(label(name))
    return tuple(
        f"{', '.join(names)}: {out:,} of {whole:,} samples ({index.sample.many} of a client in a "
        f"round) were left out by the plan of scoring, which limits its cost "
        f"(scoring.relative_cost): {whole - out:,} were scored. The plots show those of them that "
        f"were attacked too."
        for (out, whole), names in names_by_share.items()
    )


def constants(index: Index) -> tuple[str, ...]:
    """Return sentences on the scores that are equal for all samples, with the value and the reason.

    Such scores have no chart.
    """
    names_by_value: dict[tuple[str, str], list[str]] = {}
    for name in index.names("score"):
        series = index.series("score", name)
        if is_constant(series):
            notes = {record.note for record in series.values() if record.value is not None}
            why = notes.pop() if len(notes) == 1 else ""
            value = number(values(series)[0])
            names_by_value.setdefault((value, why), []).append(label(name))
    return tuple(
        f"{', '.join(names)}: {value} for every sample, hence with neither chart nor column."
        f"{f' The reason: {why}.' if why else ''}{UNDEFENDED * why.startswith('δ = 0')}"
        for (value, why), names in names_by_value.items()
    )


def _middle(ordered: Sequence[tuple[float, float | None]]) -> tuple[float | None, float | None]:
    """Return the median value of sorted (value, error bar) pairs, and its error bar.

    The bar is the wider one of the one or two pairs in the middle. ``None`` stands for an unknown
    number.
    """
    if not ordered:
        return None, None
    middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    bars = [bar for _, bar in middle if bar is not None]
    return fmean(value for value, _ in middle), max(bars, default=None)


def scores_table(index: Index) -> Table:
    """Return a table of the scores: the median over clients, rounds and samples with its error
    bar, and the number of values by state.

    A state says how a value may be read, such as ``upper bound``. A score whose values have
    neither an error bar nor a state is left out.
    """
    rows = []
    for name in index.names("score"):
        series = index.series("score", name)
        if is_constant(series):
            continue
        if not any(record.state or record.error is not None for record in series.values()):
            continue
        ordered = sorted(
            ((r.value, r.error) for r in series.values() if r.value is not None),
            key=lambda pair: pair[0],
        )
        typical, bar = _middle(ordered)
        bars = [e / abs(v) for v, e in ordered if e is not None and v]
        told = [record for record in series.values() if not SPARED.match(record.note)]
        states = Counter(record.state or "not said" for record in told)
        rows.append(
            (
                heading(name, unit_of(series)),
                number(typical) + (f" ± {number(bar, 2)}" if bar is not None else ""),
                f"{100 * max(bars):.2g} %" if bars else "–",
                ", ".join(f"{amount:,} {state}" for state, amount in states.most_common()),
            )
        )
    return Table(("score", "median value", "widest error bar", "values"), tuple(rows))


def client_scores_table(index: Index, limit: int) -> Table:
    """Return a table of each client's median of each score, with at most ``limit`` rows."""
    scores_of = {
        name: grouped((key[1], value) for key, value in known(series).items())
        for name in index.names("score")
        if not is_constant(series := index.series("score", name))
    }
    clients = sorted({client for groups in scores_of.values() for client in groups})
    rows = tuple(
        (str(client), *(number(median(groups.get(client, []))) for groups in scores_of.values()))
        for client in clients[:limit]
    )
    notes = _left_out("client", clients, rows)
    fate = fates(index)
    attacked = {client for _, client in fate.attacked}
    untried = sorted(({client for _, client in fate.spared} - attacked) & set(clients))
    if attacked and untried and min(attacked) >= 0:
        verb, whom = ("was", "it") if len(untried) == 1 else ("were", "them")
        notes += (
            f"{several(untried).capitalize()} {verb} not attacked: where a score makes {whom} look "
            f"safe (as a large λmax does), nothing here has tested it.",
        )
    return Table(("client", *map(label, scores_of)), rows, notes)


CLOCKS = (
    "Wall seconds are what a clock on the wall shows, waiting included. CPU seconds are what the "
    "processors worked: less where the machine is shared, more where several work at once. Time "
    "limits of attacks count CPU seconds."
)


def costs_table(index: Index) -> Table:
    """Return a table of costs, summed over the clients, with one row per round and a total."""
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
    return Table(("round", *columns), (("total", *totals), *rows), (CLOCKS,))


def _cost_heading(name: str, unit: str) -> str:
    words = label(name.removesuffix("_seconds"))
    return f"{words}, {'s' if name.endswith('_seconds') else unit or '1'}"
