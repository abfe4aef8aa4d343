"""Summarise a run by its settings and a few measures."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flwr_leakage.measurements import defenses_told
from flwr_leakage.report.attempts import LEAKED, attempts, ended, fates, worst_by_image
from flwr_leakage.report.index import Index, by_round, section, values
from flwr_leakage.report.membership import Share, members_found
from flwr_leakage.tracking import RunData
from flwr_leakage.tracking.text import plain_text

Status = Literal["finished", "not finished", "no attack was graded"]


@dataclass(frozen=True)
class Measure:
    """A number by which runs are compared.

    Attributes:
        name: the name of the measure, as a key in tables.
        heading: the heading for people, with the unit.
        leaks: ``more`` if a larger value means that more leaks, ``less`` if it means that less
            leaks; empty if neither.
        style: the format specification of the number, such as ``.1f``.
        meaning: the meaning of the measure in one sentence.
    """

    name: str
    heading: str
    leaks: Literal["more", "less", ""]
    style: str
    meaning: str


SAID = "defense (as clients say)"
"""The name of the setting that holds the defenses that a run's clients say they use."""

FOUND = {"members_found_at_0.01": 0.01, "members_found_at_0.001": 0.001}
"""The rates of false alarms at which the membership test's share of found members is measured, by
the name of the measure in ``MEASURES``.
"""

MEASURES = (
    Measure("images", "images", "", ".0f", "Different images that were attacked."),
    Measure(
        "attempts", "attempts", "", ".0f",
        "Attacked images, counted once a round; failed attacks are among them.",
    ),
    Measure(
        "leaked", "recognised", "more", ".0%",
        "Share of the attempts that the report grades exact or recognisable, compared with a blind "
        "guess; a failed attack leaked nothing.",
    ),
    Measure(
        "partly", "partly", "", ".0%",
        "Share of the attempts graded partly: parts of the image are seen. It comes on top of the "
        "recognisable ones.",
    ),
    Measure(
        "cut_off", "cut off", "", ".0%",
        "Share of the attacked updates on which the time limit ended the attack: with more time "
        "more may be recognised there.",
    ),
    Measure(
        "psnr_best", "worst leak, dB", "more", ".1f",
        "Largest PSNR of all attempts: what the most exposed image lost.",
    ),
    Measure("psnr_median", "median, dB", "more", ".1f", "Median PSNR over all attempts."),
    Measure("ssim_median", "SSIM", "more", ".2f", "Median over all attempts."),
    Measure("lpips_median", "LPIPS", "less", ".2f", "Median over all attempts."),
    Measure("label_accuracy", "labels", "more", ".0%", "Share of the labels found."),
    *(
        Measure(
            name, f"members found at {100 * rate:g}% FPR", "more", ".0%",
            f"Share of the tested records in an update that the membership test finds where it "
            f"takes {100 * rate:g}% of those outside for members, of all runs together, with "
            f"Clopper and Pearson's interval of 95%; in simulations with candidates.",
        )
        for name, rate in FOUND.items()
    ),
    Measure(
        "test_accuracy", "accuracy", "", ".1%",
        "Of the global model on test images, after the last round.",
    ),
    Measure(
        "train_cpu_seconds", "train, s", "", ".2f",
        "CPU seconds of a client's training in a round, mean; its defense included.",
    ),
)  # fmt: skip
"""The measures by which runs are compared, in the order of the table's columns."""


@dataclass(frozen=True)
class Outcome:
    """A run's settings and measures.

    Attributes:
        folder: the run folder.
        config: the run's config as a flat mapping such as ``{"client.batch_size": 4}``, empty if it
            is unknown.
        choices: the chosen option of each config group, such as ``{"attack": "strongest"}``.
        seed: the seed of the run; ``None`` if it is unknown.
        status: ``finished``, ``not finished``, or ``no attack was graded`` if the run ended without
            a graded attempt.
        values: the value of each measure by its name in ``MEASURES``; ``None`` where the run has
            none.
        shares: by name in ``FOUND``, the counts of the records used in training that the membership
            test found at that rate of false alarms, where known.
    """

    folder: Path
    config: Mapping[str, Any]
    choices: Mapping[str, str]
    seed: int | None
    status: Status
    values: Mapping[str, float | None]
    shares: Mapping[str, Share] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Return the folder as text without characters that control a terminal."""
        return plain_text(str(self.folder))


def outcome(run: RunData) -> Outcome:
    """Return a run's settings and measures; if a number was recorded twice, the last one counts."""
    config, seed = section(run.metadata, "config"), run.metadata.get("seed")
    index = Index(run.records)
    counted = {name: members_found(index, rate) for name, rate in FOUND.items()}
    shares = {name: share for name, share in counted.items() if share is not None}
    measured = _measured(index) | dict.fromkeys(FOUND)
    measured |= {name: share.found / share.total for name, share in shares.items()}
    status: Status = "finished" if run.closed else "not finished"
    if run.closed and not measured["attempts"]:
        status = "no attack was graded"
    return Outcome(
        folder=run.folder,
        config=_flat({k: v for k, v in config.items() if k != "choices"} | _said(run)),
        choices={str(k): str(v) for k, v in section(config, "choices").items()},
        seed=seed if isinstance(seed, int) else None,
        status=status,
        values=measured,
        shares=shares,
    )


def _said(run: RunData) -> dict[str, str]:
    """Return the setting ``SAID`` of a run: the defenses that its clients say they use.

    The result is empty if no client names a defense.
    """
    names = defenses_told(event.message for event in run.events)
    return {SAID: " and ".join(names)} if names else {}


def _measured(index: Index) -> dict[str, float | None]:
    def known(name: str, kind: str = "metric") -> list[float]:
        return values(index.series(kind, name))

    def median(name: str) -> float | None:
        return statistics.median(known(name)) if known(name) else None

    def mean(name: str, kind: str) -> float | None:
        return statistics.fmean(known(name, kind)) if known(name, kind) else None

    found, attacked = attempts(index), len(fates(index).attacked)
    graded = any(attempt.blind is not None for attempt in found)
    leaked = sum(attempt.grade in LEAKED for attempt in found)
    partly = sum(attempt.grade == "partly" for attempt in found)
    accuracy = by_round(index.series("utility", "test_accuracy"))
    lpips = next((name for name in index.names("metric") if name.startswith("lpips")), "")
    return {
        "images": float(len(worst_by_image(found))) or None,
        "attempts": float(len(found)),
        "leaked": leaked / len(found) if graded else None,
        "partly": partly / len(found) if graded else None,
        "cut_off": len(ended(index, found)) / attacked if attacked else None,
        "psnr_best": max(known("psnr"), default=None),
        "psnr_median": median("psnr"),
        "ssim_median": median("ssim"),
        "lpips_median": median(lpips),
        "label_accuracy": mean("label_accuracy", "metric"),
        "test_accuracy": accuracy[max(accuracy)][-1] if accuracy else None,
        "train_cpu_seconds": mean("train_cpu_seconds", "cost"),
    }


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested mappings as a flat one, such as ``{"a.b": 1}`` for ``{"a": {"b": 1}}``.

    ``before`` is put before every key.
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat
