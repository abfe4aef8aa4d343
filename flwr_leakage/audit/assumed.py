"""Describe the training that an attack on a client assumes."""

from functools import partial
from typing import NamedTuple

from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.normalization import BatchNormMode
from flwr_leakage.records import InputSpec, LocalSchedule


class Inputs(NamedTuple):
    """The inputs and the loss that an attack on a client assumes.

    Attributes:
        spec: shapes, classes and normalisation of the inputs.
        batch_norm: the mode of BatchNorm in the client's training.
        label_smoothing: torch's ``label_smoothing`` of the client's cross-entropy, in [0, 1]; at 0
            the loss is that of the audit's gradient map.
    """

    spec: InputSpec
    batch_norm: BatchNormMode
    label_smoothing: float = 0.0

    def map_of(self, gradient_map: GradientMap) -> GradientMap:
        """Return the audit's gradient map as these inputs need it."""
        mapped = gradient_map.with_batch_norm(self.batch_norm)
        if not self.label_smoothing:
            return mapped
        return mapped.with_loss(partial(F.cross_entropy, label_smoothing=self.label_smoothing))


class Assumed(NamedTuple):
    """The local schedule, the input spec, the BatchNorm mode and the label smoothing that an attack
    on a client assumes, and whether the audit was given another loss than the mean cross-entropy.
    """

    schedule: LocalSchedule
    spec: InputSpec
    batch_norm: BatchNormMode
    label_smoothing: float = 0.0
    has_own_loss: bool = False

    @property
    def inputs(self) -> Inputs:
        """Return the assumed inputs and loss, without the schedule."""
        return Inputs(self.spec, self.batch_norm, self.label_smoothing)
