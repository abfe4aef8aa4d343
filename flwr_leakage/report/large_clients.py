"""Report on clients with too many samples to attack: their labels, and attacks on steps
not sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr_leakage.report.attempts import (
    attempts,
    graded,
    is_solved,
    limit_told,
    tally,
)
from flwr_leakage.report.index import (
    Index,
    Table,
    count,
    decibel,
    number,
    percent,
    section,
    values,
    who,
)
from flwr_leakage.report.samples import Sample
from flwr_leakage.report.story import is_defended

MAX_CLIENTS = 4
"""The largest number of clients that the head of the section names. They are sorted by how far the
share of labels that the inference has right lies above that of a guess, the furthest first.
"""

MAX_CLASSES = 5
"""The largest number of classes that a row on a client's inferred labels names, a choice of layout.
The classes with the most samples come first.
"""

Counts = dict[int, float]


@dataclass(frozen=True)
class LargeClientsSection:
    """The section of the page on clients with many samples.

    Attributes:
        right: words for the mean share of labels inferred rightly, or expected to be right if the
            truth is unknown; ``None`` if nothing was inferred.
        blind: words for the share that the better of two guesses without the client's update has
            right.
        head: the sentences at the head of the section.
        labels: a table of updates with the inferred number of samples of each class.
        probe: a table of attacks on single steps that no client sent, by the number of samples.
        scores: a table of the scores that such a client can compute, with their cost.
    """

    right: str | None
    blind: str
    head: str
    labels: Table
    probe: Table
    scores: Table


def large_clients_section(index: Index, metadata: Mapping[str, Any]) -> LargeClientsSection | None:
    """Return the section on clients with many samples.

    The result is ``None`` if neither class counts were inferred nor single steps attacked that no
    client sent.
    """
    expected = index.series("labels", "expected_right")
    heads = {name.partition("/")[0] for name in index.names("probe")}
    sizes = sorted(int(head) for head in heads if head.isdigit())
    if not expected and not sizes:
        return None
    known = _counts(index, "inferred")
    true = _counts(index, "true")
    labels = _labels(index, known, true, is_defended(metadata))
    pairs = list(_against_guess(index).values())
    probe, seen = _probe(index, sizes, metadata)
    told, share, guess, many = [], None, "not known", index.sample.many
    if pairs:
        mean, blind = (100 * sum(part) / len(part) for part in zip(*pairs, strict=True))
        share, guess = f"{mean:.0f} %", f"{blind:.0f} %"
        over = f"mean over {count(len(pairs), 'update')}"
        each = f"{mean:.0f} % of an update’s labels are right, and {blind:.0f} %"
        counts = f"how many {many} of each class"
        if better := better_than_guess(index):
            whose = [
                f"client {client} ({percent(own)} of the labels right, a blind guess {percent(by)})"
                for client, (own, by) in list(better.items())[:MAX_CLIENTS]
            ]
            if more := len(better) - len(whose):
                whose.append(count(more, "other client"))
            told.append(f"What leaks all the same is {counts} some clients have: {_and(whose)}.")
            if len(pairs) > 1:
                told.append(f"In all, {each} by the better guess for each ({over}).")
        else:
            told.append(
                f"Of {counts} a client has, the inference tells no more than a blind guess does: "
                f"{each} by the better blind guess for each ({over})."
            )
    elif known:
        shares = values(expected)
        mean = 100 * sum(shares) / len(shares)
        share = f"{mean:.0f} % expected"
        equal = values(index.series("labels", "uniform_right"))
        guess = f"{100 * sum(equal) / len(equal):.0f} %" if equal else guess
        told.append(
            f"What leaks all the same is how many {many} of each class a client has: about "
            f"{mean:.0f} % of the inferred labels are expected to be right."
        )
    head = " ".join([*told, seen]).strip()
    return LargeClientsSection(share, guess, head, labels, probe, _scores(index.sample))


def _scores(noun: Sample) -> Table:
    """Return a table of the scores that a client of many samples can compute, and their cost."""
    columns = ("score", f"what it says of a client of many {noun.many}", f"cost, {noun.a}")
    return Table(
        columns,
        (
            (
                "gradient norm",
                f"which of its {noun.many} move the model most. On a trained network it ranks them "
                f"as an attack on single {noun.many} does; on an untrained one it does not.",
                "one gradient",
            ),
            (
                "influence (Krylov bound)",
                f"how far noise of a given size moves a reconstruction of each {noun.one}. It "
                f"ranks {noun.many} of an untrained network.",
                "17 products, of 5 to 30 training gradients each",
            ),
            (
                "bounds under noise",
                "what no attack can pass, where Gaussian noise is added. Without noise they say "
                "nothing.",
                "none to some hundred products",
            ),
        ),
        (
            f"They are of one step on each {noun.one} by itself, from the model that was received: "
            f"of many steps together they say which {noun.one} is most exposed, and not how much "
            f"is left of it. A client computes them of its own {noun.many}, by "
            f"flwr_leakage.score(model, inputs, targets); nothing of it travels. Source: "
            f"docs/scores.md.",
        ),
        texts=columns[1:],
    )


def _counts(index: Index, name: str) -> dict[tuple[int, int], Counts]:
    found: dict[tuple[int, int], Counts] = {}
    for (server_round, client, label), record in index.series("labels", name).items():
        found.setdefault((server_round, client), {})[label] = record.value or 0.0
    return found


def _right(counts: Mapping[int, float], truth: Mapping[int, float]) -> float:
    """Return the share of the true labels that inferred class counts have right, in any order.

    Both arguments give the number of samples of each class.
    """
    return sum(min(n, truth.get(label, 0.0)) for label, n in counts.items()) / sum(truth.values())


def _labels(
    index: Index,
    known: Mapping[tuple[int, int], Counts],
    true: Mapping[tuple[int, int], Counts],
    is_changed: bool,
) -> Table:
    """Return a table of inferred class counts, with the shares of labels that the inference and two
    guesses have right where the truth is known.

    The guesses, equal counts and the mean frequencies of the round's clients, do not use the
    update. ``known`` and ``true`` are inferred and true counts by (round, client). ``is_changed``
    tells whether a defense changed the updates, for which the table's expected share does not hold.
    """
    rows = []
    series = {n: index.series("labels", n) for n in ("expected_right", "least_right")}
    blind = index.series("labels", "uniform_right")
    for key in sorted(series["expected_right"], key=lambda key: (key[1], key[0])):
        place, record = key[:2], series["expected_right"][key]
        if record.value is None:
            reason = f"not inferred: {record.note}"
            rows.append((who(place[1]), str(place[0]), "–", reason, *["–"] * 4))
            continue
        counts = known[place]
        total = sum(counts.values())
        held = sorted(counts.items(), key=lambda one: -one[1])
        shown = ", ".join(f"{n:.0f} of class {label}" for label, n in held[:MAX_CLASSES] if n)
        cells = ["not known here", "–", "–"]
        if truth := true.get(place):
            shares = _shares(known, place, truth)
            cells = [percent(share) for share in shares] + ["–"] * (3 - len(shares))
        else:
            cells[1] = f"{percent(blind[key].value)} (expected)"
        least = series["least_right"][key].value
        expected = f"{percent(record.value)} (in the worst rehearsal {percent(least)})"
        if is_changed:
            expected = f"{percent(record.value)}, had no defense changed the update"
        rows.append((who(place[1]), str(place[0]), f"{total:,.0f}", shown, expected, *cells))
    columns = (
        "client", "round", index.sample.many, "inferred from its update alone (largest counts)",
        "right, as the server expects", "right, in truth", "guess: equal counts",
        "guess: mean of all clients",
    )  # fmt: skip
    notes = (
        f"Right: the share of a client's labels that were inferred, whatever their order. What "
        f"the server expects: it repeats the client's training on dummy {index.sample.many} with "
        f"known labels, infers those, and counts. It uses no private {index.sample.one}, and "
        f"holds for updates that are sent as they were trained: after noise or clipping less is "
        f"right. The rehearsals show a spread and no bound: the truth may lie below it. A guess is "
        f"made without the client's own update.",
    )
    return Table(columns, tuple(rows), notes, columns[3:5])


def _shares(
    known: Mapping[tuple[int, int], Counts], place: tuple[int, int], truth: Counts
) -> list[float]:
    """Return the share of labels that the inference from an update has right, then those of two
    guesses.

    One guess is equal counts of all classes. The second, if the round has several clients, is the
    mean of their inferred counts. ``known`` holds inferred counts by (round, client), and ``truth``
    the true ones at ``place``.
    """
    counts = known[place]
    total, classes = sum(counts.values()), len(counts)
    others = [each for where, each in known.items() if where[0] == place[0]]
    guesses = [dict.fromkeys(counts, total / classes)]
    guesses += [_mean(others, total)] if len(others) > 1 else []
    return [_right(each, truth) for each in (counts, *guesses)]


def inferred_beyond_guess(index: Index) -> set[tuple[int, int]]:
    """Return the (round, client) of updates whose inferred class counts have more labels right than
    a guess.

    The guess is made without the update. Updates whose true counts are not known are included.
    """
    right, found = _against_guess(index), set()
    for key, record in index.series("labels", "expected_right").items():
        place = key[:2]
        if record.value is not None:
            own, guess = right.get(place, (1.0, 0.0))
            found |= {place} if own > guess else set()
    return found


def _against_guess(index: Index) -> dict[tuple[int, int], tuple[float, float]]:
    """Return two shares of labels for each update whose true labels are known, by (round, client).

    The first is the share that the inference has right, and the second that of the better of two
    guesses without the update.
    """
    known, found = _counts(index, "inferred"), {}
    for place, truth in _counts(index, "true").items():
        if place in known:
            own, *guesses = _shares(known, place, truth)
            found[place] = own, max(guesses)
    return found


def better_than_guess(index: Index) -> dict[int, tuple[float, float]]:
    """Return two shares of labels for each client on whose labels the inference beats guesses.

    The first is the share that the inference has right, and the second that of the better of two
    guesses without the update. Of a client's updates, the one with the largest difference counts.
    Clients come by falling difference. Clients whose true labels are not known are left out.
    """
    found: dict[int, tuple[float, float]] = {}
    for (_, client), (own, guess) in sorted(
        _against_guess(index).items(), key=lambda each: each[1][1] - each[1][0]
    ):
        if own > guess:
            found.setdefault(client, (own, guess))
    return found


def _mean(several: Sequence[Counts], total: float) -> Counts:
    """Return the mean class frequencies of several clients, as counts that sum to ``total``."""
    found: Counts = {}
    for counts in several:
        for label, n in counts.items():
            share = n / sum(counts.values()) / len(several)
            found[label] = found.get(label, 0.0) + total * share
    return found


def _probe(index: Index, sizes: list[int], metadata: Mapping[str, Any]) -> tuple[Table, str]:
    """Return a table and a sentence on attacks on single training steps that no client sent.

    The table has a row for each number of samples in ``sizes``. If ``metadata`` tells of a defense,
    a note below the table says that these steps were made without it.
    """
    seconds = section(metadata, "config", "large_clients").get("probe_seconds")
    limited = limit_told(seconds if isinstance(seconds, float | int) else None)
    rows, leaks, parts, over, noun = [], [], [], 0, index.sample
    for size in sizes:
        grades = tally(attempts(index, str(size), "probe"))
        stopped = index.series("probe", f"{size}/stopped_by_budget")
        (place, ended), *_ = stopped.items()
        is_cut = bool(ended.value) and not is_solved(ended.note)
        psnr = values(index.series("probe", f"{size}/psnr"))
        blind = values(index.series("probe", f"{size}/blind_psnr"))
        limit = f"the {limited}" if is_cut else "the attack itself"
        fate = graded(grades) or "no reconstruction"
        rows.append(
            (
                count(size, noun.one), who(place[1]), fate,
                decibel(max(psnr, default=None)), decibel(max(blind, default=None)), limit,
            )
        )  # fmt: skip
        visible = grades["exact"] + grades["recognisable"]
        leaks += [f"{visible} of {size}"] if visible else []
        parts += [f"{grades['partly']} of {size}"] if grades["partly"] else []
        over += is_cut
    columns = (
        "one step on", "of", "what the attack would show", "best, dB", "blind guess, dB",
        "ended by",
    )  # fmt: skip
    spent = sum(values(index.series("cost", "probe_cpu_seconds")))
    bare = ", without the run’s defense," if is_defended(metadata) else ""
    notes = (
        f"What-if: no client sent this. A single SGD step on the first {noun.many} of a client was "
        f"made from the same model{bare} and attacked as an update of a small client is. It took "
        f"{number(spent)} CPU seconds. More of them, other sizes or none: "
        f"large_clients.probe_seconds and large_clients.probe_sizes.",
    )
    told = ""
    seen = [
        f"{_and(which)} {noun.many} could be seen{how}"
        for which, how in ((leaks, ""), (parts, " in part"))
        if which
    ]
    if seen:
        told = (
            f"Had a client sent one step on few of its {noun.many}{bare or ','} "
            f"{', and '.join(seen)} (what-if)."
        )
    elif rows:
        told = (
            f"One step on few of its {noun.many}{bare} would show none of them to this attack "
            f"(what-if)."
        )
    if over:
        told += f" The {limited} ended {over} of {count(len(rows), 'such attack')}: more may show."
    return Table(columns, tuple(rows), notes, texts=(columns[2],)).without_decibels(), told


def _and(several: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(several[:-1]), several[-1])))
