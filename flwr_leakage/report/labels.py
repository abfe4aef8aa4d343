"""What the attack told of labels."""

from collections.abc import Mapping
from typing import Any

from flwr_leakage.report.index import Index, count, values


def labels_told(index: Index, metadata: Mapping[str, Any]) -> str:
    """Whether labels leak too; empty where they were not compared, or given and all right."""
    told = values(index.series("metric", "label_accuracy"))
    right, inferred = round(sum(told)), "labels inferred" in str(metadata.get("threat", ""))
    if not told or (right == len(told) and not inferred):
        return ""
    leak = "Labels leak too" if right and inferred else "Labels"
    source = ", from the update alone" * inferred
    wrong = " With a wrong label an attack looks for another image, so that its failure says less."
    return (
        f"{leak}: the attack got the label right in {right:,} of "
        f"{count(len(told), 'attempt')}{source}.{wrong * (right < len(told))}"
    )
