"""Measure how many of the labels that an attack inferred are right."""

from collections import Counter

from jaxtyping import Int
from torch import Tensor


def class_indices(targets: Tensor) -> Int[Tensor, " B"]:
    """Return labels as class indices (B,); soft labels (B, K) count by their largest entry.

    Raises:
        ValueError: the labels have neither one axis nor two.
    """
    if targets.ndim == 1:
        return targets.long()
    if targets.ndim == 2:
        return targets.argmax(1)
    raise ValueError(f"targets must be (B,) or (B, K), got {tuple(targets.shape)}.")


def label_accuracy(predicted: Tensor, truth: Tensor) -> tuple[float, ...]:
    """Return for each true sample 1 if an attack inferred its label, else 0; order does not count.

    Each predicted label counts for one sample that has this label: for the sample at the same index
    if it has the label, else for the first one that no other prediction counts for.

    Args:
        predicted: the inferred labels, (M,) class indices or (M, K) probabilities.
        truth: the true labels, (B,) or (B, K); soft labels count by their largest entry.

    Example:
        >>> import torch
        >>> label_accuracy(torch.tensor([3, 1]), torch.tensor([[0.1, 0.9], [0.2, 0.8]]))
        (0.0, 1.0)
        >>> label_accuracy(torch.tensor([2, 5]), torch.tensor([5, 2]))
        (1.0, 1.0)
    """
    guesses, labels = class_indices(predicted).tolist(), class_indices(truth).tolist()
    hits = [guess == label for guess, label in zip(guesses, labels, strict=False)]
    hits += [False] * (len(labels) - len(hits))
    left = Counter(guesses) - Counter(label for label, hit in zip(labels, hits, strict=True) if hit)
    for index, label in enumerate(labels):
        if not hits[index] and left[label]:
            hits[index] = True
            left[label] -= 1
    return tuple(map(float, hits))
