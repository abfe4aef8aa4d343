"""Define the frozen records of an audit: measurements with error bars and states, and a run's
events.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Direction = Literal["larger is safer", "smaller is safer", "larger leaks more", ""]
RecordKind = Literal[
    "score", "attack", "metric", "utility", "cost", "check", "client", "what_if", "membership",
    "labels", "probe",
]  # fmt: skip
State = Literal["exact", "within tolerance", "lower bound", "upper bound", "unresolved"]
"""The relation of a value to the quantity that it is named after; see ``Measurement``."""
NOT_CHECKED = "explains the update was not checked: "
"""The words of an event's message before the reason why a client's training could not be replayed.
The report finds these events by the words."""
MAX_CLIENT = 2**31
"""The largest partition id. Larger client ids are ids of nodes, which Flower draws from 64 bits. A
node that claims a larger partition id is not believed, as it could take the id of another node that
connects later."""

NOT_TESTED = "candidates were not tested"
"""The first words of an event's message that tells why given records were not tested for
membership."""

ENDED_EARLY = "the run ended early"
"""The first words of an event's message that tells why a run ended before its last round."""

KEPT_FOR_LATER = "kept to be attacked later"
"""The last words of an event's message on updates that are stored, so that they can be attacked
after the run. The report finds these events by the words."""

DEFENDED_BY = "The update was defended by"
"""The first words of the message by which a client names its defense; see :func:`defenses_told`."""

NUMBERS: tuple[State, ...] = ("exact", "within tolerance")
"""The states of a value that is the quantity itself, and not a bound on it."""


def defenses_told(messages: Iterable[str]) -> list[str]:
    """Return the names of the defenses that clients say they use, from the messages of events.

    Example:
        >>> defenses_told(["client 0 says: The update was defended by MixUp."])
        ['MixUp']
    """
    found = (re.search(rf"says: {DEFENDED_BY} (\w{{1,60}})\.", each) for each in messages)
    return sorted({each[1] for each in found if each})


@dataclass(frozen=True)
class Measurement:
    """The values of one quantity for a batch's samples: a risk score, or a metric against truth.

    A state says how a value may be read:

    - ``exact``: right up to rounding errors, which the error bar covers.
    - ``within tolerance``: an estimate that is within its error bar.
    - ``lower bound``, ``upper bound``: a value, if there is one, is the number of a quantity that
      by its definition bounds another one, such as an attacker's error, from below or above. The
      error bar is that of the number. Without a value, an estimate did not converge. The note then
      has the bound that the estimate proves, so that nobody averages bounds with numbers.
    - ``unresolved``: there is no number and no bound; the note says why.

    Attributes:
        name: the name of the quantity, e.g. ``lambda_max`` or ``psnr``.
        values: one entry per sample, finite, or ``None`` where there is no number.
        unit: ``dB``, ``1``, ``model input``, ``pixel``, …
        direction: the meaning of a larger value, such as ``larger leaks more``.
        notes: one text per sample: why there is no number, or how to read the number; mostly empty.
        products: the number of Jacobian products (``matvec`` or ``rmatvec`` of one sample) that the
            measurement took.
        errors: half the width of each value's error bar, in ``unit``; ``None`` where the width is
            unknown or there is no value; an empty tuple if no value has an error bar. Error bars of
            random estimates hold with a probability of 99 %.
        states: one state per sample, of those above; an empty tuple if no state is known.
    """

    name: str
    values: tuple[float | None, ...]
    unit: str
    direction: Direction
    notes: tuple[str, ...] = ()
    products: int = 0
    errors: tuple[float | None, ...] = ()
    states: tuple[State, ...] = ()

    def __post_init__(self) -> None:
        for name in ("notes", "errors", "states"):
            given = len(getattr(self, name))
            if given and given != len(self.values):
                raise ValueError(
                    f"{name} must have one entry for each of {len(self.values)} samples, "
                    f"got {given}."
                )
        for value in self.values:
            if value is not None and not math.isfinite(value):
                raise ValueError(f"values of {self.name} must be finite or None, got {value}.")
        for value, error in zip(self.values, self.errors, strict=False):
            if error is not None and (value is None or not 0 <= error < math.inf):
                raise ValueError(
                    f"errors of {self.name} must be finite and ≥ 0, and None where there is no "
                    f"value, got {error} for the value {value}."
                )
        for value, state in zip(self.values, self.states, strict=False):
            if state not in get_args(State):
                raise ValueError(
                    f"states of {self.name} must be of {get_args(State)}, got {state!r}."
                )
            if state in (NUMBERS if value is None else ("unresolved",)):
                raise ValueError(f"the state of {self.name} = {value} cannot be {state!r}.")

    def tensor(self) -> Tensor:
        """Return the values (B,) as a float64 tensor, with NaN where there is no number.

        Example:
            >>> Measurement("psnr", (20.0, None), "dB", "larger leaks more").tensor()
            tensor([20., nan], dtype=torch.float64)
        """
        numbers = [math.nan if value is None else value for value in self.values]
        return torch.tensor(numbers, dtype=torch.float64)


@dataclass(frozen=True)
class LeakageRecord:
    """One number of an audit.

    Attributes:
        run: the run's name.
        server_round: counted from 1; 0 for the whole run.
        client_id: the partition id; −1 for the server.
        sample: index in the client's batch; −1 for the whole client or round.
        kind: the family of the number, such as ``score``, ``metric`` or ``attack``.
        name: the name of the quantity, such as ``psnr``.
        value: finite, or ``None`` where it could not be computed (see ``note``).
        unit: ``dB``, ``1``, ``pixel``, …
        direction: the meaning of a larger value, such as ``larger leaks more``.
        note: why the value is missing, or has to be read with care; for an attack's result, the
            facts that the attacker was given besides the update.
        error: half the width of the value's error bar, or ``None`` where it is unknown.
        state: how the value may be read, see ``Measurement``; empty if no state is known.
    """

    run: str
    server_round: int
    client_id: int
    sample: int
    kind: RecordKind
    name: str
    value: float | None
    unit: str = ""
    direction: Direction = ""
    note: str = ""
    error: float | None = None
    state: State | Literal[""] = ""


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run: a phase, a failure, a warning.

    Attributes:
        run: the run's name.
        server_round: counted from 1; 0 for the whole run.
        client_id: the partition id; −1 for the server.
        level: the severity of the event.
        message: what happened, in words.
    """

    run: str
    server_round: int
    client_id: int
    level: Literal["info", "warning", "error"]
    message: str
