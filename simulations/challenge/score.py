"""Measure entries: a run folder and a report for each entry and track, and one table of all."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr_leakage.audit import ServerAudit
from flwr_leakage.audit.truth import Truth
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Reference
from flwr_leakage.report import write_report
from flwr_leakage.tracking import JsonlTracker, read_run
from simulations.benchmarks import lab
from simulations.challenge.entries import Answers
from simulations.challenge.folder import Challenge, Frozen
from simulations.papers.intervals import share_interval

EXACT = 60.0
"""PSNR in dB from which on an image counts as exact: a mean error of a quarter of a level of 8
bits."""


@dataclass(frozen=True)
class Score:
    """What an entry reached in one track.

    Attributes:
        answered: number of updates with an answer that counts.
        psnr: of each private image, in dB; ``None`` without an answer.
        identified: number of images that are nearer to their answer than all images of the pool.
        refusals: for each answer that does not count, the reason.
    """

    answered: int
    psnr: Sequence[float | None]
    identified: int
    refusals: Sequence[str]

    @property
    def found(self) -> list[float]:
        """PSNR of the images that have an answer, in dB."""
        return [value for value in self.psnr if value is not None]

    @property
    def exact(self) -> int:
        """Number of exact images."""
        return sum(value >= EXACT for value in self.found)


def score(challenge: Challenge, entry: Path, folder: Path) -> dict[str, Score]:
    """Return an entry's score in each track; write its runs and reports.

    Args:
        challenge: the updates and the truth behind them.
        entry: the folder of the answers.
        folder: a new folder, with a run folder for each track.

    Raises:
        FileExistsError: the folder holds runs.
        ValueError: the entry holds files of no update.
    """
    known = {f"{name}.npz" for name in challenge.index}
    if strangers := sorted({path.name for path in entry.iterdir()} - known):
        raise ValueError(
            f"{entry} must hold one file for each update, got {strangers[:5]} besides."
        )
    tracks: dict[str, list[Frozen]] = {}
    for frozen in challenge.updates():
        tracks.setdefault(frozen.track, []).append(frozen)
    private = {name: challenge.secret(name).private.inputs for name in challenge.index}
    scores = {}
    for track, several in tracks.items():
        answers = Answers(entry, track, private)
        _audit(challenge, several, answers, folder / track)
        scores[track] = _read(folder / track)
    return scores


def _audit(challenge: Challenge, several: Sequence[Frozen], answers: Answers, folder: Path) -> None:
    """Record what the answers reach, as an audited server does with its own attacks."""
    first = several[0]
    pool = challenge.secret(first.name).pool

    def truth(server_round: int, client_id: int, num_examples: int) -> Truth:
        secret = challenge.secret(several[server_round - 1].name).private
        samples = lab.normalize(secret, first.spec)
        return Truth(samples, samples)

    tracker = JsonlTracker(folder)
    audit = ServerAudit(
        GradientMap(first.model()),
        first.spec,
        first.seen.update.schedule,
        tracker,
        folder.name,
        answers,
        evaluator=Evaluator(),
        truth=truth,
        reference=Reference(pool.mean(0), pool, meaning="the mean of 100 other images"),
        large_clients=None,
    )
    try:
        for frozen in several:
            audit.inspect(frozen.seen.server_round, [frozen.seen], [])
    finally:
        tracker.close()
    write_report(folder)


def _read(folder: Path) -> Score:
    """Return the score of one track from its records."""
    run = read_run(folder)
    measures = [r for r in run.records if r.kind == "metric" and r.sample >= 0]
    psnr = [r.value for r in measures if r.name == "psnr"]
    identified = sum(r.value == 1 for r in measures if r.name == "identification_rank")
    refusals = [
        f"{folder.name}-{event.server_round}: " + event.message.partition(": ")[2]
        for event in run.events
        if "not recovered" in event.message
    ]
    rounds = {r.server_round for r in measures if r.name == "psnr" and r.value is not None}
    return Score(len(rounds), psnr, identified, refusals)


def table(scores: dict[str, dict[str, Score]]) -> str:
    """Return the table of all entries: a row for each entry and track, then for each entry."""
    rows: list[list[object]] = []
    for entry, tracks in scores.items():
        rows += [[entry, track, *_cells(one)] for track, one in tracks.items()]
    for entry, tracks in scores.items():
        every = list(tracks.values())
        whole = Score(
            sum(one.answered for one in every),
            [value for one in every for value in one.psnr],
            sum(one.identified for one in every),
            [reason for one in every for reason in one.refusals],
        )
        rows.append([entry, "all", *_cells(whole)])
    return lab.markdown(
        ("entry", "track", "updates answered", "images", "PSNR, dB: median (range)",
         "exact", "identified (95 %)"),
        rows,
    )  # fmt: skip


def _cells(one: Score) -> list[object]:
    found, count = one.found, len(one.psnr)
    median = f"{statistics.median(found):.1f}" if found else "–"
    spread = f"{median} ({min(found):.1f} to {max(found):.1f})" if found else median
    share, low, high = share_interval(one.identified, count)
    told = f"{share:.0%} ({low:.0%} to {high:.0%})"
    return [one.answered, count, spread, one.exact, told]


def write_scores(path: Path, scores: dict[str, dict[str, Score]]) -> None:
    """Write all scores as JSON, with the reason of each answer that does not count."""
    told = {
        entry: {
            track: {
                "answered": one.answered,
                "psnr": list(one.psnr),
                "identified": one.identified,
                "refusals": list(one.refusals),
            }
            for track, one in tracks.items()
        }
        for entry, tracks in scores.items()
    }
    path.write_text(json.dumps(told, indent=1))
