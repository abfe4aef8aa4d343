"""What the global model is good for."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.metrics.labels import class_indices
from flwr_leakage.records import Batch


@dataclass(frozen=True)
class Utility:
    """Quality of a classifier on held-out data.

    Attributes:
        accuracy: share of samples whose largest logit is their label's; in [0, 1].
        loss: mean cross-entropy; not finite where the model diverged.
        num_examples: samples seen.
    """

    accuracy: float
    loss: float
    num_examples: int


def classifier_utility(model: nn.Module, batches: Iterable[Batch]) -> Utility:
    """Evaluate ``model`` in eval mode; its mode is restored.

    Raises:
        ValueError: there is no sample.
    """
    was_training = model.training
    correct, loss, count = 0, 0.0, 0
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                logits = model(batch.inputs)
                loss += float(F.cross_entropy(logits, batch.targets, reduction="sum"))
                correct += int((logits.argmax(1) == class_indices(batch.targets)).sum())
                count += len(batch)
    finally:
        model.train(was_training)
    if count == 0:
        raise ValueError("batches must hold at least one sample, got none.")
    return Utility(correct / count, loss / count, count)
