"""Hold labelled texts as token ids, with the words of the ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.data.image_dataset import check_labels, check_range
from flwr_leakage.records import Batch, InputSpec

PADDING = 0
"""The token id with which texts of fewer than T tokens are filled up."""


@dataclass(frozen=True)
class TextDataset:
    """N labelled texts of up to T tokens, of K classes.

    Attributes:
        name: the name of the dataset, for tables and records.
        ids: (N, T) int64 token ids, filled up with ``PADDING``.
        labels: (N,) int64, each in 0 … K − 1.
        class_names: the names of the K classes.
        words: the V words of the vocabulary; token id v is ``words[v]``.
        next_token: whether a model learns the next token at each position, and not the label.

    Raises:
        ValueError: shapes or dtypes do not fit, a token id has no word, or a label has no class
            name.
    """

    name: str
    ids: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    words: tuple[str, ...]
    next_token: bool = False

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.dtype != torch.int64:
            raise ValueError(
                f"ids of {self.name} must be int64 (N, T), got {self.ids.dtype} "
                f"{tuple(self.ids.shape)}."
            )
        check_labels(self.name, self.labels, len(self.ids), len(self.class_names))
        check_range(f"ids of {self.name}", self.ids, len(self.words))
        _ = self.spec  # making the spec checks the number of words

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def spec(self) -> InputSpec:
        """Return the length, the vocabulary, the number of classes and the padding of the texts."""
        classes = None if self.next_token else len(self.class_names)
        return InputSpec.text(len(self.words), self.ids.shape[1], classes, padding=PADDING)

    def batch(self, indices: Tensor | Sequence[int]) -> Batch:
        """Return the texts with the given indices, as ids (B, T) and targets.

        The targets are the labels (B,), or the ids themselves if a model learns the next token.
        """
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return Batch(self.ids[chosen], (self.ids if self.next_token else self.labels)[chosen])
