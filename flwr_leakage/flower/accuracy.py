"""Find the accuracy among the metrics that an app's own evaluation reports."""

from collections.abc import Mapping

from flwr_leakage.audit import ServerAudit
from flwr_leakage.tracking.text import plain_text

NAMES = (
    "accuracy", "acc", "test_accuracy", "test_acc", "eval_accuracy", "eval_acc", "val_accuracy",
    "val_acc", "accuracy_top1", "top1",
)  # fmt: skip
"""Names under which apps report an accuracy, the most certain first; case and hyphens do not
count."""

MAX_NAMES = 100
"""The number of characters that are recorded of the names of metrics if none is an accuracy."""


def accuracy_of(metrics: Mapping[str, object]) -> tuple[str, float] | None:
    """Return the accuracy among an evaluation's metrics as (its name, its value), or None.

    The accuracy is the metric with a usual name, such as ``test_accuracy``, or else the only metric
    whose name holds ``acc``. It is a share of 1: values outside of [0, 1] are ignored, as nothing
    tells whether 1.0 would then mean one or one hundred percent.

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

    It is recorded under the name ``test_accuracy``. Where no metric is an accuracy, the names of
    the metrics are recorded in its place; where there are no metrics, nothing is. ``source`` is the
    side that evaluated, in words, such as ``the server’s evaluation``.
    """
    if found := accuracy_of(metrics):
        name = plain_text(found[0], MAX_NAMES)
        note = f"told by {source} as “{name}”"
        audit.utility(server_round, "test_accuracy", found[1], note=note)
    elif metrics:
        names = plain_text(", ".join(metrics), MAX_NAMES)
        note = f"{source} told {names}: no share of 1 among them is named an accuracy"
        audit.utility(server_round, "test_accuracy", None, note=note)
