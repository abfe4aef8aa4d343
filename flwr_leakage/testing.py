"""Check an audited run for leaks in a test or pipeline: it passed, leaked, or is unsure.

    from flwr_leakage.testing import assert_no_leak

    def test_no_image_can_be_recognised():
        assert_no_leak("outputs/RUN", above="partly")

``flwr-leakage check RUN --fail-above partly`` does the same for a pipeline, and can write its
result as JUnit XML, as SARIF 2.1.0 and in Markdown. None of these files holds an image.
"""

import html
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flwr_leakage.report.advice import Line, advise
from flwr_leakage.report.attempts import (
    attempts,
    fates,
    otherwise_told,
    unexplained,
    wrongly_attacked,
)
from flwr_leakage.report.first_screen import Tile, tiles
from flwr_leakage.report.grades import GRADES, Grade
from flwr_leakage.report.index import Index, count, grouped, who
from flwr_leakage.report.large_clients import large_clients_section
from flwr_leakage.report.membership import membership_section
from flwr_leakage.report.page import as_shown, rounds_of, unfinished
from flwr_leakage.report.remedies import remedies
from flwr_leakage.report.tried import worth
from flwr_leakage.tracking import RunData, read_run
from flwr_leakage.tracking.jsonl import write_private
from flwr_leakage.tracking.text import plain_text

__all__ = [
    "EXIT_CODES",
    "Check",
    "UpdateCheck",
    "assert_no_leak",
    "check",
    "junit",
    "markdown",
    "sarif",
    "write_check",
]

Outcome = Literal["passed", "leaked", "unsure", "untested"]

EXIT_CODES: Mapping[Outcome, int] = {"passed": 0, "leaked": 3, "unsure": 4, "untested": 4}
"""The exit code of the command ``check`` for each outcome. Errors of the command have 1 or 2."""


@dataclass(frozen=True)
class UpdateCheck:
    """The outcome of the check for one client's update in one round.

    Attributes:
        place: the round and the client.
        outcome: ``leaked`` if a reconstruction shows more of its original than is allowed;
            ``unsure`` if the time limit ended the attack, or if its result allows no conclusion;
            ``untested`` if the update was not attacked; else ``passed``.
        message: the outcome in a sentence.
    """

    place: tuple[int, int]
    outcome: Outcome
    message: str

    @property
    def name(self) -> str:
        """Return a text that names the update's client and round, such as ``client 3, round 1``."""
        server_round, client = self.place
        return f"{who(client) if client >= 0 else 'aggregate'}, round {server_round}"


@dataclass(frozen=True)
class Check:
    """The outcome of the check for a run.

    Attributes:
        run: the name of the run.
        above: the worst grade that is allowed: ``recognisable``, ``partly`` or ``nothing``. It says
            how much of an original image a reconstruction may show.
        outcome: ``leaked`` if some image has a worse grade, or if ``above`` is ``nothing`` and
            originals were identified among candidates; ``untested`` if no update was attacked;
            ``unsure`` if no attack allows a conclusion, for example if the time limit ended all of
            them, or if the run is unfinished; else ``passed``.
        message: the outcome in a sentence or two.
        updates: the outcome for each update of each client.
        tiles: the key figures that the run's report shows first.
        lines: the sentences of the report's advice on the next steps.
    """

    run: str
    above: Grade
    outcome: Outcome
    message: str
    updates: tuple[UpdateCheck, ...]
    tiles: tuple[Tile, ...]
    lines: tuple[Line, ...]

    @property
    def exit_code(self) -> int:
        """Return the exit code: 0 for passed, 3 for leaked, 4 for untested or unsure."""
        return EXIT_CODES[self.outcome]


