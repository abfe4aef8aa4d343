"""What an experiment leaves: ``findings.json``, ``table.csv``, figures, a page, and the index."""

import csv
import inspect
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from simulations.papers.experiment import Experiment
from simulations.papers.findings import Claim, Findings, Judgement, Row, overall
from simulations.papers.judge import together
from simulations.papers.parts import write_atomically

PRIVATE = ("lab.",)
"""Overrides that name folders of a machine; their values are not written down."""

_PLACES = ("lab.cache", "lab.results")
"""Overrides that say where things are kept, which changes no number."""

_SIZES = ("cpu", "thorough", "paper")

_OF_CLAIMS = [judgement for judgement in Judgement if judgement is not Judgement.HOLDS_IN_PART]


def write_page(
    folder: Path,
    name: str,
    size: str,
    experiment: Experiment,
    settings: Mapping[str, Any],
    findings: Findings,
    spent: Mapping[str, float],
    overrides: Sequence[str],
) -> Path:
    """Write everything about one experiment.

    Args:
        folder: of this experiment.
        name: as in ``experiment=NAME``.
        size: ``smoke``, ``cpu``, ``thorough`` or ``paper``.
        experiment: its docstring gives the title and the words above the table.
        settings: as in the config, without the target.
        findings: what it found.
        spent: CPU seconds of each of its parts by digest, on whichever run they were computed.
        overrides: of the command line.

    Returns:
        The page, ``NAME.md``.
    """
    seconds = sum(spent.values())
    figures = {label: f"{label}.png" for label in findings.figures}
    for label, figure in findings.figures.items():
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / figures[label], dpi=90)
    title, _, words = (inspect.getdoc(type(experiment)) or name).partition("\n")
    command = f"python simulations/run.py {' '.join(_spelled(name, size, overrides))}"
    kept: dict[str, Any] = {
        "name": name,
        "size": size,
        "title": title.rstrip("."),
        "command": command,
        "cpu_seconds": round(seconds, 1),
        "spent": dict(spent),
        "settings": settings,
        "claims": [{**asdict(c), "judgement": c.judgement.value} for c in findings.claims],
        "rows": findings.rows,
    }
    about = words.partition("Attributes:")[0].strip()
    text = "\n\n".join(
        part
        for part in (
            f"# {kept['title']}",
            about,
            f"Attacker: {findings.attacker}",
            f"    {command}",
            f"Size `{size}`, {_duration(seconds)} of CPU time. Written with {_computed_with()}.",
            "## The paper's claims",
            f"Judgement: **{_overall(kept['claims'])}** ({_counted(kept['claims'])}).",
            claim_table(findings.claims),
            _said_together(findings.claims),
            *[f"![{label}]({file})" for label, file in figures.items()],
            "## Numbers",
            markdown(findings.rows),
            "\n".join(f"- {remark}" for remark in findings.remarks),
            "## Settings",
            markdown([{"setting": k, "value": json.dumps(v)} for k, v in settings.items()]),
        )
        if part
    )
    # The JSON last: who sees it sees the whole.
    for file, content in {
        "table.csv": _csv(findings.rows),
        f"{name}.md": text + "\n",
        "findings.json": json.dumps(kept, indent=1, default=str) + "\n",
    }.items():
        write_atomically(folder / file, partial(_write_text, content))
    return folder / f"{name}.md"


def write_index(results: Path) -> Path:
    """Write ``README.md`` of all experiments in ``results``: judgements, n, CPU time.

    An experiment counts with its largest size; beside it stands what was undecided at size cpu.
    """
    pages = [json.loads(path.read_text()) for path in sorted(results.glob("*/findings.json"))]
    pages = [page for page in pages if page["size"] != "smoke"]  # which tells nothing
    pages = sorted(pages, key=lambda page: (page["name"], _SIZES.index(page["size"])))
    found = list({page["name"]: page for page in pages}.values())
    usual = {page["name"]: page for page in pages if page["size"] == "cpu"}
    rows: list[Row] = []
    for one in found:
        counts = Counter(claim["judgement"] for claim in one["claims"])
        sizes = [claim["n"] for claim in one["claims"] if claim["n"]]
        page = f"{folder_of(one['name'], one['size'])}/{one['name']}.md"
        rows.append(
            {
                "experiment": f"[{one['name']}]({page})",
                "what": one["title"],
                "size": one["size"],
                "judgement": f"**{_overall(one['claims'])}**",
                **{j.value: counts[j.value] for j in _OF_CLAIMS},
                "undecided at cpu": _undecided(usual.get(one["name"], one)["claims"]),
                "n": f"{min(sizes)} to {max(sizes)}" if sizes else None,
                "CPU time": _duration(one["cpu_seconds"]),
            }
        )
    seconds = _spent_by_all(pages)
    before = [claim for one in usual.values() for claim in one["claims"]]
    every = [claim for one in found for claim in one["claims"]]
    judged = Counter(_overall(one["claims"]) for one in found)
    experiments = ", ".join(f"{judged[j.value]} {j.value}" for j in Judgement if judged[j.value])
    text = (
        "# The papers' experiments\n\n"
        "Each line was written by `python simulations/run.py +experiment=NAME size=SIZE`; the "
        "numbers are how many of the paper's claims were judged so; an experiment holds in part "
        "where some claim does and another does not or is undecided. An interval that holds the "
        "paper's number is not asked for: the networks and iterations are smaller.\n\n"
        f"{markdown(rows)}\n\n{len(found)} experiments: {experiments}. "
        f"{len(every)} claims: {_counted(every)}. At size cpu: {_counted(before)}. "
        f"CPU time {_duration(seconds)}; what experiments share counts once.\n"
    )
    path = results / "README.md"
    write_atomically(path, lambda unfinished: unfinished.write_text(text))
    return path


