"""The stages of a fit through ReLUs: which fading comes next, and when the fit is over."""

from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    """What is done next. The values name the stages in an attack's ``stats``."""

    ROUGH = "rough fading"
    """The first one, from grey, with the masks that were proven without a candidate."""

    MIDDLE = "fading"
    """From the best candidate, after one that proved masks."""

    LONGER = "longer fading"
    """The same to a lower weight, after a candidate that proved no mask."""

    DEEP = "deep fading"
    """From the best candidate to hardly any prior, with all masks proven or no more to come."""

    DEEP_FROM_GREY = "deep fading from grey"
    """The same from grey and with wider noise, where the former did not meet the equations."""

    MET = "equations met"
    """The end: a deep fading met the equations. What is left is to refine it."""

    EXHAUSTED = "exhausted"
    """The end: no fading met the equations."""

    DOUBTFUL = "doubtful"
    """The end: not one mask could be proven, so that the gradient is not exact."""

    @property
    def is_deep(self) -> bool:
        """Whether the equations are to be met to the last digit."""
        return self in (Stage.DEEP, Stage.DEEP_FROM_GREY)

    @property
    def is_end(self) -> bool:
        """Whether nothing is left to be faded."""
        return self in (Stage.MET, Stage.EXHAUSTED, Stage.DOUBTFUL)


@dataclass(frozen=True)
class Outcome:
    """What came of a stage.

    Attributes:
        met: its candidate meets the equations.
        has_proven: its candidate helped to prove a mask.
        is_settled: no more masks can be proven: all are, or nothing tells about them.
        is_doubtful: masks could be proven, but none is.
    """

    met: bool
    has_proven: bool
    is_settled: bool
    is_doubtful: bool


def first_stage(is_settled: bool) -> Stage:
    """Where a fit begins; ``is_settled`` as in :class:`Outcome`.

    Example:
        >>> first_stage(is_settled=False)
        <Stage.ROUGH: 'rough fading'>
    """
    return Stage.DEEP_FROM_GREY if is_settled else Stage.ROUGH


def next_stage(stage: Stage, outcome: Outcome) -> Stage:
    """The stage that follows one that is no end.

    A candidate that proved masks changed the equations, so the next one starts from it, deep once
    no more can be proven. Two in a row that proved none lead to a deep fading, too; but not if no
    mask at all is proven, as equations of an inexact gradient must not be met to the last digit.

    Raises:
        ValueError: the stage is an end.
    """
    if stage.is_end:
        raise ValueError(f"no stage follows {stage}.")
    if stage.is_deep and outcome.met:
        return Stage.MET
    if outcome.has_proven:
        return Stage.DEEP if outcome.is_settled else Stage.MIDDLE
    if stage in (Stage.ROUGH, Stage.MIDDLE):
        return Stage.LONGER
    if stage is Stage.LONGER:
        return Stage.DOUBTFUL if outcome.is_doubtful else Stage.DEEP
    return Stage.DEEP_FROM_GREY if stage is Stage.DEEP else Stage.EXHAUSTED
