"""Show the private texts of a run beside those that the attack recovered.

As a private word may hold any characters, each stands escaped in an HTML element of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Literal

from flwr_leakage.report.attempts import Attempt, worst_first
from flwr_leakage.report.index import Index, Table, by_round, count, grouped, known, percent, who
from flwr_leakage.tracking import TextRecord

Mark = Literal["placed", "named", "missed", "wrong"]

MAX_TOKENS_SHOWN = 200_000
"""The largest number of tokens of all texts on a page. So many take some 15 MB of HTML."""

FIRST_TOKENS = 48
"""The largest number of tokens of a text on the first screen; on a phone they take nine lines."""

MAX_NAMED = 200
"""The largest number of updates for which a page lists the tokens that an attack knows to occur.
The value is a choice that bounds the page's size.
"""


@dataclass(frozen=True)
class Token:
    """One token of a text as the page shows it.

    Attributes:
        word: the word that the token stands for, or its id.
        mark: in an original, ``placed`` if recovered at its place, ``named`` if only known to occur
            in the batch, else ``missed``; in a recovered text, ``wrong`` if it differs from the
            original's token, else ``placed``.
    """

    word: str
    mark: Mark


@dataclass(frozen=True)
class TextExhibit:
    """One private text, and the versions of it that attacks recovered.

    Attributes:
        place: round, client, text and class in words.
        grade: the grade of the recovered text, in words.
        reached: the share of tokens that are recovered at their place, in words.
        rows: the versions of the text, each as its name, such as original, and its tokens.
    """

    place: str
    grade: str
    reached: str
    rows: tuple[tuple[str, tuple[Token, ...]], ...]


@dataclass(frozen=True)
class TextGallery:
    """The section of the page that shows texts.

    Attributes:
        exhibits: the texts that are shown, the worst leak first.
        left_out: the number of texts that are not shown.
        named: for each update with a text that was not recovered, words for the update, and the
            tokens that the attack knows to occur in it.
        table: the attacks' results by round; ``None`` where nothing was measured.
    """

    exhibits: tuple[TextExhibit, ...]
    left_out: int
    named: tuple[tuple[str, tuple[Token, ...]], ...]
    table: Table | None


def text_gallery(
    texts: Sequence[TextRecord], found: Sequence[Attempt], index: Index, limit: int
) -> TextGallery | None:
    """Return the section on at most ``limit`` of a run's texts; ``None`` for a run without
    texts.
    """
    if not texts:
        return None
    exhibits = text_exhibits(texts, found)
    sizes = accumulate(sum(len(row) for _, row in exhibit.rows) for exhibit in exhibits)
    limit = min(limit, sum(size <= MAX_TOKENS_SHOWN for size in sizes))
    return TextGallery(
        tuple(exhibits[:limit]),
        max(len(exhibits) - limit, 0),
        tuple(named_alone(texts, found)[:MAX_NAMED]),
        texts_table(index, found),
    )


def text_exhibits(texts: Sequence[TextRecord], found: Sequence[Attempt]) -> list[TextExhibit]:
    """Return each text that was attacked, with its recovered versions, the worst leak first.

    ``texts`` are originals, reconstructions, and tokens that occur in a batch.
    """
    by_key: dict[tuple[int, int, int], dict[str, TextRecord]] = {}
    for text in texts:
        place = (text.server_round, text.client_id, text.sample)
        by_key.setdefault(place, {})[text.role] = text
    attempt_of = {attempt.key: attempt for attempt in found}
    keys = [key for key in by_key if key[2] >= 0]

    exhibits = []
    for key in sorted(keys, key=worst_first(attempt_of)):
        occurring = by_key.get((key[0], key[1], -1), {}).get("named")
        known = frozenset(occurring.ids) if occurring else frozenset()
        exhibits.append(_exhibit(key, by_key[key], attempt_of.get(key), known))
    return exhibits


def _exhibit(
    key: tuple[int, int, int],
    roles: Mapping[str, TextRecord],
    attempt: Attempt | None,
    known: frozenset[int],
) -> TextExhibit:
    client = who(key[1]) if key[1] >= 0 else "aggregate"
    label = f", class {attempt.label}" if attempt and attempt.label else ""
    which = attempt.place if attempt else f"place {key[2]} of the batch"
    graded = attempt.grade if attempt and attempt.grade else "no grade"
    reached = "not measured, as the original is not known"
    if attempt and attempt.tokens is not None:
        reached = f"{100 * attempt.tokens:.0f} % of its tokens in place"
    original, answer = roles.get("original"), roles.get("reconstruction")
    rows = []
    if original:
        rows.append(("private text", _marked(original, answer, known)))
    if answer:
        rows.append(("recovered", _against(answer, original)))
    for role in sorted(role for role in roles if role.startswith("what_if_")):
        name = role.removeprefix("what_if_").replace("_", " ")
        rows.append((f"recovered under {name}", _against(roles[role], original)))
    return TextExhibit(
        f"round {key[0]}, {client}, {which}{label}", graded, reached, tuple(rows)
    )  # fmt: skip


def _words(text: TextRecord) -> list[str]:
    """Return a text's words, or its token ids as text if the words are not known."""
    blank = {-1: "□"}
    if text.words:
        return [blank.get(i, w or str(i)) for i, w in zip(text.ids, text.words, strict=True)]
    return [blank.get(token, str(token)) for token in text.ids]


