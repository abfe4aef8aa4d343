"""What an experiment of a paper finds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, str | int | float | None]
"""One line of a table: the name of each column and its cell."""


class Judgement(Enum):
    """What a rerun says of a paper's claim, or of all claims of an experiment.

    ``HOLDS_IN_PART`` is of an experiment only, see ``overall``: a claim is one number.
    """

    HOLDS = "holds"
    HOLDS_IN_PART = "holds in part"
    UNDECIDED = "undecided"
    DOES_NOT_HOLD = "does not hold"
    NOT_COMPARABLE = "not comparable"


FEWEST = 4
"""Independent values below which an interval says too little for a judgement."""


def too_few(n: int) -> str:
    """Why n independent values are not judged; empty if they are enough."""
    return f"n = {n} is too few for an interval" if n < FEWEST else ""


def verdict(low: float, high: float, least: float, most: float) -> Judgement:
    """Of a claim that a number lies in ``least`` … ``most``, from the number's interval.

    It holds where the whole interval lies there, does not hold where the whole interval lies
    outside, and is undecided where it reaches over an end.
    """
    if least <= low and high <= most:
        return Judgement.HOLDS
    if high < least or low > most:
        return Judgement.DOES_NOT_HOLD
    return Judgement.UNDECIDED


def overall(judgements: Sequence[Judgement]) -> Judgement:
    """The one judgement of an experiment, from those of its claims.

    Claims that are not comparable do not count; where none is left, neither is the experiment. It
    holds where all the others hold, and in part where some do. Where none holds it does not hold if
    any claim does not, and is undecided if all are.

    Example:
        >>> overall([Judgement.HOLDS, Judgement.UNDECIDED, Judgement.NOT_COMPARABLE]).value
        'holds in part'
    """
    found = {one for one in judgements if one is not Judgement.NOT_COMPARABLE}
    if not found:
        return Judgement.NOT_COMPARABLE
    if found == {Judgement.HOLDS}:
        return Judgement.HOLDS
    if Judgement.HOLDS in found:
        return Judgement.HOLDS_IN_PART
    return Judgement.DOES_NOT_HOLD if Judgement.DOES_NOT_HOLD in found else Judgement.UNDECIDED


@dataclass(frozen=True)
class Claim:
    """A paper's claim beside what was found.

    Attributes:
        text: the claim in one plain sentence, with its place, such as ``Table 1``.
        paper: the paper's number as printed, or ``plot only``.
        ours: the number found; ``None`` where there is none.
        low: lower end of its 95 % interval; ``None`` where it has none.
        high: upper end, likewise.
        n: how many independent values the number is made of.
        judgement: what follows.
        reason: one line; needed unless the claim holds or does not.
        asked: where the number must lie for the claim to hold.
        needed: the n at which the interval would decide with a probability of 0.8, see
            :func:`simulations.papers.judge.decide`; ``None`` where that is not known.
        p: 1 less the level of the interval that ends at what decided, or would decide.

    Raises:
        ValueError: a claim is judged without an interval, is not comparable without a reason, or
            holds in part.
    """

    text: str
    paper: str
    ours: float | None
    low: float | None
    high: float | None
    n: int
    judgement: Judgement
    reason: str = ""
    asked: str = ""
    needed: int | None = None
    p: float | None = None

    def __post_init__(self) -> None:
        if self.judgement is Judgement.HOLDS_IN_PART:
            raise ValueError(f"a claim is one number: it cannot hold in part, got {self.text}")
        if self.judgement is Judgement.NOT_COMPARABLE:
            if not self.reason:
                raise ValueError(
                    f"a claim that is judged {self.judgement.value!r} must give a reason, got "
                    f"none: {self.text}"
                )
        elif None in (self.ours, self.low, self.high):
            raise ValueError(
                f"a claim that is judged {self.judgement.value!r} must have a number and its "
                f"interval, got {self.ours} in [{self.low}, {self.high}]: {self.text}"
            )


@dataclass(frozen=True)
class Findings:
    """What an experiment found.

    Attributes:
        rows: the table, one row a cell, the paper's number in a column of its own.
        claims: the paper's claims with their judgements.
        figures: by name.
        attacker: what the attacker is given.
        remarks: what a reader must know besides, one sentence each.
    """

    rows: list[Row]
    claims: tuple[Claim, ...]
    figures: Mapping[str, "Figure"]
    attacker: str
    remarks: tuple[str, ...] = ()
