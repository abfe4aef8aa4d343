"""Write the evidence of a run on one page to be filed, and verify such a page against its run.

Each sentence of the page names the records of the run that it rests on. A record's id is made of
its own content; see :func:`record_id`. A sentence lists the ids of its records and one digest of
them all, and the page lists the digests of the run's files. So :func:`verify` shows whether a
record or file of the run was changed after the page was written.
"""

import hashlib
import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.advice import advise
from flwr_leakage.report.attempts import (
    LEAKED,
    attempts,
    fates,
    graded,
    tally,
    worst_by_image,
)
from flwr_leakage.report.index import Index, count, label, values
from flwr_leakage.report.membership import Share, membership_section, untested_told
from flwr_leakage.report.nodes import NODES
from flwr_leakage.report.page import as_shown, rounds_of, unfinished
from flwr_leakage.report.remedies import attack_told, remedies
from flwr_leakage.report.replays import replay_told, replays
from flwr_leakage.report.story import (
    given_to_attacker,
    is_defended,
    sentences,
    withheld_from_attacker,
)
from flwr_leakage.report.verdict import judge, labels_told, labels_untested, not_covered
from flwr_leakage.tracking import RunData, read_run
from flwr_leakage.tracking.jsonl import METADATA_FILE, RECORDS_FILE, write_private
from flwr_leakage.tracking.text import plain_text

__all__ = [
    "Evidence",
    "Statement",
    "make_evidence",
    "record_id",
    "records_by_id",
    "verify",
    "write_evidence",
]

METHOD = "method"
"""The ``source`` of a :class:`Statement` that is true of every run of this package, and rests on no
record."""

INFORMATION = (
    "This is no legal advice. It says where a part of the page may be of use to whoever answers "
    "for the data, and decides.",
    "EDPB Opinion 28/2024 asks for all the means reasonably likely to be used to obtain personal "
    "data from a model. What a server sees that keeps to the protocol, with the knowledge and the "
    "time that this page tells, is one of them. Other attackers and the finished model are not "
    "tested.",
    "An assessment under article 35 GDPR names risks and measures. What was seen, labels and "
    "membership are about risks, defenses, bounds and guarantees about measures.",
    "In the words of NIST AI 100-2 (Adversarial Machine Learning), what the reconstructions tell "
    "is “data reconstruction”, and what is told of single records “membership inference”. "
    "“Property inference” and “model extraction” are not tested.",
    "OWASP AISVS, chapter 11, whose drafts differ in their numbers, asks for attacks that are "
    "made to defeat the deployed defense (11.2.5): an attack that is the same with and without a "
    "defense is none. A documented ε of differential privacy (11.3.2) stands among the "
    "guarantees, and simulated membership inference (11.3.3) under membership, where the run has "
    "them.",
)
"""Sentences that every page of evidence shows, on the laws and standards for which it may be of
use."""

RELIANCE = (
    "The digests show whether the records were changed since; they do not show who made the run, "
    "or that it was made as it says. Whoever relies on the page relies on those who ran the audit."
)

RESTS_ON = {
    "Over all": ("metric", "psnr|ssim|lpips"),
    "Most at risk": ("metric", "psnr|ssim|lpips"),
    "Identification": ("metric", "identification"),
    "Not attacked": ("client", "not_attacked"),
    "Attack could": ("attack", "objective"),
    "The time limit": ("attack", "stopped_by_budget"),
    "On ": ("attack", "objective"),
    "Wrong assumption": ("check", "trained_otherwise"),
}
"""The records on which a detail, one of the sentences below the report's verdict, rests. The key
has the words with which the detail begins. The value is the kind of the records, and a regular
expression for their names."""


@dataclass(frozen=True)
class Statement:
    """One or a few sentences of a page of evidence, with the records that they rest on.

    Attributes:
        id: S1, S2, … in the order of the page.
        part: the page's heading under which the statement stands.
        text: the text that stands on the page.
        source: ``records``; or ``run.json``, the file of the run's settings; or ``method``, for
            text that rests on no record.
        records: the ids of the records, sorted.
        digest: the SHA-256 of these ids; or of the file ``run.json`` if that is the source.
    """

    id: str
    part: str
    text: str
    source: str
    records: tuple[str, ...]
    digest: str


