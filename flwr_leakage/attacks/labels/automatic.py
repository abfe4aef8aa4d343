"""The label attack that fits the batch size."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from flwr_leakage.attacks.labels.counts import ClassCounts
from flwr_leakage.attacks.labels.idlg import SignOfGradient
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class AutomaticLabels:
    """iDLG for an update of one sample, class counts for several samples.

    Attributes:
        single: the label attack for one sample.
        batch: the label attack for several samples.
    """

    single: SignOfGradient = field(default_factory=SignOfGradient)
    batch: ClassCounts = field(default_factory=ClassCounts)

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Labels (B,) in ascending order."""
        method = self.single if problem.num_samples == 1 else self.batch
        return method(problem, generator)
