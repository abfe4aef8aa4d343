"""The weighted mean of several attacks' candidates: errors that differ average out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flwr_leakage.attacks.evidence import Evidence, Judgement
from flwr_leakage.records import Batch

LEAST = 0.3
"""Weight, in units of the most likely candidate's, from which another one counts: with less, a mean
gains 1 dB at most, and loses more where the weight is wrong."""

NOISY = 2.0
"""Misfit of the most likely candidate below which little but noise is left."""

WALL = 2.5
"""Energy of each equation by which a mean may else be less likely: with other masks or maxima than
the samples', energies hardly tell which of two solutions is the better one."""

CLOSE = 1e-2
"""Root mean square of two candidates' difference, in pixel values, below which both are around one
solution, and there is no wall between them."""

FORBIDDEN = 1e12
"""Cost of pairing samples of different labels, far above any squared distance of images."""


@dataclass(frozen=True)
class Candidate:
    """What an attack found, by name, and how :class:`Evidence` judges it."""

    name: str
    batch: Batch
    judged: Judgement

    @property
    def energy(self) -> float:
        """−2 log posterior up to a constant."""
        return self.judged.energy

    def weight(self, least: float, evidence: Evidence) -> float:
        """In units of that of a candidate of the least energy: the inverse of the variance.

        With D equations of one unknown variance v, the energy is D log v up to a constant.
        """
        return math.exp((least - self.energy) / evidence.equations)


@dataclass(frozen=True)
class Fusion:
    """A mean of candidates.

    Attributes:
        batch: its samples, in the order of the most likely candidate.
        judged: by the evidence.
        weights: of each candidate's name; they sum to 1.
    """

    batch: Batch
    judged: Judgement
    weights: dict[str, float]

    def __str__(self) -> str:
        """What it is of."""
        return "of " + ", ".join(f"{weight:.2f} {name}" for name, weight in self.weights.items())


def fuse(candidates: Sequence[Candidate], evidence: Evidence) -> Fusion | None:
    """The mean that has the least squared error, if the candidates' errors are independent.

    Weights are inverse variances. Candidates are added one after another, most likely first. One is
    left out if its labels are others, or if the mean with it is not more likely than without it:
    around one solution the energy is convex, between two solutions there is a wall. Of two that
    count, either may be the worse one. With independent errors, their mean is better than both if
    squared errors differ by less than three times. So a wall below :data:`WALL` is no reason
    against it, unless little but noise is left, or candidates are close to each other, where
    energies are precise. Where nothing but rounding is left of a pruned update, candidates differ
    in what is likely alone, and the likeliest is the answer. What is further from
    the update than no sample at all explains nothing, and is no part of a mean, nor is such a mean
    an answer.

    Returns:
        ``None`` where nothing can be added to the most likely candidate.
    """
    first, *others = sorted(candidates, key=lambda candidate: candidate.energy)
    if not evidence.is_noised and first.judged.misfit <= 1:
        return None
    others = [each for each in others if evidence.is_noised or each.judged.distance < 1]
    parts = [(first, first.batch.inputs.double(), 1.0)]
    fusion: Fusion | None = None
    for other in others:
        weight = other.weight(first.energy, evidence)
        if not weight >= LEAST:
            break
        mean = _mean(parts)
        inputs = _in_order(other.batch, Batch(mean, first.batch.targets))
        if inputs is None:
            continue
        trial = [*parts, (other, inputs, weight)]
        batch = Batch(_mean(trial).to(first.batch.inputs), first.batch.targets)
        judged = evidence.judge(batch)
        total = sum(weight for *_, weight in trial)
        least = fusion.judged.energy if fusion else first.energy
        if first.judged.misfit > NOISY and _distance(inputs, mean, evidence) > CLOSE:
            least = max(least, first.energy + WALL * evidence.equations)
        explains = evidence.is_noised or judged.distance < max(1.0, first.judged.distance)
        if explains and judged.energy < least:
            weights = {part.name: weight / total for part, _, weight in trial}
            parts, fusion = trial, Fusion(batch, judged, weights)
    return fusion


def _mean(parts: Sequence[tuple[Candidate, Tensor, float]]) -> Tensor:
    total = sum(weight for *_, weight in parts)
    return torch.stack([inputs * (weight / total) for _, inputs, weight in parts]).sum(0)


def _distance(one: Tensor, other: Tensor, evidence: Evidence) -> float:
    """Root mean square of the difference of inputs, in pixel values."""
    pixels = evidence.problem.spec.denormalize
    return float((pixels(one) - pixels(other)).square().mean().sqrt())


def _in_order(found: Batch, model: Batch) -> Tensor | None:
    """The inputs in the order of the nearest samples of the same labels; ``None`` of others."""
    if found.targets.shape != model.targets.shape:
        return None
    inputs = found.inputs.to(model.inputs)
    number = len(model)
    differ = (model.targets[:, None] != found.targets[None]).reshape(number, number, -1).any(-1)
    costs = torch.cdist(model.inputs.flatten(1), inputs.flatten(1)).square() + FORBIDDEN * differ
    _, order = linear_sum_assignment(costs.cpu().numpy())
    order = torch.as_tensor(order)
    return inputs[order] if torch.equal(found.targets[order], model.targets) else None
