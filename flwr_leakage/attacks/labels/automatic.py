"""The label attack that depends on the batch size."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from flwr_leakage.attacks.labels.counts import ClassCounts
from flwr_leakage.attacks.labels.idlg import SignOfGradient
from flwr_leakage.attacks.labels.nearest import NearestGradient
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class AutomaticLabels:
    """The label attack that uses iDLG for one sample, and class counts for several samples.

    Attributes:
        single: the label attack for one sample.
        otherwise: the label attack for one sample if no trained layer gives the logits.
        batch: the label attack for several samples.
    """

    single: SignOfGradient = field(default_factory=SignOfGradient)
    otherwise: NearestGradient = field(default_factory=NearestGradient)
    batch: ClassCounts = field(default_factory=ClassCounts)

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the labels (B,) in ascending order."""
        if problem.num_samples > 1:
            return self.batch(problem, generator)
        try:
            return self.single(problem, generator)
        except ValueError:
            return self.otherwise(problem, generator)
