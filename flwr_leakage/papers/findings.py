"""What an experiment of a paper finds."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, str | int | float | None]
"""One line of a table: the name of each column and its cell."""


class Judgement(Enum):
    """What a rerun says of a paper's claim."""

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

    Raises:
        ValueError: a claim is judged without an interval, or without its reason.
    """

    text: str
    paper: str
    ours: float | None
    low: float | None
    high: float | None
    n: int
    judgement: Judgement
    reason: str = ""

    def __post_init__(self) -> None:
        if self.judgement in (Judgement.NOT_COMPARABLE, Judgement.HOLDS_IN_PART):
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
