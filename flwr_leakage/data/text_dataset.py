"""Labelled texts as token ids, with the words that the ids stand for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.records import Batch, InputSpec

PADDING = 0
"""The id that fills up short texts."""


@dataclass(frozen=True)
class TextDataset:
    """N labelled texts of up to T tokens.

    Attributes:
        name: the name for tables and records.
        ids: (N, T) int64 token ids, filled up with ``PADDING``.
        labels: (N,) int64, each in 0 … K − 1.
        class_names: K names.
        words: V words; id v stands for ``words[v]``.
        next_token: whether a model learns the next token at each position, instead of the label.

    Raises:
        ValueError: shapes or dtypes that do not fit, an id without a word, or a label without a
            class name.
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
        if self.labels.shape != self.ids.shape[:1] or self.labels.dtype != torch.int64:
            raise ValueError(
                f"labels of {self.name} must be int64 ({len(self.ids)},), got "
                f"{self.labels.dtype} {tuple(self.labels.shape)}."
            )
        for what, values, known in (
            ("ids", self.ids, self.words),
            ("labels", self.labels, self.class_names),
        ):
            outside = values[(values < 0) | (values >= len(known))]
            if len(outside):
                raise ValueError(
                    f"{what} of {self.name} must lie in 0 … {len(known) - 1}, got "
                    f"{outside.unique().tolist()[:5]}."
                )
        _ = self.spec  # this checks the number of words

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def spec(self) -> InputSpec:
        """Return the public facts on the data: length, vocabulary, number of classes, padding."""
        classes = None if self.next_token else len(self.class_names)
        return InputSpec.text(len(self.words), self.ids.shape[1], classes, padding=PADDING)

    def batch(self, indices: Tensor | Sequence[int]) -> Batch:
        """Return the chosen texts; the targets of the next token are the texts themselves."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return Batch(self.ids[chosen], (self.ids if self.next_token else self.labels)[chosen])
