"""Was this record used? What the tests of candidates said, for people."""

from dataclasses import dataclass

from flwr_leakage.report.index import MAX_ROWS, Index, Table, count, number, who

LEVEL = 0.01
"""Corrected p-values up to this count as found: of runs without any of the candidates, at most one
in a hundred finds one."""

UNTESTED = "Whether a given record was used: no candidates were given to the server (candidates=…)."


@dataclass(frozen=True)
class MembershipSection:
    """What the page shows of membership.

    Attributes:
        sentences: the answer, and what it rests on.
        table: one row a candidate, the most likely members first.
    """

    sentences: tuple[str, ...]
    table: Table


@dataclass(frozen=True)
class _Candidate:
    """One candidate over all updates.

    Attributes:
        sample: its number.
        p_value: the smallest corrected p-value, times the updates that were tested, at most 1;
            ``None`` where no update told anything.
        server_round: of the update with it.
        client_id: likewise.
        exact_in: updates that hold it by algebra.
        used: whether it was in some update, where a simulation knows it.
    """

    sample: int
    p_value: float | None
    server_round: int
    client_id: int
    exact_in: int
    used: bool | None

    @property
    def is_found(self) -> bool:
        """Whether the test says that it was used."""
        return self.p_value is not None and self.p_value <= LEVEL


def membership_section(index: Index) -> MembershipSection | None:
    """Return what the tests said; ``None`` if there were none."""
    evidence = index.series("membership", "membership_evidence")
    if not evidence:
        return None
    found = _candidates(index, len(evidence))
    called = [each for each in found if each.is_found]
    exact = sum(each.exact_in > 0 for each in called)
    tested = f"{count(len(found), 'record')} in {count(len(evidence), 'update')}"
    answer = f"The server tested {tested}. It found {len(called)} of them used"
    answer += f", {exact} by algebra." if called else "."
    silent = sum(record.value == 0 for record in evidence.values())
    sentences = [answer]
    if silent:
        sentences.append(f"In {count(silent, 'update')} the test says nothing, in no direction.")
    if len(called) < len(found) and silent < len(evidence):
        sentences.append("A record that was not found may have been used all the same.")
    sentences += _judged(found)
    notes = (
        f"p is the chance of so small a residual for a record that was not used, corrected for all "
        f"records and updates; up to {LEVEL:g} it counts as found. A near copy of a record may be "
        f"taken for it.",
        *dict.fromkeys(record.note for record in list(evidence.values())[-3:]),
    )
    truth = any(each.used is not None for each in found)
    columns = ("record", "verdict", "p, corrected", "most likely in", *(["was used"] * truth))
    rows = tuple(
        _row(each, truth)
        for each in sorted(found, key=lambda c: (2.0 if c.p_value is None else c.p_value, c.sample))
    )
    texts = ("verdict", "most likely in")
    return MembershipSection(tuple(sentences), Table(columns, rows, notes, MAX_ROWS, texts))


def _candidates(index: Index, updates: int) -> list[_Candidate]:
    corrected = index.series("membership", "membership_corrected")
    exact = index.series("membership", "membership_exact")
    truth = index.series("membership", "membership_truth")
    best: dict[int, _Candidate] = {}
    for (server_round, client_id, sample), record in corrected.items():
        before = best.get(sample)
        p = None if record.value is None else min(1.0, record.value * updates)
        is_less = p is not None and (before is None or before.p_value is None or p < before.p_value)
        if before is None or is_less:
            times = sum(key[2] == sample for key in exact) if before is None else before.exact_in
            held = [row.value == 1 for key, row in truth.items() if key[2] == sample]
            used = (any(held) if held else None) if before is None else before.used
            best[sample] = _Candidate(sample, p, server_round, client_id, times, used)
    return list(best.values())


def _judged(found: list[_Candidate]) -> list[str]:
    """Return how often the test was right, if a simulation knows."""
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


def _row(each: _Candidate, truth: bool) -> tuple[str, ...]:
    verdict, where = "not found", "–"
    if each.p_value is None:
        verdict = "nothing can be said"
    elif each.is_found:
        verdict = "was used, by algebra" if each.exact_in else "was probably used"
        where = f"{who(each.client_id)} of round {each.server_round}"
        if each.client_id < 0:
            where = f"some client of round {each.server_round}"
    told = {True: "yes", False: "no", None: "–"}[each.used]
    return (str(each.sample), verdict, number(each.p_value, 2), where, *([told] * truth))