def _marked(
    text: TextRecord, answer: TextRecord | None, known: frozenset[int]
) -> tuple[Token, ...]:
    theirs = answer.ids if answer else ()
    tokens = []
    for place, (token, word) in enumerate(zip(text.ids, _words(text), strict=True)):
        mark: Mark = "named" if token in known or token in theirs else "missed"
        tokens.append(Token(word, "placed" if theirs[place : place + 1] == (token,) else mark))
    return tuple(tokens)


def _against(answer: TextRecord, original: TextRecord | None) -> tuple[Token, ...]:
    true = original.ids if original else ()
    tokens = []
    for place, (token, word) in enumerate(zip(answer.ids, _words(answer), strict=True)):
        right = original is None or true[place : place + 1] == (token,)
        tokens.append(Token(word, "placed" if right else "wrong"))
    return tuple(tokens)


def named_alone(
    texts: Sequence[TextRecord], found: Sequence[Attempt]
) -> list[tuple[str, tuple[Token, ...]]]:
    """Return the tokens that the attack knows to occur in updates with a text that was not
    recovered exactly.

    An entry has words for the round and client of the update, and its tokens.
    """
    missing = {attempt.key[:2] for attempt in found if attempt.grade != "exact"}
    answered = {text.sample for text in texts if text.role == "reconstruction"}
    told = []
    for text in texts:
        place = (text.server_round, text.client_id)
        if text.role != "named" or (place not in missing and (found or answered)):
            continue
        whose = who(text.client_id) if text.client_id >= 0 else "aggregate"
        more = f", the first {len(text.ids):,}" if text.length > len(text.ids) else ""
        told.append(
            (
                f"round {place[0]}, {whose}: {count(text.length, 'token')} named{more}",
                tuple(Token(word, "named") for word in _words(text)),
            )
        )
    return told


def texts_table(index: Index, found: Sequence[Attempt]) -> Table | None:
    """Return a table of the attacks' results on texts by round; ``None`` if nothing was measured.

    Shares of tokens are means over the texts. A text that was not recovered counts as 0.
    """
    if not any(attempt.tokens is not None for attempt in found):
        return None
    blind, exact, named = (
        by_round(index.series("metric", name))
        for name in ("blind_token_accuracy", "exact_text", "named_tokens")
    )
    alike = known(index.series("metric", "rouge_l"))
    certified = grouped(
        (key[0], "not certified" not in record.note and "certified" in record.note)
        for key, record in index.series("attack", "objective").items()
    )
    rows = []
    for server_round, tried in sorted(grouped((a.key[0], a) for a in found).items()):
        rows.append(
            (
                str(server_round),
                str(len(tried)),
                str(int(sum(exact.get(server_round, [])))),
                percent(fmean(each.tokens or 0.0 for each in tried)),
                percent(_mean(blind.get(server_round))),
                f"{fmean(alike.get(each.key, 0.0) for each in tried):.2f}",
                percent(_mean(named.get(server_round))),
                f"{sum(certified.get(server_round, []))} of "
                f"{count(len(certified.get(server_round, [])), 'update')}",
            )
        )
    return Table(
        ("round", "texts", "exact", "in place", "blind guess", "ROUGE-L",
         "named", "replay-certified"),
        tuple(rows),
    )  # fmt: skip


def _mean(shares: Sequence[float] | None) -> float | None:
    return fmean(shares) if shares else None