def folder_of(name: str, size: str) -> str:
    """The name of the folder of an experiment's page."""
    return name if size == "cpu" else f"{name}-{size}"


def _undecided(claims: Sequence[Mapping[str, Any]]) -> int:
    return sum(claim["judgement"] == Judgement.UNDECIDED.value for claim in claims)


def _overall(claims: Sequence[Mapping[str, Any]]) -> str:
    return overall([Judgement(claim["judgement"]) for claim in claims]).value


def _counted(claims: Sequence[Mapping[str, Any]]) -> str:
    """How many claims were judged how, in words."""
    counts = Counter(claim["judgement"] for claim in claims)
    return ", ".join(f"{counts[j.value]} {j.value}" for j in _OF_CLAIMS if counts[j.value])


def _spent_by_all(found: Sequence[Mapping[str, Any]]) -> float:
    """CPU seconds; a part that several experiments read counts once, by its digest."""
    union: dict[str, float] = {}
    for one in found:
        # A page of an earlier version has no ledger, only its sum.
        union |= one.get("spent", {one["name"]: one["cpu_seconds"]})
    return sum(union.values())


def _write_text(content: str, path: Path) -> None:
    path.write_text(content)


def _spelled(name: str, size: str, overrides: Sequence[str]) -> list[str]:
    """The overrides that name the experiment again, without folders."""
    told = ("experiment", "size", *_PLACES)
    rest = [o for o in overrides if o.lstrip("+").split("=")[0] not in told]
    hidden = [f"{o.split('=')[0]}=…" if o.lstrip("+").startswith(PRIVATE) else o for o in rest]
    return [f"+experiment={name}", f"size={size}", *hidden]


def claim_table(claims: Sequence[Claim]) -> str:
    """The claims in Markdown, one a line."""
    stays = together(claims)
    return markdown([_claim_row(claim, stay) for claim, stay in zip(claims, stays, strict=True)])


def _said_together(claims: Sequence[Claim]) -> str:
    """What the last columns mean, and how much of what was decided is so of whole figures."""
    stays = [stay for stay in together(claims) if stay is not None]
    if not stays:
        return ""
    return (
        "A claim holds where the whole interval lies where it is asked; n for 0.8 is the n at "
        "which it would be decided with a probability of 0.8 if the paper's number were true, or "
        f"ours where the paper prints none. Of {len(stays)} decided claims {sum(stays)} stay so "
        "when all claims of a figure are tested together at 5 % (Holm 1979)."
    )


def _claim_row(claim: Claim, stays: bool | None) -> Row:
    interval = None if claim.low is None else f"{_cell(claim.low)} … {_cell(claim.high)}"
    return {
        "claim": claim.text,
        "paper": claim.paper,
        "ours": claim.ours,
        "95 % interval": interval,
        "asked": claim.asked or None,
        "n": claim.n,
        "n for 0.8": claim.needed,
        "together": None if stays is None else "stays" if stays else "no",
        "judgement": f"**{claim.judgement.value}**",
        "reason": claim.reason,
    }


def _columns(rows: Sequence[Row]) -> list[str]:
    """All names, in the order in which rows bring them."""
    return list(dict.fromkeys(name for row in rows for name in row))


def markdown(rows: Sequence[Row]) -> str:
    """A table in Markdown, with the columns in the order in which rows bring them."""
    if not rows:
        return ""
    columns = _columns(rows)
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(name)).replace("|", r"\|") for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.2f}"
    return str(value)


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _computed_with() -> str:
    """What rounding depends on: the version of torch, and which instructions its kernels use."""
    return f"torch {torch.__version__} (CPU: {torch.backends.cpu.get_cpu_capability()})"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
