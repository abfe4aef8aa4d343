"""Summaries of a measurement over a batch, and over the groups that it treats unequally."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.records import Measurement


@dataclass(frozen=True)
class Summary:
    """Statistics over the samples that have a number.

    Attributes:
        name: the measurement's name.
        count: how many samples have a number.
        missing: how many samples have none.
        worst: the value of the most exposed sample, in the sense of the direction; ``None``
            where there is no number or no direction.
        worst_sample: its index, or −1.
        median: the median of the values.
        quantiles: quantiles of the values, by level.
        spread: the ratio of the largest to the smallest absolute value; ``None`` if that is 0.
        by_class: the mean of every class that has a number: protection is not equal.
    """

    name: str
    count: int
    missing: int
    worst: float | None
    worst_sample: int
    median: float | None
    quantiles: dict[float, float]
    spread: float | None
    by_class: dict[int, float]


def summarize(
    measurement: Measurement, targets: Tensor, levels: Sequence[float] = (0.1, 0.25, 0.75, 0.9)
) -> Summary:
    """Summarise a measurement over its batch.

    Args:
        measurement: of B samples.
        targets: (B,) class indices or (B, K) probabilities, whose largest entry is the class.
        levels: of the quantiles, each in [0, 1].
    """
    if len(targets) != len(measurement.values):
        raise ValueError(
            f"targets must have one entry for each of {len(measurement.values)} samples, "
            f"got {len(targets)}."
        )
    found = [(i, value) for i, value in enumerate(measurement.values) if value is not None]
    missing = len(measurement.values) - len(found)
    if not found:
        return Summary(measurement.name, 0, missing, None, -1, None, {}, None, {})
    values = torch.tensor([value for _, value in found], dtype=torch.float64)
    classes = targets.argmax(1) if targets.ndim == 2 else targets
    members: dict[int, list[float]] = {}
    for index, value in found:
        members.setdefault(int(classes[index]), []).append(value)
    worst, worst_sample = None, -1
    if measurement.direction:
        lowest = measurement.direction == "larger is safer"
        worst_sample, worst = (min if lowest else max)(found, key=lambda pair: pair[1])
    smallest = float(values.abs().min())
    return Summary(
        name=measurement.name,
        count=len(found),
        missing=missing,
        worst=worst,
        worst_sample=worst_sample,
        median=float(values.median()),
        quantiles={level: float(torch.quantile(values, level)) for level in levels},
        spread=float(values.abs().max()) / smallest if smallest > 0 else None,
        by_class={label: sum(v) / len(v) for label, v in sorted(members.items())},
    )
