"""Determine the standard deviation of the noise on a client's update: as given, or estimated if the
noise is isotropic Gaussian.
"""

import math

import torch
from jaxtyping import Float
from scipy.special import gammainc, gammaincc
from torch import Tensor

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.scores.base import first_notes, notes_where

NO_NOISE = "no noise: there is no bound, a perfect attacker recovers this sample exactly"
SEVERAL = "no bound: over several local steps a sample's part in the update is of first order only"
_DEVIATIONS = 6.0
"""The largest number of standard errors by which the kurtosis of a perturbation δ, or its
correlation with gradients, may differ from its value for independent Gaussian noise. A normally
distributed number deviates by more with a probability of 2e-9."""
_CHANCE = 1e-9
"""The least probability, for Gaussian noise, of a mean square as extreme as that of a perturbation
δ, at which δ counts as Gaussian noise. A deviation by six standard errors is about as rare."""


def check_noise_std(noise_std: float | None) -> None:
    """Raise ``ValueError`` unless ``noise_std`` is ``None``, or finite and ≥ 0."""
    if noise_std is not None and not 0 <= noise_std < math.inf:
        raise ValueError(f"noise_std must be None, or finite and ≥ 0, got {noise_std}.")


def noise_level(
    problem: SampleProblem, noise_std: float | None
) -> tuple[Float[Tensor, " S"], list[str]]:
    """Return the standard deviation σᵢ (S,) of the noise on each sample's gradient, NaN where the
    noise bounds no attacker's error; and for each sample the reason for NaN, or an empty text.

    An attacker who knows all samples but i sees its gradient plus noise of standard deviation σᵢ =
    σ/wᵢ, with wᵢ the sample's weight in the pseudo-gradient and σ the standard deviation of the
    noise on that. An attacker who knows less does no better. There is no bound after several steps,
    as the update is a weighted sum of samples' gradients only to first order then. ``noise_std`` is
    σ; with ``None`` it is the root mean square of the defense's perturbation, if this looks like
    independent Gaussian noise of one size. Pruning, clipping, Laplacian noise and encodings do not.
    """
    if not problem.single_step:
        return torch.full((len(problem),), torch.nan, dtype=torch.float64), [SEVERAL] * len(problem)
    weights = torch.where(problem.samples.weights > 0, problem.samples.weights, 1.0).double()
    if noise_std is not None:
        level = noise_std / weights
        return torch.where(level > 0, level, torch.nan), notes_where(level == 0, NO_NOISE)
    level = _trained(problem, problem.deltas).square().mean(1).sqrt()
    reason = "" if bool(problem.undefended.all()) else _not_gaussian(problem)
    notes = first_notes(notes_where(problem.undefended, NO_NOISE), [reason] * len(problem))
    known = torch.tensor([not note for note in notes])
    return torch.where(known, level, torch.nan), notes


def _trained(problem: SampleProblem, vectors: Float[Tensor, "S P"]) -> Float[Tensor, "S Q"]:
    """Return those columns of ``vectors`` that belong to the Q trained of all P parameters. The
    updates of the others carry no noise.
    """
    trained = problem.samples.gradient_map.trained
    kept = [
        torch.full((value.numel(),), name in trained)
        for name, value in problem.samples.params.items()
    ]
    return vectors.double()[:, torch.cat(kept)]


def _not_gaussian(problem: SampleProblem) -> str:
    """Return why the defense's perturbation is not independent Gaussian noise of one size; an empty
    text if it may be. The tests are on its kurtosis, its mean square in each tensor, and its
    correlation with samples' gradients.
    """
    delta = _trained(problem, problem.deltas)[0]
    standard = delta / delta.square().mean().sqrt()
    count = len(standard)
    kurtosis = float((standard**4).mean())
    found = ""
    if abs(kurtosis - 3) > _DEVIATIONS * math.sqrt(96 / count):
        found = f"its kurtosis is {kurtosis:.2g}, that of Gaussian noise 3"
    trained = problem.samples.gradient_map.trained
    params = {name: p for name, p in problem.samples.params.items() if name in trained}
    sizes = [value.numel() for value in params.values()]
    for name, part in zip(params, standard.split(sizes), strict=True):
        # For Gaussian noise, the sum of squares is χ² distributed. A sum that is too unlikely in
        # either direction shows that the noise differs between tensors.
        half, total = len(part) / 2, float((part**2).sum()) / 2
        if min(float(gammainc(half, total)), float(gammaincc(half, total))) < _CHANCE:
            found = found or f"its mean square differs from tensor to tensor ({name})"
    gradients = _trained(problem, problem.gradients)
    lengths = gradients.norm(dim=1).clamp_min(1e-300)
    along = (gradients @ standard).abs() / lengths
    if float(along.max()) > _DEVIATIONS:
        found = "it depends on the gradient, as pruning and clipping do"
    return found and f"δ is no independent Gaussian noise of one size: {found}; name noise_std"