@dataclass(frozen=True)
class Evidence:
    """The content of a page of evidence.

    Attributes:
        run: the name of the run.
        version: the version of this package, which wrote the sentences.
        files: the SHA-256 of ``records.jsonl``, of ``run.json``, and of all images together, under
            the keys ``records.jsonl``, ``run.json`` and ``images``.
        statements: the statements in the order of the page.
    """

    run: str
    version: str
    files: dict[str, str]
    statements: tuple[Statement, ...]


def record_id(record: LeakageRecord) -> str:
    """Return the id of a record, the first 12 hexadecimal digits of the SHA-256 of its JSON;
    records of equal content have equal ids.
    """
    text = json.dumps(asdict(record), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_evidence(run: str | Path) -> Evidence:
    """Return the content of the page of evidence of a run folder, which depends on the run's files
    alone.

    Raises:
        FileNotFoundError: ``run`` is no run folder.
    """
    from flwr_leakage import __version__

    data = read_run(run)
    images = "\n".join(sorted(f"{i.path.name} {_digest(i.path.read_bytes())}" for i in data.images))
    files = {"images": _digest(images.encode())}
    for name in (RECORDS_FILE, METADATA_FILE):
        path = data.folder / name
        files[name] = _digest(path.read_bytes()) if path.is_file() else "no such file"
    statements = []
    for place, (part, text, source, chosen) in enumerate(_sentences(as_shown(data)), 1):
        ids = sorted({record_id(r) for r in data.records if chosen(r)}) if chosen else []
        if source == METADATA_FILE and not (data.folder / METADATA_FILE).is_file():
            source = METHOD
        digest = files[METADATA_FILE] if source == METADATA_FILE else ""
        digest = _digest("\n".join(ids).encode()) if ids else digest
        source = METHOD if source == "records" and not ids else source
        statements.append(Statement(f"S{place}", part, text, source, tuple(ids), digest))
    name = plain_text(str(data.metadata.get("run") or data.folder.name), 120)
    return Evidence(name, str(__version__), files, tuple(statements))


Chosen = Callable[[LeakageRecord], bool]


def _of(*kinds: str, names: str = "") -> Chosen:
    """Return a predicate that chooses records of the given kinds in whose name the regular
    expression ``names`` is found.
    """
    return lambda record: record.kind in kinds and bool(re.search(names, record.name))


def _sentences(data: RunData) -> list[tuple[str, str, str, Chosen | None]]:
    """Return the statements of the page in order. Each is a tuple of the heading under which it
    stands, its text, its source (``records`` or ``run.json``), and a predicate that chooses the
    records on which it rests. The predicate is ``None`` if it rests on no record.
    """
    index, metadata = Index(data.records), data.metadata
    found, fate, done = attempts(index), fates(index), rounds_of(index)
    asked = remedies(index, metadata)
    verdict = judge(index, data.events, metadata)
    advice = advise(index, metadata, asked, data.events)
    grades = _of("metric", names="psnr|ssim|lpips|identification")
    told: list[tuple[str, str, str, Chosen | None]] = []

    def add(part: str, text: str, chosen: Chosen | None = None, source: str = "records") -> None:
        if text:
            told.append((part, text, source, chosen))

    shown = _of(
        "metric",
        "attack",
        "client",
        "check",
        names="psnr|ssim|objective|stopped|not_attacked|image|otherwise",
    )
    add("Verdict", advice.headline, shown)
    add("Verdict", unfinished(data, done), None, METADATA_FILE)
    tested = _of("client", "utility", "attack", "check", names="^(?!class|.*replay)")
    told += [
        ("What was tested", text, "records", tested) for text in sentences(index, {}, fate, done)
    ]
    for event in (event for event in data.events if event.message.startswith(NODES)):
        add("What was tested", event.message, _of("client", names="^images$"))
    answers = index.series("attack", "objective").values()
    # Before its first “;”, the note of an attack's record names the facts that the attacker got.
    noted = "; ".join(sorted({note for a in answers if (note := a.note.partition(";")[0])}))
    if threat := metadata.get("threat"):
        given, withheld = given_to_attacker(metadata), withheld_from_attacker(metadata)
        knew = f"It was given: {'; '.join(given) or threat}."
        knew += f" It was not given: {'; '.join(withheld)}." * bool(withheld)
        add("What the attacker knew", knew, None, METADATA_FILE)
    elif noted:
        add("What the attacker knew", f"It was given: {noted}.", _of("attack", names="^objective$"))
    else:
        unknown = "It is not known what the attacker was given."
        add("What the attacker knew", unknown, None, METADATA_FILE)
    noun = index.sample.many
    add(noun.capitalize(), verdict.sentence, grades)
    if each := worst_by_image(found):
        share = Share(sum(attempt.grade in LEAKED for attempt in each), len(each))
        interval = (
            f"Of the attacked {noun}, {share.told()} can be seen (95 %, Clopper and Pearson; for "
            f"{noun} as these, each by itself)."
        )
        add(noun.capitalize(), interval, grades)
    labels = labels_told(index, metadata, attempts(index)) or "Not tested."
    add("Labels", labels, _of("metric", "client", names="^label|^class$"))
    members = membership_section(index)
    for text in members.sentences if members else (untested_told(data.events),):
        add("Membership", text, _of("membership"))
    for remedy in asked:
        before, under = (
            graded(tally(held)) or "no grade" for held in (remedy.before, remedy.under)
        )
        text = (
            f"{_capital(remedy.name)}{remedy.setting}, on copies of the updates and not in "
            f"training: {count(len(remedy.under), 'attempt')} had {before} without it, and {under} "
            f"with it. {attack_told(metadata)}"
        )
        add("Defenses", text, _of("what_if", names=f"^{re.escape(remedy.name)}/"))
    own = "Which defense the clients trained with, the record of this run does not say."
    if defense := metadata.get("defense"):
        own = f"The run trained with this defense: {defense}."
    add("Defenses", own, None, METADATA_FILE)
    for name in (name for name in index.names("utility") if name.startswith("dp_epsilon")):
        spent = max(values(index.series("utility", name)), default=0.0)
        text = f"The defense guarantees {label(name)} = {spent:.4g} after the last round."
        add("Bounds and guarantees", text, _of("utility", names=f"^{re.escape(name)}$"))
    for name in (name for name in index.names("score") if "bound" in name):
        known = values(index.series("score", name))
        if len(set(known)) > 1:
            span = f"{min(known):.4g} to {max(known):.4g}"
            text = f"{_capital(label(name))}: {span} over {len(known)} samples."
            add("Bounds and guarantees", text, _of("score", names=f"^{re.escape(name)}$"))
    for text in replay_told(
        replays(index, data.events), fate.attacked, is_defended(metadata), index.sample
    ):
        add("Is it the real update", text, _of("check"))
    besides = {text for _, text, _, _ in told}
    for text in verdict.details:
        if text in besides or "see “Was this record used?”" in text:
            continue
        behind = next((RESTS_ON[start] for start in RESTS_ON if text.startswith(start)), None)
        add("What else is known", text, _of(behind[0], names=behind[1]) if behind else None)
    uncovered = not_covered(index.sample, members is not None)
    for text in (*uncovered, labels_untested(index.sample)):
        add("What was not tested", text, None, METHOD)
    add("As information", RELIANCE, None, METHOD)
    for text in INFORMATION:
        add("As information", text, None, METHOD)
    return told


def _capital(text: str) -> str:
    """Return a text with its first letter as a capital, if that is a Latin letter."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def write_evidence(run: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of evidence of a run as HTML to be printed, and its content as a JSON file
    beside it. Return the path of the HTML page. Neither file holds an image, and only the user who
    wrote them may read them.

    Args:
        run: a run folder.
        output: the path of the HTML page; ``evidence.html`` in the run folder by default.
    """
    made = make_evidence(run)
    path = Path(output) if output is not None else Path(run) / "evidence.html"
    content = json.dumps(asdict(made), indent=1, ensure_ascii=True)
    write_private(path.with_suffix(".json"), content.encode() + b"\n")
    write_private(path, _page(made, content).encode("utf-8", errors="replace"))
    return path


def _page(made: Evidence, content: str) -> str:
    lines, part = [], ""
    for each in made.statements:
        if each.part != part:
            part = each.part
            lines.append(f"<h2>{html.escape(part)}</h2>")
        rests = {METHOD: "no record", METADATA_FILE: METADATA_FILE}.get(each.source, "")
        rests = rests or count(len(each.records), "record")
        told = f"{rests} {each.digest[:12]}".strip()
        lines.append(
            f'<p id="{each.id}">{html.escape(each.text)} <small>[{each.id}: {told}]</small></p>'
        )
    files = "".join(f"<li>{name}: <code>{value}</code></li>" for name, value in made.files.items())
    # “<” is escaped, as “</script” within the embedded JSON would end the script element.
    hidden = content.replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Evidence: {html.escape(made.run)}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 46rem; margin: 1.5rem auto; padding: 0 1rem; font: 0.9375rem/1.45 sans-serif; }}
