"""The stages of a fit through ReLUs, which decide the next fading and the end of the fit."""

from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    """The next action of a fit. The values name the stages in an attack's ``stats``.

    Every fading starts from an input and ends at a *candidate*, which may help to prove masks.
    """

    ROUGH = "rough fading"
    """The first fading, from grey, with the masks that were proven without a candidate."""

    MIDDLE = "fading"
    """A fading from the best candidate, after a candidate that helped to prove masks."""

    LONGER = "longer fading"
    """A fading from the best candidate to a lower weight of the prior, after a candidate that
    proved no mask."""

    DEEP = "deep fading"
    """A fading from the best candidate to a negligible weight of the prior, once no more masks can
    be proven."""

    DEEP_FROM_GREY = "deep fading from grey"
    """A deep fading from grey with wider noise, after one that did not meet the equations."""

    MET = "equations met"
    """The end: the candidate of a deep fading meets the equations and only needs refinement."""

    EXHAUSTED = "exhausted"
    """The end: no fading met the equations."""

    DOUBTFUL = "doubtful"
    """The end: no mask could be proven, which shows that the gradient is not exact."""

    @property
    def is_deep(self) -> bool:
        """Whether the fading must meet the equations to the last digit."""
        return self in (Stage.DEEP, Stage.DEEP_FROM_GREY)

    @property
    def is_end(self) -> bool:
        """Whether no fading follows."""
        return self in (Stage.MET, Stage.EXHAUSTED, Stage.DOUBTFUL)


@dataclass(frozen=True)
class Outcome:
    """The result of the fading of a stage.

    Attributes:
        met: whether its candidate meets the equations.
        has_proven: whether its candidate helped to prove a mask.
        is_settled: whether no more masks can be proven: all are, or no gradient depends on them.
        is_doubtful: whether some gradients could prove masks, but no mask is proven.
    """

    met: bool
    has_proven: bool
    is_settled: bool
    is_doubtful: bool


def first_stage(is_settled: bool) -> Stage:
    """Return the first stage of a fit; see :class:`Outcome` for ``is_settled``.

    Example:
        >>> first_stage(is_settled=False)
        <Stage.ROUGH: 'rough fading'>
    """
    return Stage.DEEP_FROM_GREY if is_settled else Stage.ROUGH


def next_stage(stage: Stage, outcome: Outcome) -> Stage:
    """Return the stage that follows another with a given outcome.

    - A candidate that proved masks has changed the equations, so that the next fading starts from
      it. That fading is deep if no more masks can be proven.
    - Two candidates in a row that proved none also lead to a deep fading. But if no mask is proven
      at all, the gradient is inexact. Its equations must not be met to the last digit, and the fit
      ends.

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
