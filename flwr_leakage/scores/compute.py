"""Several scores of one client's round."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import Budget, BudgetExhausted, Meter
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.randomness import derive_seed
from flwr_leakage.records import Direction, Exposure, Measurement, State
from flwr_leakage.scores.base import Score


@dataclass(frozen=True)
class ScoreResult:
    """What one score gave: its measurements, or the reason why there are none.

    The first measurement is the score's main quantity: ``values``, ``notes``, ``unit`` and
    ``direction`` are those of it. The others stand under their names,
    ``result["lambda_min"].values``.

    Attributes:
        measurements: at least one; of a score that failed, a single one without numbers, under
            the score's name and with the reason as the note of every sample.
        error: why the score failed, or empty.
    """

    measurements: tuple[Measurement, ...]
    error: str = ""

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.measurements)

    def __getitem__(self, name: str) -> Measurement:
        """A measurement by its name; of a score that failed, whatever its name, the reason."""
        for measured in self.measurements:
            if measured.name == name:
                return measured
        if self.error:
            return replace(self.measurements[0], name=name)
        names = [measured.name for measured in self.measurements]
        raise KeyError(f"no measurement {name!r}, only {names}")

    @property
    def values(self) -> tuple[float | None, ...]:
        """One number a sample, or ``None`` where there is none."""
        return self.measurements[0].values

    @property
    def notes(self) -> tuple[str, ...]:
        """One a sample, why there is no number or how to read it; or empty."""
        return self.measurements[0].notes

    @property
    def errors(self) -> tuple[float | None, ...]:
        """Half the width of each value's error bar; or empty."""
        return self.measurements[0].errors

    @property
    def states(self) -> tuple[State, ...]:
        """How each value may be read, see ``Measurement``; or empty."""
        return self.measurements[0].states

    @property
    def unit(self) -> str:
        """``1``, ``model input``, …; empty where the score failed."""
        return self.measurements[0].unit

    @property
    def direction(self) -> Direction:
        """What a larger value means; empty where the score failed."""
        return self.measurements[0].direction


def compute_scores(
    scores: Mapping[str, Score] | Sequence[Score],
    gradient_map: GradientMap,
    exposure: Exposure,
    seed: int = 0,
    budget: Budget | None = None,
    samples: Sequence[int] | None = None,
) -> dict[str, ScoreResult]:
    """Compute all scores of one exposure; it changes neither the exposure nor the model.

    A score's value of a sample is the same whichever other scores are computed, in whatever
    order, and whichever samples: each score has a seed of its own, and what scores share
    depends on none of them.

    Args:
        scores: by name; or a sequence, named by their classes (``LAVP``, then ``LAVP 2``).
        gradient_map: of the client's model and loss.
        exposure: the client's round.
        seed: of all random draws; those of a score depend on its name, too.
        budget: for all scores together, spent in order; ``None`` is no limit.
        samples: indices of those to score, in ascending order, see ``select_samples``; the
            others get no number. ``None`` is all.

    Returns:
        A result for each score, by name and in order. A score that fails, or that the budget
        does not last for, is among them with the reason; the others go on.
    """
    count = len(exposure.private)
    chosen = tuple(range(count)) if samples is None else tuple(samples)
    if sorted(set(chosen)) != list(chosen) or not set(chosen) <= set(range(count)):
        raise ValueError(f"samples must be ascending indices below {count}, got {chosen}.")
    shown = exposure if len(chosen) == count else exposure.select(chosen)
    starts = derive_seed(seed, purpose="shared by all scores")
    client = ClientSamples(gradient_map, shown, starts, Meter(budget))
    results = {}
    for name, score in _named(scores).items():
        result = _compute(name, score, client, derive_seed(seed, purpose=name))
        spread = tuple(_spread(measured, chosen, count) for measured in result)
        results[name] = replace(result, measurements=spread)
    return results


def _named(scores: Mapping[str, Score] | Sequence[Score]) -> dict[str, Score]:
    if isinstance(scores, Mapping):
        return dict(scores)
    named: dict[str, Score] = {}
    for score in scores:
        name = type(score).__name__
        same = sum(type(other) is type(score) for other in named.values())
        named[f"{name} {same + 1}" if same else name] = score
    return named


def _compute(name: str, score: Score, client: ClientSamples, seed: int) -> ScoreResult:
    before = client.meter.products
    try:
        found = score(client, seed)
        if not found:
            raise ValueError(f"{name} returned no measurement.")
        for measured in found:
            if len(measured.values) != len(client):
                raise ValueError(
                    f"{measured.name} must have one value for each of {len(client)} samples, got "
                    f"{len(measured.values)}."
                )
    except Exception as error:  # a broken score must not stop a client's round
        stopped = isinstance(error, BudgetExhausted)
        reason = f"{'not computed' if stopped else type(error).__name__}: {error}"
        none, notes = (None,) * len(client), (reason,) * len(client)
        products = client.meter.products - before
        states: list[State] = ["unresolved"] * len(client)
        failed = Measurement(name, none, "", "", notes, products, states=tuple(states))
        return ScoreResult((failed,), reason)
    return ScoreResult(tuple(found))


def _spread(measured: Measurement, chosen: tuple[int, ...], count: int) -> Measurement:
    """Put the values of the chosen samples in their places among all."""
    if len(chosen) == count:
        return measured
    values: list[float | None] = [None] * count
    notes = ["not selected for scoring in this round"] * count
    errors: list[float | None] = [None] * count
    states: list[State] = ["unresolved"] * count
    for place, index in enumerate(chosen):
        values[index] = measured.values[place]
        notes[index] = measured.notes[place] if measured.notes else ""
        errors[index] = measured.errors[place] if measured.errors else None
        states[index] = measured.states[place] if measured.states else "unresolved"
    return replace(
        measured,
        values=tuple(values),
        notes=tuple(notes),
        errors=tuple(errors) if measured.errors else (),
        states=tuple(states) if measured.states else (),
    )