h1 {{ font-size: 1.375rem; }} h2 {{ font-size: 1.0625rem; margin: 1.25rem 0 0.25rem; }}
p {{ margin: 0.25rem 0; }} p, li, h1 {{ overflow-wrap: anywhere; }}
small, code {{ font: 0.75rem ui-monospace, monospace; }}
@media print {{ body {{ font-size: 9pt; margin: 0; }} p {{ break-inside: avoid; }} }}
</style></head><body>
<h1>Evidence of the run {html.escape(made.run)}</h1>
<p>Made by flwr-leakage {made.version} from the records of the run. In brackets: the sentence, how
many records it rests on, and the digest of their ids, which the file beside this page names one by
one. <code>flwr-leakage verify PAGE RUN</code> says whether the records are still the same.</p>
{chr(10).join(lines)}
<h2>Digests of the files of the run (SHA-256)</h2>
<ul>{files}</ul>
<script type="application/json" id="evidence">{hidden}</script>
</body></html>
"""


MAX_PAGE_BYTES = 100_000_000
_EMBEDDED = re.compile(r'<script type="application/json" id="evidence">(.*?)</script>', re.DOTALL)


def verify(page: str | Path, run: str | Path) -> tuple[str, ...]:
    """Return a sentence for each difference between a page of evidence and its run; the tuple is
    empty if they agree. If another version of this package wrote the page, its sentences may be
    worded otherwise, so only the digests of files and records are compared.

    Args:
        page: the HTML page of evidence, or the JSON file beside it.
        run: the run folder.

    Raises:
        ValueError: the file is no page of evidence.
        FileNotFoundError: there is no such file, or no such run.
    """
    filed, now = _read(Path(page)), asdict(make_evidence(run))
    wrong = [
        f"{name} was changed." for name, digest in now["files"].items()
        if filed["files"].get(name) != digest
    ]  # fmt: skip
    is_same_version = filed["version"] == now["version"]
    before, after = ({each["id"]: each for each in one["statements"]} for one in (filed, now))
    for place in dict.fromkeys([*before, *after]):
        old, new = before.get(place), after.get(place)
        if old is None or new is None:
            wrong.append(f"{place} stands on one side only.")
        elif sorted(old["records"]) != sorted(new["records"]):
            both = set(old["records"]) ^ set(new["records"])
            wrong.append(f"{place} rests on other records now: {len(both)} differ.")
        elif is_same_version and old != json.loads(json.dumps(new)):
            wrong.append(f"{place} has another text or digest than the run gives.")
    shown = _shown(Path(page))
    wrong += [
        f"{each['id']} reads otherwise on the page than in its data." for each in before.values()
        if shown is not None and html.escape(each["text"]) not in shown
    ]  # fmt: skip
    return tuple(wrong)


def _read(page: Path) -> dict[str, Any]:
    text = _text(page)
    found = _EMBEDDED.search(text)
    try:
        filed = json.loads(found[1] if found else text)
        assert {"files", "version", "statements"} <= filed.keys()
        assert all({"id", "records", "text"} <= each.keys() for each in filed["statements"])
    except (ValueError, AssertionError, AttributeError, TypeError) as error:
        raise ValueError(f"expected a page of evidence or its JSON, got {page}.") from error
    return dict(filed)


def _shown(page: Path) -> str | None:
    """Return the HTML of a page of evidence without its embedded JSON; ``None`` if ``page`` is the
    JSON file beside it.
    """
    text = _text(page)
    return _EMBEDDED.sub("", text) if _EMBEDDED.search(text) else None


def _text(page: Path) -> str:
    if page.stat().st_size > MAX_PAGE_BYTES:
        raise ValueError(f"a page of evidence has at most {MAX_PAGE_BYTES:,} bytes, got {page}.")
    return page.read_text(encoding="utf-8", errors="replace")


def records_by_id(run: str | Path, ids: Sequence[str]) -> list[LeakageRecord]:
    """Return the records of a run that have the given ids, in the order of writing.

    Raises:
        ValueError: the run has no record with one of the ids.
    """
    found = [record for record in read_run(run).records if record_id(record) in ids]
    if missing := sorted(set(ids) - {record_id(record) for record in found}):
        raise ValueError(f"expected ids of records of {run}, which has none of {missing}.")
    return found
