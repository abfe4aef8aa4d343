"""Find the accuracy among the metrics that an app's own evaluation reports."""

from collections.abc import Mapping

from flwr_leakage.audit import ServerAudit
from flwr_leakage.tracking.text import plain_text

NAMES = (
    "accuracy", "acc", "test_accuracy", "test_acc", "eval_accuracy", "eval_acc", "val_accuracy",
    "val_acc", "accuracy_top1", "top1",
)  # fmt: skip
"""Names under which apps report an accuracy. If several metrics have such a name, the first name in
this order counts. Upper case and hyphens make no difference."""

MAX_NAMES = 100
"""The largest number of characters of metrics' names that a record's note quotes, as an app may
report any number of metrics."""


def accuracy_of(metrics: Mapping[str, object]) -> tuple[str, float] | None:
    """Return the accuracy among an evaluation's metrics as (its name, its value), or None.

    The accuracy is the metric with a usual name, such as ``test_accuracy``, or else the only metric
    whose name contains ``acc``. It is read as a share in [0, 1]. Other values are ignored: if
    percentages counted, 1.0 could mean 1 % or 100 %.

    Example:
        >>> accuracy_of({"eval_loss": 0.7, "eval_acc": 0.5, "num-examples": 9})
        ('eval_acc', 0.5)
        >>> accuracy_of({"loss": 0.7}), accuracy_of({"acc": 87.5})
        (None, None)
    """
    numbers = {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and 0 <= value <= 1
    }
    plain = {name.lower().replace("-", "_"): name for name in numbers}
    named = [plain[name] for name in NAMES if name in plain]
    alike = [name for key, name in plain.items() if "acc" in key]
    if not named and len(alike) != 1:
        return None
    chosen = (named or alike)[0]
    return chosen, numbers[chosen]


def tell_accuracy(
    audit: ServerAudit, server_round: int, metrics: Mapping[str, object], source: str
) -> None:
    """Record the accuracy that an app's own evaluation reports, or that it reports none.

    The accuracy is recorded under the name ``test_accuracy``. If no metric is an accuracy, the
    record has no value, and its note lists the metrics' names. Without metrics, nothing is
    recorded. ``source`` is the side that evaluated, in words, such as ``the server’s evaluation``.
    """
    if found := accuracy_of(metrics):
        name = plain_text(found[0], MAX_NAMES)
        note = f"told by {source} as “{name}”"
        audit.utility(server_round, "test_accuracy", found[1], note=note)
    elif metrics:
        names = plain_text(", ".join(metrics), MAX_NAMES)
        note = f"{source} told {names}: no share of 1 among them is named an accuracy"
        audit.utility(server_round, "test_accuracy", None, note=note)