def check(run: str | Path | RunData, above: Grade = "nothing") -> Check:
    """Return the outcome of a check that no image of a run has a worse grade than is allowed. A
    grade says how much of an original its reconstruction shows.

    Args:
        run: a run folder, or the data that ``read_run`` returned for one.
        above: the worst grade that is allowed: ``recognisable``, ``partly`` or ``nothing``.

    Raises:
        ValueError: ``above`` is another grade.
        FileNotFoundError: ``run`` is no run folder.
    """
    if above not in GRADES[1:]:
        raise ValueError(f"above must be one of {list(GRADES[1:])}, got {above!r}.")
    data = as_shown(run if isinstance(run, RunData) else read_run(run))
    index, metadata = Index(data.records), data.metadata
    found, fate = attempts(index), fates(index)
    told = worth(index, data.events, metadata, found, fate)
    advice = advise(index, metadata, remedies(index, metadata), data.events)
    worst: dict[tuple[int, int], Grade] = {}
    noun = index.sample.one
    for attempt in found:
        if attempt.grade and _is_worse(attempt.grade, worst.get(attempt.key[:2], "nothing")):
            worst[attempt.key[:2]] = attempt.grade
    attacked = fate.attacked | {attempt.key[:2] for attempt in found}
    updates = []
    for place in sorted(attacked | fate.spared.keys()):
        grade = worst.get(place, "nothing")
        if _is_worse(grade, above):
            updates.append(UpdateCheck(place, "leaked", f"Its worst {noun} is {grade}."))
        elif place not in attacked:
            updates.append(UpdateCheck(place, "untested", f"Not attacked: {fate.spared[place]}."))
        elif place in told.unsure:
            updates.append(UpdateCheck(place, "unsure", f"It cannot say: {told.unsure[place]}."))
        else:
            updates.append(UpdateCheck(place, "passed", f"Its worst {noun} is {grade}."))
    outcomes = {each.outcome for each in updates}
    outcome: Outcome = "passed" if "passed" in outcomes else "unsure" if attacked else "untested"
    if "leaked" in outcomes or (above == "nothing" and told.level == "partly"):
        outcome = "leaked"
    message = advice.headline
    if outcome == "passed":
        message = f"No {noun} has a worse grade than “{above}”; that is no clearance."
        silent = [each for each in updates if each.outcome in ("unsure", "untested")]
        if silent:
            known = {**fate.spared, **told.unsure}
            reasons = (known.get(each.place) or "no reason was recorded" for each in silent)
            why = "; ".join(dict.fromkeys(reasons))
            message += (
                f" {count(len(silent), 'update')} of {len(updates)} cannot be judged ("
                f"{plain_text(why, MAX_WHY)})."
            )
        passed = {each.place for each in updates if each.outcome == "passed"}
        if weak := passed & unexplained(index).keys():
            far = count(len(weak), "update")
            message += f" The attack’s answer does not explain {far} of those that passed."
        if is_open := unfinished(data, rounds_of(index)):
            outcome, message = "unsure", f"This run cannot say. {is_open}"
    elif outcome != "leaked" and worst:
        message = f"This run cannot say: {next(iter(told.unsure.values()))}."
    if assumed := wrongly_attacked(index, attacked):
        why = otherwise_told(index, assumed)
        message += f" {why[0].upper()}{why[1:]}." * (why not in message)
    large, members = large_clients_section(index, metadata), membership_section(index)
    name = str(metadata.get("run") or data.folder.name)
    numbers = tiles(index, metadata, found, members, large)
    return Check(name, above, outcome, message, tuple(updates), numbers, advice.lines)


MAX_WHY = 300
"""The largest number of characters that a check's message spends on the reasons why updates cannot
be judged. The report has all reasons."""


def _is_worse(grade: Grade, other: Grade) -> bool:
    return GRADES.index(grade) < GRADES.index(other)


def assert_no_leak(run: str | Path | RunData, above: Grade = "nothing") -> None:
    """Assert that no image of a run has a worse grade than ``above``, and that this was tested. A
    grade says how much of an original its reconstruction shows.

    Args:
        run: a run folder, or the data that ``read_run`` returned for one.
        above: the worst grade that is allowed: ``recognisable``, ``partly`` or ``nothing``.

    Raises:
        AssertionError: an image has a worse grade; or nothing was attacked; or no attack allows a
            conclusion, for example if the time limit ended all of them; or the run is unfinished.
            The error's text says which.
        ValueError: ``above`` is another grade.
        FileNotFoundError: ``run`` is no run folder.
    """
    found = check(run, above)
    if found.outcome != "passed":
        leaks = [f"{e.name}: {e.message}" for e in found.updates if e.outcome == found.outcome]
        raise AssertionError("\n".join([found.message, *leaks[:MAX_NAMED]]))


MAX_NAMED = 20
"""The largest number of updates that an error or a summary names."""


