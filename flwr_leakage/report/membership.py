"""Report on membership tests: whether given records were among a client's training samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from flwr_leakage.measurements import NOT_TESTED, LeakageRecord, RunEvent
from flwr_leakage.members.verdict import FORGEABLE
from flwr_leakage.report.attempts import where
from flwr_leakage.report.index import (
    Index,
    Key,
    Table,
    count,
    grouped,
    number,
    several,
    who,
)

LEVEL = 0.01
"""The largest corrected p-value at which a record counts as found to be used. Of runs in which no
tested record was used, at most one in a hundred then finds one.
"""

FORGED = "2 of 912 records that were mixed or made from an update to deceive, in measurements"
"""Words for how many records that were made to deceive passed the test by algebra. The figures are
those of the table on made candidates in ``simulations/benchmarks/results/membership.md``.
"""

SMALLEST = 1e-3
"""The least p-value that the page tells. Some hundreds of null records, which were not used,
support no smaller one.
"""

CALIBRATED = "0.02 and 0.11 % of 10,000 unused records each"
"""The shares of unused records that had p ≤ 0.001 before the correction, for two networks. They are
from the lines on calibration in ``simulations/benchmarks/results/membership.md``.
"""


def untested_told(events: Sequence[RunEvent]) -> str:
    """Return words on why no candidate, a record given to the server, was tested for membership.

    The ``events`` of the run tell the refusals to test.
    """
    asked = "Whether a given record was used (membership)"
    for event in events:
        if event.message.startswith(NOT_TESTED):
            why = event.message.removeprefix(NOT_TESTED).strip()
            return f"{asked}: the server was given records, and could not test them {why}"
    return f"{asked}: the server was given none to look for (candidates=…)."


@dataclass(frozen=True)
class MembershipSection:
    """The section of the page on membership tests.

    Attributes:
        called: the number of tested records that the tests found to be used in training.
        sentences: the answer and the findings behind it.
        table: a table of the tested records, the most likely members first.
    """

    called: int
    sentences: tuple[str, ...]
    table: Table


@dataclass(frozen=True)
class _Candidate:
    """One tested record, with the results of its tests on all updates.

    Attributes:
        sample: the number of the record.
        p_value: the corrected p-value of the clearest of its tests, times the number of updates, at
            most 1; ``None`` if no test says anything.
        server_round: the round of the update with that p-value.
        client_id: the client of the update with that p-value.
        exact_in: the number of updates that provably contain the record, by algebra.
        is_unresolved: whether the record's test statistic in that update is beyond those of all
            null records (which cannot be members), so that the p-value is only an upper bound.
        is_tail: whether the p-value is that of a tail that was fitted to the null records.
        is_composite: whether the record's inputs to the network's layers are linear combinations of
            those of that update's samples, although the record's own gradient is no part of the
            update, and no update contains the record by algebra.
        is_silent: whether the record would change that update by less than its rounding.
        used: whether the record was in some update; ``None`` if the truth is not known.
    """

    sample: int
    p_value: float | None
    server_round: int
    client_id: int
    exact_in: int
    is_unresolved: bool
    is_tail: bool
    is_composite: bool
    is_silent: bool
    used: bool | None

    @property
    def is_found(self) -> bool:
        """Return whether the record counts as used in training: its p-value is at most ``LEVEL``,
        and it is not composite.
        """
        return self.p_value is not None and self.p_value <= LEVEL and not self.is_composite


def membership_section(index: Index) -> MembershipSection | None:
    """Return the section on membership tests; ``None`` if there were none."""
    evidence = index.series("membership", "membership_evidence")
    if not evidence:
        return None
    found = _candidates(index, len(evidence))
    called = [each for each in found if each.is_found]
    rounds = several(sorted({key[0] for key in evidence}), "round")
    clients = sorted({key[1] for key in evidence if key[1] >= 0})
    whose = several(clients) if clients else "the sum of all clients"
    tested = f"{count(len(found), 'record')} in {count(len(evidence), 'update')}"
    apart = (
        "The test is apart from the attack on images, and also takes updates that were not "
        "attacked."
    )
    found_told = f"It found {_used_told(called) if called else 'none of them used'}."
    sentences = [f"The server tested {tested}: of {whose} in {rounds}. {apart} {found_told}"]
    if called:
        sentences.append(
            "The test compares each record with null records. The server assumes that no client "
            "used these and that the tested records are like them: one that differs, as by its "
            "device or its class, may be found without being used. If both hold, and the tail of "
            "the null records is as it was fitted, chance finds an unused record in at most one of "
            "a hundred such runs. Chance is not the only error. What statistics find may be a near "
            "copy of a used record, such as a crop or the next frame of a film, or a record that "
            "somebody made from the update. Few made records pass by algebra (see the notes)."
        )
    forgeable = any(FORGEABLE in record.note for record in evidence.values())
    if called and forgeable:
        sentences.append(
            "Of some updates a record's own gradient could not be tested, as labels were not known "
            "or layers get several inputs a sample. Whoever saw such an update can make a record "
            "that passes for a used one, also by algebra: what is found tells of a person "
            "only where the record's origin is vouched for."
        )
    composite = sum(each.is_composite for each in found)
    if composite:
        be = "is" if composite == 1 else "are"
        sentences.append(
            f"{count(composite, 'record')} {be} spanned by what was used, without a gradient of "
            "its own in it: a near copy of a used record, a mixture of several, or made by "
            "somebody who saw the update. It then says nothing of a person, and does not count as "
            "found. The same is seen where its label is wrong, or the client mixes its records."
        )
    if len(called) + composite < len(found):
        sentences.append(
            f"A record that was not found may have been used all the same. {_power(index)}"
        )
    sentences += _judged(found)
    exact_in = [place[:2] for place, record in evidence.items() if record.value == 2]
    sentences += _rates(index)
    place, how = _example(evidence, called)
    where = f"{who(place[1])} in round {place[0]}" if place[1] >= 0 else f"round {place[0]}"
    notes = (
        "Records found by algebra come first, then the rows are sorted by p. A record's number is "
        "its place in what the server was given, from 0 on.",
        f"p is corrected for all records and updates. A record counts as found where it is at most "
        f"{LEVEL:g}. With p as the limit, and under the conditions above, at most that "
        f"share of runs would find any record that was not used. It is not the chance that the "
        f"verdict is wrong, and a large p does not show that the record was not used. A p “of a "
        f"fitted tail” is of a record beyond all null records: its order of magnitude may be "
        f"wrong, and a verdict by statistics then rests on this tail. In measurements {CALIBRATED} "
        f"had p at most 0.001 before the correction.",
        "Most clearly in: by algebra, an update that holds the record; by statistics, the update "
        "with the smallest p, which does not show whose record it is. Others may hold it too.",
        *_by_algebra(exact_in, forgeable),
        f"For statisticians, how one update was tested ({where}): {how.note.removesuffix('.')}.",
    )
    truth = any(each.used is not None for each in found)
    columns = ("record", "verdict", "p, corrected", "most clearly in", *(["was used"] * truth))
    rows = tuple(_row(each, truth) for each in sorted(found, key=_order))
    texts = ("verdict", "most clearly in")
    return MembershipSection(len(called), tuple(sentences), Table(columns, rows, notes, texts))


def _example(
    evidence: Mapping[Key, LeakageRecord], called: Sequence[_Candidate]
) -> tuple[Key, LeakageRecord]:
    """Return the test of one update as an example, with its place (round, client, sample).

    The update is the one with the smallest p-value of a record that statistics found, else the last
    one. ``evidence`` holds the tests, and ``called`` the found records.
    """
    likely = [each for each in called if not each.exact_in]
    if likely:
        best = min(likely, key=_order)
        for place, record in evidence.items():
            if place[:2] == (best.server_round, best.client_id):
                return place, record
    (*_, last) = evidence.items()
    return last


def _used_told(called: Sequence[_Candidate]) -> str:
    """Return words such as ``3, or near copies, used, 1 by algebra`` for the found records."""
    exact = sum(each.exact_in > 0 for each in called)
    near = ", or near copies," if exact < len(called) else ""
    return f"{len(called)}{near} used" + f", {exact} by algebra" * bool(exact)


def _by_algebra(updates: Sequence[tuple[int, int]], forgeable: bool) -> list[str]:
    """Return a sentence on the meaning of evidence by algebra; an empty list if no update gave any.

    ``updates`` are the (round, client) of the updates that gave such evidence. ``forgeable`` tells
    whether records' own gradients could not be tested in some updates, so that a record made from
    an update may pass.
    """
    if not updates:
        return []
    told = (
        "the record's own gradient is in the update up to rounding, and no null record's is. A "
        "copy that is equal for the tested layers passes as well, such as the image scaled by a "
        f"factor, and so did {FORGED}"
    )
    if forgeable:
        told = (
            "the inputs that the record gives to the layers are combinations of those of the used "
            "records up to rounding, as no null record's are"
        )
    return [f"Only the updates of {where(updates)} could be tested by algebra: {told}."]


def _order(each: _Candidate) -> tuple[bool, float, int]:
    """Return a sort key by which records found by algebra come first, then those with small
    p-values.
    """
    p = 2.0 if each.p_value is None else each.p_value
    return not (each.is_found and each.exact_in), p, each.sample


def _candidates(index: Index, updates: int) -> list[_Candidate]:
    corrected = index.series("membership", "membership_corrected")
    exact = index.series("membership", "membership_exact")
    truth = index.series("membership", "membership_truth")
    composite = index.series("membership", "membership_composite")
    silent = index.series("membership", "membership_silent")
    tail = index.series("membership", "membership_tail")

    def p_at(key: Key) -> float | None:
        value = corrected[key].value
        return None if value is None else min(1.0, value * updates)

    def order(key: Key) -> tuple[bool, bool, float]:
        return p_at(key) is None, key not in exact, p_at(key) or 0.0

    found = []
    for sample, keys in grouped((key[2], key) for key in corrected).items():
        best = min(keys, key=order)
        times = sum(key[2] == sample for key in exact)
        held = [record.value == 1 for key, record in truth.items() if key[2] == sample]
        found.append(
            _Candidate(
                sample,
                p_at(best),
                server_round=best[0],
                client_id=best[1],
                exact_in=times,
                is_unresolved=corrected[best].state == "upper bound",
                is_tail=best in tail,
                is_composite=best in composite and not times,
                is_silent=best in silent,
                used=any(held) if held else None,
            )
        )
    return found


def _power(index: Index) -> str:
    """Return a sentence on the share of used records that the tests find, as far as it is known."""
    evidence = index.series("membership", "membership_evidence")
    power = index.series("membership", "membership_power")
    exact = sum(record.value == 2 for record in evidence.values())
    silent = sum(record.value == 0 for record in evidence.values())
    rehearsed = [key for key, record in evidence.items() if record.value == 1 and key in power]
    known = [value for key in rehearsed if (value := power[key].value) is not None]
    untold = len(evidence) - exact - silent - len(known)
    told = []
    if exact:
        told.append(
            f"in {count(exact, 'update')}, by algebra, nearly all except those that the model knew "
            f"too well to change by them, and those that the client augmented or mixed first"
        )
    if known:
        low, high = 100 * min(known), 100 * max(known)
        share = f"{low:.0f} %" if round(low) == round(high) else f"{low:.0f} to {high:.0f} %"
        told.append(
            f"in {count(len(known), 'update')}, by statistics, nobody knows how many: a rehearsal "
            f"that allowed one false alarm in 100 records found {share}, and this table allows far "
            f"fewer false alarms, so that it finds less"
        )
    if untold:
        told.append(f"in {count(untold, 'update')} nobody knows how many")
    if silent:
        told.append(f"in {count(silent, 'update')} the test says nothing, in no direction")
    return f"How many of the used records the test finds: {'; '.join(told)}."


def members_told(index: Index, with_link: bool = True) -> str:
    """Return words for the number of tested records that were found to be used; empty if none was.

    ``with_link`` tells whether the words name the section of the page that says more.
    """
    evidence = index.series("membership", "membership_evidence")
    found = _candidates(index, len(evidence))
    called = [each for each in found if each.is_found]
    if not called:
        return ""
    if not with_link:
        near = "" if all(each.exact_in for each in called) else ", or near copies,"
        return f"{len(called)} of {count(len(found), 'tested record')}{near} found used"
    return (
        f"Of {count(len(found), 'record')} that the server tested, it found {_used_told(called)}: "
        f"see “Was this record used?”."
    )


def _rates(index: Index) -> list[str]:
    """Return a sentence on the share of members found at false alarm rates of 1 % and 0.1 %; empty
    if the truth is not known or the tests are too few.
    """
    shares = {rate: members_found(index, rate) for rate in (0.01, 0.001)}
    told = [f"{share.told()} at {100 * rate:g} %" for rate, share in shares.items() if share]
    if not told:
        return []
    return [
        f"Of records in an update, by the rate of false alarms: {' and '.join(told)} are found."
    ]


def _judged(found: list[_Candidate]) -> list[str]:
    """Return a sentence on how often the tests were right; empty if the truth is not known."""
    used = [each for each in found if each.used]
    others = [each for each in found if each.used is False]
    if not used and not others:
        return []
    right = sum(each.is_found for each in used)
    wrong = sum(each.is_found for each in others)
    return [
        f"In this simulation the truth is known: {right} of {count(len(used), 'used record')} were "
        f"found, and {wrong} of {count(len(others), 'record')} that no tested update held."
    ]


def _p_told(each: _Candidate) -> str:
    p = each.p_value
    if each.is_found and each.exact_in:
        return "not needed"
    told = f"below {SMALLEST:g}" if p is not None and p < SMALLEST else number(p, 2)
    return f"{told}, of a fitted tail" if each.is_found and each.is_tail else told


def _row(each: _Candidate, truth: bool) -> tuple[str, ...]:
    verdict, where = "not found; may have been used", "–"
    if each.p_value is None:
        verdict = "nothing can be said"
    elif each.is_found:
        verdict = "it or an equal copy was used, by algebra"
        if not each.exact_in:
            verdict = "it or a near copy was probably used, by statistics"
        where = f"{who(each.client_id)} of round {each.server_round}"
        if each.client_id < 0:
            where = f"some client of round {each.server_round}"
        elif not each.exact_in:
            where += ", which is no proof of whose it is"
    elif each.is_composite:
        verdict = "a near copy or mixture of used records, or made from the update"
    elif each.is_unresolved:
        verdict = "cannot be told: give more null records"
    elif each.is_silent:
        verdict = "cannot be told: the model knew it too well to leave a trace"
    told = {True: "yes", False: "no", None: "–"}[each.used]
    return (str(each.sample), verdict, _p_told(each), where, *([told] * truth))


@dataclass(frozen=True)
class Share:
    """A share, ``found`` successes of ``total`` independent trials, with its 95 % confidence
    interval.
    """

    found: int
    total: int

    def __add__(self, other: "Share") -> "Share":
        return Share(self.found + other.found, self.total + other.total)

    def told(self, style: str = ".0%") -> str:
        """Return the share and its 95 % interval (Clopper and Pearson 1934), in format ``style``.

        Example:
            >>> Share(8, 10).told()
            '80% (44% to 97%, n = 10)'
        """
        low, high = stats.binomtest(self.found, self.total).proportion_ci(method="exact")
        share = f"{self.found / self.total:{style}}"
        return f"{share} ({low:{style}} to {high:{style}}, n = {self.total})"


def members_found(index: Index, rate: float) -> Share | None:
    """Return the share of tested members that are found at a rate of false alarms in (0, 1).

    Members are (update, record) pairs whose record was in the update. A member is found if its
    p-value is below those of all non-members but a share ``rate``. A test without a result has
    p-value 1. The result is ``None`` without members, or with fewer than 1 / ``rate`` non-members.
    """
    members, others = tested_pairs(index)
    allowed = int(rate * len(others))
    if not members or not allowed:
        return None
    limit = sorted(others)[allowed]
    return Share(sum(p < limit for p in members), len(members))


def tested_pairs(index: Index) -> tuple[list[float], list[float]]:
    """Return the p-values of membership tests of members, and those of non-members.

    A member is a record that was in the tested update. Both lists are empty if the truth is not
    known.
    """
    truth = index.series("membership", "membership_truth")
    p_values = index.series("membership", "membership_p_value")
    members: list[float] = []
    others: list[float] = []
    for key, record in truth.items():
        tested = p_values.get(key)
        p = 1.0 if tested is None or tested.value is None else tested.value
        (members if record.value else others).append(p)
    return members, others
