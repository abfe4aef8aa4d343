"""Measure the accuracy and loss of a classifier, or of a next-token model, on held-out data."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.metrics.labels import class_indices
from flwr_leakage.records import Batch


@dataclass(frozen=True)
class Utility:
    """The quality of a classifier, or of a next-token model, on held-out data.

    Attributes:
        accuracy: the share of samples whose largest logit is that of their label, in [0, 1].
        loss: the mean cross-entropy; not finite if the model diverged.
        num_examples: the number of samples; for texts, of predicted tokens.
    """

    accuracy: float
    loss: float
    num_examples: int


def utility_of(
    logits_of: Callable[[Tensor], Tensor], batches: Iterable[Batch], padding: int | None = None
) -> Utility:
    """Return the accuracy and loss on held-out data of a function from inputs to logits.

    The logits are (B, K) of K classes, or (B, T, V) of the next of V tokens. Each predicted token
    of a text counts as a sample.

    Args:
        logits_of: the function: a model, or a model with given parameters such as
            ``functools.partial(gradient_map.logits, params)``.
        batches: the held-out data; in the accuracy, soft targets count by their largest entry.
        padding: the id of padding tokens, which do not count; ``None`` for none.

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
    """Return the accuracy and loss of a model in eval mode on held-out data, and restore its mode.

    Args:
        model: the model, which returns logits (B, K), or (B, T, V) of the next of V tokens.
        batches: the held-out data.
        padding: the id of padding tokens, which do not count; ``None`` for none.

    Raises:
        ValueError: there is no sample.
    """
    was_training = model.training
    try:
        return utility_of(model.eval(), batches, padding)
    finally:
        model.train(was_training)
