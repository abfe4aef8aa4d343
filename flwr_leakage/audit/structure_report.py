"""Define the results of ``structure``, which says which exact attacks apply to an update."""

import textwrap
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["applies", "features only", "does not apply", "recovers"]

LINE = 100
"""The largest number of characters in a printed line of the results of ``structure``."""

RECOVERED_DB = 40.0
"""The least PSNR in dB at which a synthetic image counts as recovered by an exact attack. The value
is a choice: a root mean squared error of 1 % of the pixels' range.
"""


@dataclass(frozen=True)
class Opening:
    """The verdict on whether one exact attack, which solves equations, applies to an update.

    Attributes:
        attack: the name of the attack.
        verdict: ``applies``: the attack can be run on the update, which does not say that it
            succeeds. ``features only``: the attack can be run, and recovers features of the images,
            not the images. ``recovers``: the attack was run on the synthetic batch, and recovered
            all images with a PSNR of at least 40 dB. ``does not apply``: the attack cannot be run.
        reason: the property that the attack uses, why it does not apply, or the result of its run.
    """

    attack: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Directions:
    """The number of directions in the space of inputs that an update determines, to first order.

    Attributes:
        unknowns: the number of input values that are sought.
        equations: the number of values of the update, one for each parameter.
        seen: the rank of the Jacobian of the update by the inputs, or a lower bound of it.
        resolved: whether ``seen`` is the rank; otherwise it is a lower bound from random rows.
        least_seen: the smallest singular value that counts as non-zero, divided by the largest.
        most_unseen: the largest singular value that counts as zero, divided by the largest.
    """

    unknowns: int
    equations: int
    seen: int
    resolved: bool
    least_seen: float
    most_unseen: float

    @property
    def unseen(self) -> tuple[int, int]:
        """Return the least and the largest number of directions that the update does not determine.

        The two numbers are equal if the Jacobian's rank is known.
        """
        least = max(0, self.unknowns - self.equations)
        most = self.unknowns - self.seen
        return (most if self.resolved else least), most

    def __str__(self) -> str:
        least, most = self.unseen
        if self.resolved:
            text = f"{most:,} of {self.unknowns:,} directions are not determined"
            return f"{text}; the least seen has {self.least_seen:.0e} of the largest singular value"
        return (
            f"{least:,} to {most:,} of {self.unknowns:,} directions are not determined "
            f"(by {self.equations:,} equations and {self.seen:,} random rows, not resolved)"
        )


@dataclass(frozen=True)
class Structure:
    """The results of ``structure``: which exact attacks apply to an update, and what it determines.

    Attributes:
        title: the model, the samples and the steps in words.
        one_sample: the directions of one sample's inputs that the update determines if all other
            samples in the batch are known; ``None`` where they were not computed.
        together: the directions of all samples' inputs that the update determines; ``None`` where
            they were not computed.
        openings: the verdict on each exact attack.
        not_computed: why a rank was not computed; empty if all were.
    """

    title: str
    one_sample: Directions | None
    together: Directions | None
    openings: tuple[Opening, ...]
    not_computed: str = ""

    def __getitem__(self, attack: str) -> Opening:
        """Return the verdict on one attack, by its name."""
        return next(each for each in self.openings if each.attack == attack)

    def __str__(self) -> str:
        width = max((len(each.attack) for each in self.openings), default=0)
        rows = [
            textwrap.fill(
                f"  {each.attack:{width}}  {each.verdict:14}  {each.reason}",
                LINE,
                subsequent_indent=" " * (width + 20),
            )
            for each in self.openings
        ]
        lines = [self.title]
        one, together = self.one_sample, self.together
        if one is not None:
            lines.append(f"  one sample: {one}")
        if one is not None and together is not None and together.unknowns > one.unknowns:
            lines.append(f"  all samples together: {together}")
        if self.not_computed:
            lines.append(f"  rank not computed: {self.not_computed}")
        wrapped = [textwrap.fill(line, LINE, subsequent_indent="    ") for line in lines]
        return "\n".join([*wrapped, "Exact attacks", *rows])
