"""How much of an image its gradient determines, whoever attacks, to first order about the truth.

A row of a benchmark in which an attack fails is read in two ways: the gradient does not determine
the image, or the search does not find it. :func:`linearised_limit` tells which. It uses the truth,
and no attack sees it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.problem import pose, simulate_gradient
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, Observation, ThreatModel
from flwr_leakage.spectral.image_prior import ImagePrior

SURPLUS = 4
"""Number of rows of the sketch for each unknown."""


@dataclass(frozen=True)
class Limit:
    """The limit that the linearised gradient sets on an image of N unknowns.

    Attributes:
        unknowns: N.
        told: number of directions that the gradient tells better than the prior does; the rank of
            its map above the noise.
        psnr: of the mean of the posterior, in dB.
    """

    unknowns: int
    told: int
    psnr: float


def linearised_limit(
    network: nn.Module,
    spec: InputSpec,
    batch: Batch,
    seen: Observation,
    noise: Tensor | None = None,
    block: int = 16,
) -> Limit:
    """Return the error of the best estimate if the gradient were linear in the image.

    With x = μ + L s, s ~ N(0, I) and noise of covariance Σ in the gradient, the posterior has the
    precision ``LᵀJᵀΣ⁻¹JL + I``, J at the truth in float64. Its eigenvalues above 2 belong to
    directions that are told. The mean squared error is ``tr L (LᵀJᵀΣ⁻¹JL + I)⁻¹ Lᵀ``. Without
    noise, Σ is float32's rounding. If J has more than ``SURPLUS`` N rows, these are added up with
    random signs into as many groups (count sketch; Charikar, Chen and Farach-Colton 2002), which
    leaves the squares of singular values right to a factor of about (1 ± 1/√``SURPLUS``)².

    Args:
        network: in eval mode.
        spec: shape and normalisation of the image.
        batch: the image (1, C, H, W), normalised, and its label.
        seen: the update that a server sees of it.
        noise: (P,) standard deviations of noise that was added to the update, or ``None``.
        block: number of columns of J that are computed at once.
    """
    problem = pose(GradientMap(network), spec, seen, ThreatModel()).to(torch.float64)
    likelihood = Likelihood.of([problem.gradient], None)
    variances = likelihood.variances(torch.zeros_like(likelihood.observed), 0.0)
    if noise is not None:
        rate = problem.schedule.learning_rate
        variances = torch.maximum(variances, (noise.double() / rate).square())
    prior, truth = ImagePrior.of(spec), Batch(batch.inputs.double(), batch.targets)
    shape = truth.inputs.shape
    count, unknowns = len(variances), shape.numel()
    rows = min(count, SURPLUS * unknowns)
    draw = torch.Generator().manual_seed(0)
    groups = torch.randint(rows, (count,), generator=draw) if rows < count else None
    signs = 2.0 * torch.randint(2, (count,), generator=draw) - 1

    def gradient(inputs: Tensor) -> Tensor:
        found = simulate_gradient(
            problem.gradient_map,
            problem.params,
            problem.buffers,
            problem.schedule,
            Batch(inputs, truth.targets),
        )
        return torch.cat([found[name].reshape(-1) for name in problem.gradient])

    def column(direction: Tensor) -> Tensor:
        change = torch.func.jvp(gradient, (truth.inputs,), (direction,))[1] / variances.sqrt()
        if groups is None:
            return change
        return change.new_zeros(rows).index_add(0, groups, signs * change)

    jacobian = torch.empty(unknowns, rows, dtype=torch.float64)
    for first in range(0, unknowns, block):
        units = torch.eye(unknowns, dtype=torch.float64)[first : first + block]
        directions = prior.push(units.reshape(-1, *shape))
        jacobian[first : first + block] = torch.func.vmap(column)(directions)
    # Squares of the singular values, of a range of 1e15, would leave float64's precision.
    triangle = torch.linalg.qr(jacobian.T, mode="r").R
    del jacobian
    _, values, vectors = torch.linalg.svd(triangle, full_matrices=True)
    values = torch.nn.functional.pad(values, (0, unknowns - len(values)))
    # Posterior covariance of s, pushed to pixels: ‖diag(L) V (S² + I)^−½‖², as L is orthogonal
    # but for the deviations.
    deviations = prior.deviations.expand(shape).reshape(-1, 1)
    errors = (deviations * vectors.T / (values.square() + 1).sqrt()).square().sum()
    psnr = -10 * math.log10(float(errors) / unknowns)
    return Limit(unknowns, int((values > 1).sum()), psnr)
