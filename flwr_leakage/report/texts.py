"""The texts of a run: private ones beside what the attack made of them, and the page's words.

A word of a private text may hold anything. Each stands in an element of its own that isolates its
writing direction, escaped, without control characters (``tracking.run_data`` took them out).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Literal

from jinja2 import Environment

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.attempts import Attempt
from flwr_leakage.report.index import Index, Table, by_round, count, grouped, who
from flwr_leakage.tracking import TextRecord

Mark = Literal["placed", "named", "missed", "wrong"]

_BEFORE = re.compile(
    r'<section[^>]*"tested"[^>]*>|<details[^>]*>\s*<summary><h2 id="tested">|</main>'
)
"""The part in front of which the texts stand, or the end of the page."""

_LINK = re.compile(r'(<li>)?<a href="#tested">')
_NOUNS = {
    "image": "text", "images": "texts", "Image": "Text", "Images": "Texts", "picture": "text",
    "pictures": "texts", "Pictures": "Texts",
}  # fmt: skip
_NOUN = re.compile(rf"\b(an |An |)({'|'.join(_NOUNS)})\b")
_TAG = re.compile(r"(<[^>]*>)")
_SHOWN = re.compile(r'((?:data-column|aria-label|alt)="[^"]*")')
MAX_TOKENS_SHOWN = 200_000
"""Tokens of all texts on a page, some 15 MB."""

MAX_NAMED = 200
"""Updates whose named tokens stand on a page."""

_VERBATIM = ("code", "style", "script")
"""Elements whose words are no sentences of the page."""


@dataclass(frozen=True)
class Token:
    """One token as it is shown.

    Attributes:
        word: what it stands for, or its id.
        mark: ``placed``: it is recovered at its place; ``named``: the attack knows that it occurs
            in the batch, but not here; ``missed``: neither. Of a recovered text ``wrong``: it is
            another one.
    """

    word: str
    mark: Mark


@dataclass(frozen=True)
class TextExhibit:
    """One private text, and what the attack made of it.

    Attributes:
        place: round, client, text and class in words.
        grade: in words.
        reached: the share of tokens in place, in words.
        rows: by what they are, the tokens of each version of the text.
    """

    place: str
    grade: str
    reached: str
    rows: tuple[tuple[str, tuple[Token, ...]], ...]


def with_texts(
    page: str,
    environment: Environment,
    texts: Sequence[TextRecord],
    found: Sequence[Attempt],
    index: Index,
    limit: int,
) -> str:
    """Return the page of a run of texts with their section; that of any other run as it is.

    Args:
        page: the HTML without texts.
        environment: renders the section.
        texts: of the run.
        found: the attempts on them.
        index: the run's numbers.
        limit: how many texts are shown at most.
    """
    if not texts:
        return page
    exhibits = text_exhibits(texts, found)
    sizes = accumulate(sum(len(row) for _, row in exhibit.rows) for exhibit in exhibits)
    limit = min(limit, sum(size <= MAX_TOKENS_SHOWN for size in sizes))
    section = environment.get_template("texts.html").render(
        exhibits=exhibits[:limit],
        left_out=max(len(exhibits) - limit, 0),
        named=named_alone(texts, found)[:MAX_NAMED],
        table=texts_table(index, found),
    )
    page = in_words_of_texts_page(page)
    page = _LINK.sub(_with_link, page, count=1)
    return _BEFORE.sub(lambda match: f"{section}\n{match[0]}", page, count=1)


def _with_link(match: re.Match[str]) -> str:
    """Return a link to the texts in front of another one, in a list or in a line."""
    own = '<a href="#texts">Texts</a>'
    return f"<li>{own}</li>\n{match[0]}" if match[1] else f"{own} ·\n{match[0]}"


def in_words_of_texts(sentence: str) -> str:
    """Return a sentence about images as one about texts.

    Example:
        >>> in_words_of_texts("Private images leak: an image of 2 (imagenette).")
        'Private texts leak: a text of 2 (imagenette).'
    """
    return _NOUN.sub(lambda match: match[1].replace("n ", " ") + _NOUNS[match[2]], sentence)


def in_words_of_texts_page(page: str) -> str:
    """Return a page whose visible sentences speak of texts; commands and code stay as they are."""
    parts, verbatim = _TAG.split(page), ""
    for place, part in enumerate(parts):
        if not part.startswith("<"):
            parts[place] = part if verbatim else in_words_of_texts(part)
            continue
        name = part.strip("</> ").split()[0].lower() if part.strip("</> ") else ""
        if name in _VERBATIM:
            verbatim = "" if part.startswith("</") else name
        parts[place] = _SHOWN.sub(lambda match: in_words_of_texts(match[0]), part)
    return "".join(parts)


def text_exhibits(texts: Sequence[TextRecord], found: Sequence[Attempt]) -> list[TextExhibit]:
    """Return every text that was attacked, worst leak first; marks compare with the original."""
    by_key: dict[tuple[int, int, int], dict[str, TextRecord]] = {}
    for text in texts:
        place = (text.server_round, text.client_id, text.sample)
        by_key.setdefault(place, {})[text.role] = text
    attempt_of = {attempt.key: attempt for attempt in found}
    keys = [key for key in by_key if key[2] >= 0]

    def worst_first(key: tuple[int, int, int]) -> tuple[float, float, tuple[int, int, int]]:
        place, near = attempt_of[key].leak if key in attempt_of else (-9, 0.0)
        return -place, -near, key

    exhibits = []
    for key in sorted(keys, key=worst_first):
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
    which = in_words_of_texts(attempt.place) if attempt else f"place {key[2]} of the batch"
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
    """Return a text's words, or its ids where nobody told what they stand for."""
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
    """Return the tokens of each update of which a text was not recovered, with whose they are."""
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
    """Return what each round's attacks reached on texts, or None if nothing was measured.

    Shares are means over the texts; one that was not found counts as 0.
    """
    if not any(attempt.tokens is not None for attempt in found):
        return None
    blind, exact, named = (
        by_round(index.series("metric", name))
        for name in ("blind_token_accuracy", "exact_text", "named_tokens")
    )
    alike = index.series("metric", "rouge_l")
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
                _percent(fmean(each.tokens or 0.0 for each in tried)),
                _percent(_mean(blind.get(server_round))),
                f"{fmean(_or_zero(alike.get(each.key)) for each in tried):.2f}",
                _percent(_mean(named.get(server_round))),
                f"{sum(certified.get(server_round, []))} of "
                f"{count(len(certified.get(server_round, [])), 'update')}",
            )
        )
    return Table(
        ("round", "texts", "exact", "in place", "blind guess", "ROUGE-L",
         "named", "replay-certified"),
        tuple(rows),
    )  # fmt: skip


def _or_zero(record: LeakageRecord | None) -> float:
    """Return a record's value; 0 where nothing was found."""
    return record.value or 0.0 if record else 0.0


def _mean(shares: Sequence[float] | None) -> float | None:
    return fmean(shares) if shares else None


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
