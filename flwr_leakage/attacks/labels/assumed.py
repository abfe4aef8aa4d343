"""The labels that an attack assumes for its samples, by the one rule of all attacks."""

from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.labels.counts import ClassCounts
from flwr_leakage.attacks.labels.idlg import SignOfGradient
from flwr_leakage.attacks.labels.nearest import NearestGradient
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.records import Batch


@runtime_checkable
class LabelInference(Protocol):
    """A label attack, which infers the labels of a batch from its update."""

    def __call__(self, problem: Problem, generator: torch.Generator) -> Tensor:
        """Return class indices (B,), in ascending order, for the problem's ``num_samples``."""
        ...


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


@dataclass(frozen=True)
class AssumedTargets:
    """The targets of an attacker's candidates, from which their gradients are computed.

    Attributes:
        values: (B,) int64 class indices, or (B, K) class probabilities in the problem's
            precision (soft labels, granted only); unused zeros if the labels are ``variables``.
        origin: ``granted`` by the threat model, ``inferred`` from the update, or ``variables`` of
            the optimisation, as the inputs are.
    """

    values: Tensor
    origin: Literal["granted", "inferred", "variables"]

    @property
    def may_change(self) -> bool:
        """Return whether a search may try other class indices, as these are inferred."""
        return self.origin == "inferred"


def assume_targets(
    problem: Problem, inference: LabelInference | Literal["joint"], generator: torch.Generator
) -> AssumedTargets:
    """Return the targets that an attack assumes for a problem's B samples.

    If the threat model grants targets, class indices or probabilities, they are used as they are.
    Otherwise class indices are inferred, or left to the optimisation. If several rounds are
    attacked jointly, the latest round's update gives them.

    Args:
        problem: the problem in the precision in which it is attacked.
        inference: the label attack, or ``joint`` for labels that are optimised with the inputs.
        generator: draws the random numbers of the inference.

    Raises:
        ValueError: the inference does not give B class indices.
    """
    like = problem.like
    count, classes = problem.num_samples, problem.spec.num_classes
    granted = problem.known_targets
    if granted is not None:
        precision = like.dtype if granted.is_floating_point() else torch.int64
        return AssumedTargets(granted.to(like.device, precision), "granted")
    if isinstance(inference, str):
        nothing = torch.zeros(count, dtype=torch.int64, device=like.device)
        return AssumedTargets(nothing, "variables")
    found = inference(problem, generator)
    if found.shape != (count,) or found.is_floating_point():
        raise ValueError(
            f"{type(inference).__name__} must infer {count} class indices, got "
            f"{tuple(found.shape)} of {found.dtype}."
        )
    if not 0 <= int(found.min()) <= int(found.max()) < classes:
        raise ValueError(f"inferred labels must lie in [0, {classes}), got {found.tolist()}.")
    return AssumedTargets(found.to(like.device, torch.int64), "inferred")


def answer(inputs: Float[Tensor, "B C H W"], targets: Tensor) -> Batch:
    """Return the batch that an attack answers with, in torch's default precision.

    Args:
        inputs: (B, C, H, W) in the precision of the attack.
        targets: (B,) class indices or (B, K) probabilities.
    """
    precision = torch.get_default_dtype()
    if targets.is_floating_point():
        targets = targets.to(precision)
    return Batch(inputs.detach().to(precision), targets)