def junit(found: Check) -> bytes:
    """Return the result of a check as JUnit XML: one test case for the run, and one for each
    update. A leak is a failure. An untested or unsure run is an error; an untested or unsure update
    is skipped.
    """
    cases = [("the run as a whole", found.outcome, found.message)]
    cases += [(each.name, each.outcome, each.message) for each in found.updates]
    suite = ET.Element("testsuite", name="flwr-leakage", tests=str(len(cases)))
    tags = {"leaked": "failure", "unsure": "skipped", "untested": "skipped"}
    counted = dict.fromkeys(("failure", "error", "skipped"), 0)
    for name, outcome, message in cases:
        case = ET.SubElement(suite, "testcase", classname=_xml(found.run), name=name)
        if outcome != "passed":
            is_run = case is suite[0] and outcome != "leaked"
            tag = "error" if is_run else tags[outcome]
            ET.SubElement(case, tag, message=_xml(message))
            counted[tag] += 1
    for tag, plural in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(plural, str(counted[tag]))
    return bytes(ET.tostring(suite, encoding="utf-8", xml_declaration=True))


def _xml(text: str) -> str:
    """Return a text with the characters that XML 1.0 forbids replaced by ``�``."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text)


RULES = {
    "leaked": ("error", "A sample has a worse grade than is allowed."),
    "unsure": ("warning", "The attack was cut off, or its result says nothing."),
    "untested": ("note", "The update was not attacked, so that nothing is known of it."),
}


def sarif(found: Check) -> bytes:
    """Return the result of a check as SARIF 2.1.0, with one result for the run and each update that
    did not pass.
    """
    from flwr_leakage import __version__

    told = [(found.outcome, found.message, "the run as a whole")] * (found.outcome != "passed")
    told += [(e.outcome, e.message, e.name) for e in found.updates if e.outcome != "passed"]
    results = [
        {
            "ruleId": outcome,
            "level": "error" if where == "the run as a whole" else RULES[outcome][0],
            "message": {"text": f"{where[0].upper()}{where[1:]}: {_xml(message)}"},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": "report.html"},
                        "region": {"startLine": 1},
                    },
                    "logicalLocations": [{"name": where}],
                }
            ],
            "partialFingerprints": {"update/v1": f"{where}: {outcome}"},
        }
        for outcome, message, where in told
    ]
    rules = [
        {"id": name, "shortDescription": {"text": text}, "defaultConfiguration": {"level": level}}
        for name, (level, text) in RULES.items()
    ]
    driver = {"name": "flwr-leakage", "version": str(__version__), "rules": rules}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(log, indent=2, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n"


def markdown(found: Check) -> str:
    """Return the result of a check as Markdown, for the summary of a GitHub Actions job."""
    marks = {"passed": "✅", "leaked": "❌", "unsure": "⚠️", "untested": "⚠️"}
    lines = [
        f"## {marks[found.outcome]} {_md(found.message)}", "",
        f"Run {_md(found.run)}; allowed: “{found.above}”.", "",
        "| " + " | ".join(_md(tile.term) for tile in found.tiles) + " |",
        "|---" * len(found.tiles) + "|",
        "| " + " | ".join(
            f"**{_md(tile.value)}**" + f" ({_md(tile.guess)})" * bool(tile.guess)
            for tile in found.tiles
        ) + " |", "",
    ]  # fmt: skip
    for place, line in enumerate(found.lines if found.outcome != "passed" else (), 1):
        lines += [f"{place}. {_md(line.text)}", *(f"   - {_md(item)}" for item in line.items)]
    groups = grouped((each.outcome, each) for each in found.updates)
    lines += [""] + [f"- {count(len(held), 'update')} {name}" for name, held in groups.items()]
    worse: Sequence[UpdateCheck] = groups.get("leaked", [])
    lines += [f"- {each.name}: {_md(each.message)}" for each in worse[:MAX_NAMED]]
    return "\n".join(lines) + "\n"


def _md(text: str) -> str:
    """Return a text escaped so that it is shown literally in Markdown and HTML."""
    plain = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", plain)


def write_check(
    found: Check,
    junit_file: str | Path | None = None,
    sarif_file: str | Path | None = None,
    summary_file: str | Path | None = None,
) -> None:
    """Write the result of a check into those files whose paths are given.

    Args:
        found: the result of the check.
        junit_file: the JUnit XML file.
        sarif_file: the SARIF file.
        summary_file: a Markdown file, to which the result is appended.
    """
    for path, content in ((junit_file, junit), (sarif_file, sarif)):
        if path is not None:
            write_private(Path(path), content(found))
    if summary_file is not None:
        with Path(summary_file).open("a", encoding="utf-8", errors="replace") as file:
            file.write(markdown(found))
