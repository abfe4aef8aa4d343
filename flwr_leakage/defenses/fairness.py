"""Measure how evenly a defense protects samples and classes, and list the least protected ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class GroupProtection:
    """A summary of the protection of the samples of one class. Protection is a quantity such as the
    recovery error, which is larger for a safer sample.

    Attributes:
        label: the class.
        count: the number of samples of the class whose protection is known.
        worst: the smallest protection of these samples.
        mean: the mean protection of these samples.
    """

    label: int
    count: int
    worst: float
    mean: float


@dataclass(frozen=True)
class ProtectionReport:
    """A summary of how well samples and classes are protected, by a quantity such as the recovery
    error, which is larger for a safer sample.

    Attributes:
        worst_sample: the index of the sample that is protected least.
        worst: the protection of that sample.
        worst_decile: the mean protection of the least protected tenth of the samples, and of at
            least one sample.
        mean: the mean protection of all samples.
        evenness: worst / mean, in [0, 1]; 1 if all samples are protected alike.
        by_class: the protection of each class that occurs, sorted by ``worst``, the smallest first.
    """

    worst_sample: int
    worst: float
    worst_decile: float
    mean: float
    evenness: float
    by_class: tuple[GroupProtection, ...]


def protection_report(values: Sequence[float | None], targets: Tensor) -> ProtectionReport:
    """Return a summary, by class, of samples' recovery errors, predicted ones (such as the
    inversion influence I²F) or measured ones (RMSE).

    Args:
        values: the recovery error of each of the B samples, ≥ 0, where larger is safer; ``None``
            where there is no number.
        targets: (B,) class indices, or (B, K) class probabilities, of which the likeliest class
            counts.

    Raises:
        ValueError: the lengths differ, or no sample has a number.

    Example:
        >>> protection_report([0.2, 0.6, 0.4], torch.tensor([1, 1, 0])).by_class[0]
        GroupProtection(label=1, count=2, worst=0.2, mean=0.4)
    """
    if len(values) != len(targets):
        raise ValueError(
            f"values and targets must have equal lengths, got {len(values)} and {len(targets)}."
        )
    known = [(i, float(value)) for i, value in enumerate(values) if value is not None]
    if not known:
        raise ValueError("at least one sample must have a value, got none.")
    labels = (targets.argmax(1) if targets.ndim == 2 else targets).tolist()
    groups: dict[int, list[float]] = {}
    for i, value in known:
        groups.setdefault(labels[i], []).append(value)
    by_class = sorted(
        (GroupProtection(k, len(v), min(v), sum(v) / len(v)) for k, v in groups.items()),
        key=lambda group: (group.worst, group.label),
    )
    numbers = sorted(value for _, value in known)
    tenth = numbers[: max(1, len(numbers) // 10)]
    worst_sample, worst = min(known, key=lambda pair: pair[1])
    mean = sum(numbers) / len(numbers)
    return ProtectionReport(
        worst_sample=worst_sample,
        worst=worst,
        worst_decile=sum(tenth) / len(tenth),
        mean=mean,
        evenness=worst / mean if mean > 0 else 1.0,
        by_class=tuple(by_class),
    )
