"""Hold the results of scores, by name, as a table, as tensors or as a pandas frame."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from flwr_leakage.records import Direction, Measurement, State
from flwr_leakage.scores.table import Column, to_html, to_text

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class ScoreResult:
    """The measurements of one score, or the reason why there are none.

    The first measurement is the score's main quantity: ``values``, ``notes``, ``unit`` and
    ``direction`` are its own. The other measurements are found by name, as in
    ``result["lambda_min"].values``.

    Attributes:
        measurements: the measurements, at least one. A score that failed has a single one without
            numbers, under the score's name and with the reason as the note of every sample.
        error: why the score failed, or empty.
    """

    measurements: tuple[Measurement, ...]
    error: str = ""

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.measurements)

    def __getitem__(self, name: str) -> Measurement:
        """Return the measurement of this name; if the score failed, its only measurement, which has
        the reason.
        """
        for measured in self.measurements:
            if measured.name == name:
                return measured
        if self.error:
            return replace(self.measurements[0], name=name)
        names = [measured.name for measured in self.measurements]
        raise KeyError(f"no measurement {name!r}, only {names}")

    @property
    def values(self) -> tuple[float | None, ...]:
        """Return the main quantity's number for each sample; ``None`` for a sample without a
        number.
        """
        return self.measurements[0].values

    @property
    def notes(self) -> tuple[str, ...]:
        """Return for each sample a note on its value, or the reason why it has none."""
        return self.measurements[0].notes

    @property
    def errors(self) -> tuple[float | None, ...]:
        """Return half the width of each sample's error bar; empty if there are no error bars."""
        return self.measurements[0].errors

    @property
    def states(self) -> tuple[State, ...]:
        """Return how each sample's value may be read, see ``Measurement``; empty if not stated."""
        return self.measurements[0].states

    @property
    def unit(self) -> str:
        """Return the unit of the main quantity, such as ``1``; empty if the score failed."""
        return self.measurements[0].unit

    @property
    def direction(self) -> Direction:
        """Return the meaning of a larger value of the main quantity; empty if the score failed."""
        return self.measurements[0].direction

    @property
    def products(self) -> int:
        """Return the number of Jacobian products, of one sample each, of all measurements."""
        return sum(measured.products for measured in self.measurements)

    def tensor(self) -> Float[Tensor, " S"]:
        """Return the score's main quantity (its first measurement) for each of S samples, as (S,)
        in float64. A sample without a number has NaN.
        """
        return self.measurements[0].tensor()


@dataclass(frozen=True)
class Scores(Mapping[str, ScoreResult]):
    """A mapping from the names of the scores that were asked for to their results, in that order.

    Printed, or shown in a notebook, it is a table of samples by measurements, with error bars and
    notes.

    Attributes:
        results: the results by name.
        notes: remarks on all results: the mode in which the model was scored, and the perturbation
            of a sample's own gradient.
    """

    results: Mapping[str, ScoreResult]
    notes: tuple[str, ...] = ()
    _shown_rows: int = field(default=20, repr=False, compare=False)

    def __getitem__(self, name: str) -> ScoreResult:
        if name not in self.results:
            raise KeyError(f"no score {name!r}, only {list(self.results)}")
        return self.results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __str__(self) -> str:
        return to_text(self._columns(), self.notes, self._shown_rows)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return to_html(self._columns(), self.notes, self._shown_rows)

    def _columns(self) -> list[Column]:
        return [
            Column(name, measured, result.error)
            for name, result in self.results.items()
            for measured in result
        ]

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a pandas frame with one row for each sample and measurement.

        Its columns are ``score`` (the name under which the score was asked for), ``measurement``,
        ``sample``, ``value`` (NaN where there is none), ``error`` (the value's uncertainty),
        ``state`` (whether it is exact, an estimate or a bound), ``unit``, ``direction`` and
        ``note``. ``frame.pivot(index="sample", columns=["score", "measurement"], values="value")``
        has a row for each sample.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_pandas() needs pandas, which is not installed: pip install pandas, or "
                "flwr-leakage[pandas]. tensor() of each result needs nothing."
            ) from error
        rows = [
            (column.score, m.name, sample, value, bar, state, m.unit, m.direction, note)
            for column in self._columns()
            for m in [column.measurement]
            for sample, (value, bar, state, note) in enumerate(column.entries())
        ]
        names = "score measurement sample value error state unit direction note"
        frame = pandas.DataFrame(rows, columns=names.split())
        return frame.astype({"value": "float64", "error": "float64"})
