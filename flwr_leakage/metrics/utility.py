"""Accuracy and loss of a classifier, or a model of the next token, on held-out data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
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


def utility_of(
    logits_of: Callable[[Tensor], Tensor], batches: Iterable[Batch], padding: int | None = None
) -> Utility:
    """Evaluate a function of inputs to logits (B, K), or (B, T, V) of a next token.

    Each predicted token of a text counts as a sample.

    Args:
        logits_of: a model, or a model with given parameters such as
            ``functools.partial(gradient_map.logits, params)``.
        batches: held-out data; soft targets count by their largest entry in the accuracy.
        padding: the id of tokens that are not predicted, if there is one.

    Raises:
        ValueError: there is no sample.
    """
    correct, loss, count = 0, 0.0, 0
    with torch.no_grad():
        for batch in batches:
            logits, targets = logits_of(batch.inputs), batch.targets
            if logits.ndim == 3:
                logits, targets = logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
                if padding is not None:
                    logits, targets = logits[targets != padding], targets[targets != padding]
            loss += float(F.cross_entropy(logits, targets, reduction="sum"))
            correct += int((logits.argmax(1) == class_indices(targets)).sum())
            count += len(targets)
    if count == 0:
        raise ValueError("batches must hold at least one sample, got none.")
    return Utility(correct / count, loss / count, count)


def classifier_utility(
    model: nn.Module, batches: Iterable[Batch], padding: int | None = None
) -> Utility:
    """Evaluate ``model`` in eval mode; its mode is restored.

    Raises:
        ValueError: there is no sample.
    """
    was_training = model.training
    try:
        return utility_of(model.eval(), batches, padding)
    finally:
        model.train(was_training)
