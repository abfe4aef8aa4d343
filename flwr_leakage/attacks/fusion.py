"""The weighted mean of several attacks' candidates, in which independent errors average out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flwr_leakage.attacks.evidence import Evidence, Judgement
from flwr_leakage.records import Batch


@dataclass(frozen=True)
class Candidate:
    """The batch that an attack found, with the name of the attack and the evidence's judgement."""

    name: str
    batch: Batch
    judged: Judgement

    @property
    def energy(self) -> float:
        """−2 log posterior up to a constant."""
        return self.judged.energy

    def weight(self, least: float, evidence: Evidence) -> float:
        """Return the inverse variance of this candidate, relative to one of energy ``least``.

        With D equations of one unknown variance v, the energy is D log v up to a constant.
        """
        return math.exp((least - self.energy) / evidence.equations)


@dataclass(frozen=True)
class Fusion:
    """A weighted mean of candidates.

    Attributes:
        batch: the samples of the mean, in the order of the most likely candidate.
        judged: the evidence's judgement of the mean.
        weights: the weight of each candidate, by name; they sum to 1.
    """

    batch: Batch
    judged: Judgement
    weights: dict[str, float]

    def __str__(self) -> str:
        """Return the weights and names of the candidates in words."""
        return "of " + ", ".join(f"{weight:.2f} {name}" for name, weight in self.weights.items())


def fuse(
    candidates: Sequence[Candidate],
    evidence: Evidence,
    least_weight: float = 0.3,
    noise_misfit: float = 2.0,
    wall: float = 2.5,
    close: float = 1e-2,
) -> Fusion | None:
    """Return the mean of least squared error if candidates' errors are independent, or None.

    Weights are inverse variances. Candidates are added one after another, the most likely first. A
    candidate is left out if its labels differ, or if the mean with it is less likely than without
    it: around one solution the energy is convex, and between two solutions there is a wall. Either
    of two candidates may be the worse one. With independent errors, their mean is better than both
    if their squared errors differ by a factor below three. So the mean may cross a low wall, unless
    energies are precise: the residual is mostly noise, or the candidates are close to each other.
    If a pruned update is met to rounding, candidates differ only in their prior probability, and
    the most likely one is the answer. A candidate or a mean that is further from the update than no
    sample at all explains nothing, and is left out.

    Args:
        candidates: the candidates, at least one.
        evidence: judges the candidates and their means.
        least_weight: least weight relative to the most likely candidate. With less, a mean gains at
            most 1 dB, and loses more if the weight is wrong.
        noise_misfit: misfit of the most likely candidate up to which the residual is mostly noise.
        wall: energy per equation by which a mean may be less likely than the most likely candidate.
            With other masks or maxima than the samples', energies hardly show which of two
            solutions is better (section "The choice" of the results page portfolio.md).
        close: root mean square of two candidates' difference, in pixel values, up to which both lie
            around one solution.

    Returns:
        The mean, or ``None`` if nothing can be added to the most likely candidate.
    """
    first, *others = sorted(candidates, key=lambda candidate: candidate.energy)
    if not evidence.is_noised and first.judged.misfit <= 1:
        return None
    others = [each for each in others if evidence.is_noised or each.judged.distance < 1]
    parts = [(first, first.batch.inputs.double(), 1.0)]
    fusion: Fusion | None = None
    for other in others:
        weight = other.weight(first.energy, evidence)
        if not weight >= least_weight:
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
        if first.judged.misfit > noise_misfit and _distance(inputs, mean, evidence) > close:
            least = max(least, first.energy + wall * evidence.equations)
        explains = evidence.is_noised or judged.distance < max(1.0, first.judged.distance)
        if explains and judged.energy < least:
            weights = {part.name: weight / total for part, _, weight in trial}
            parts, fusion = trial, Fusion(batch, judged, weights)
    return fusion


def _mean(parts: Sequence[tuple[Candidate, Tensor, float]]) -> Tensor:
    total = sum(weight for *_, weight in parts)
    return torch.stack([inputs * (weight / total) for _, inputs, weight in parts]).sum(0)


def _distance(one: Tensor, other: Tensor, evidence: Evidence) -> float:
    """Return the root mean square of the difference of inputs, in pixel values."""
    pixels = evidence.problem.spec.denormalize
    return float((pixels(one) - pixels(other)).square().mean().sqrt())


def _in_order(found: Batch, model: Batch) -> Tensor | None:
    """Return the inputs in the order of the model's nearest samples, or None if labels differ."""
    if found.targets.shape != model.targets.shape:
        return None
    inputs = found.inputs.to(model.inputs)
    number = len(model)
    differ = (model.targets[:, None] != found.targets[None]).reshape(number, number, -1).any(-1)
    # A pair of different labels costs more than any squared distance of images.
    costs = torch.cdist(model.inputs.flatten(1), inputs.flatten(1)).square() + 1e12 * differ
    _, order = linear_sum_assignment(costs.cpu().numpy())
    order = torch.as_tensor(order)
    return inputs[order] if torch.equal(found.targets[order], model.targets) else None
