"""One sentence that says what a run showed, and the rule that it follows from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flwr_leakage.records import RunEvent
from flwr_leakage.report.index import Index, count, decibel, values
from flwr_leakage.report.replays import replay_warning


@dataclass(frozen=True)
class Verdict:
    """What a run showed.

    Attributes:
        sentence: in plain words.
        rule: how the sentence follows from the numbers.
        level: ``leak`` where images were recovered, ``quiet`` where attacks recovered none,
            ``unknown`` where nothing can be said.
        details: sentences that the reader must know besides: attacks that failed, clients with
            errors, and the warnings that were given before the first round.
    """

    sentence: str
    rule: str
    level: Literal["leak", "quiet", "unknown"]
    details: tuple[str, ...]


def judge(index: Index, events: Sequence[RunEvent], recovered_psnr: float) -> Verdict:
    """Derive the verdict: an image is recovered if its PSNR is at least ``recovered_psnr`` dB."""
    details = (*replay_warning(index), *_failures(index, events), *_caveats(events))
    attacked = index.attacked()
    psnr = index.series("metric", "psnr")
    measured = values(psnr)
    if not measured:
        return Verdict(_without_outcome(index), "", "unknown", details)
    recovered = sum(value >= recovered_psnr for value in measured)
    rule = (
        f"An image counts as recovered if the PSNR of its reconstruction is at least "
        f"{recovered_psnr:g} dB. Images whose attack failed count as attacked."
    )
    best = f"{decibel(max(measured))} dB"
    total = count(len(attacked), "attacked image")
    if recovered:
        sentence = f"{recovered} of {total} {'was' if recovered == 1 else 'were'} recovered"
        return Verdict(f"{sentence}; the closest reached {best}.", rule, "leak", details)
    sentence = f"None of {total} was recovered; the closest reached {best}."
    caution = "This attack did not succeed here; that does not show that no attack would."
    return Verdict(sentence, rule, "quiet", (caution, *details))


def _without_outcome(index: Index) -> str:
    answers = index.series("attack", "objective")
    if index.attacked():
        return "Attacks were measured, but no PSNR is known, so no image can be called recovered."
    if answers:
        return (
            f"{count(len(answers), 'update')} {'was' if len(answers) == 1 else 'were'} attacked, "
            f"but without the originals nothing says how close the reconstructions are."
        )
    if index.names("score"):
        return "No attack was run; there are risk scores only."
    return "No attack was run and no score was computed."


def failed_attacks(index: Index) -> list[tuple[int, int]]:
    """Return (round, client) of every attack that gave no reconstruction."""
    answers = index.series("attack", "objective")
    return [key[:2] for key, record in answers.items() if record.value is None]


def _caveats(events: Sequence[RunEvent]) -> tuple[str, ...]:
    before = (event for event in events if event.server_round == 0 and event.client_id < 0)
    return tuple(event.message for event in before if event.level != "info")


def _failures(index: Index, events: Sequence[RunEvent]) -> tuple[str, ...]:
    details = []
    failed = failed_attacks(index)
    if failed:
        total = count(len(index.series("attack", "objective")), "attack")
        details.append(f"{len(failed)} of {total} gave no reconstruction.")
    troubled = {
        (event.server_round, event.client_id)
        for event in events
        if event.client_id >= 0 and event.level != "info"
    } - set(failed)
    if troubled:
        details.append(
            f"In {count(len(troubled), 'case')} a client’s round had an error or a warning "
            f"other than a failed attack (see Events)."
        )
    return tuple(details)
