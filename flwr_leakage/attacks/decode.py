"""Decode MixUp and InstaHide encodings, the second step of an attack on clients that use these.

The first step, a gradient inversion, recovers encodings, which are mixtures of private images. A
client draws new mixtures in each of T epochs, so that the server collects T encodings of every
image. The attacker is told which images each encoding mixes, and with which coefficients, so that
the result is an upper bound on the leakage (Huang et al. 2021, section 5).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, minimum_spanning_tree
from torch import Tensor

from flwr_leakage.records import InputSpec


def decode_mixup(
    encodings: Float[Tensor, "M C H W"], weights: Float[Tensor, "M n"]
) -> Float[Tensor, "n C H W"]:
    """Return the n images X that minimise ‖W X − E‖²; if W lacks rank, those of least norm.

    E are the M recovered ``encodings`` of all epochs. Row m of the ``weights`` W holds the
    coefficients of the n images in encoding m.
    """
    _check(encodings, weights)
    # ``gelsd`` is chosen, as torch's default driver of LAPACK is wrong for a W without full rank.
    solution = torch.linalg.lstsq(
        weights.double().cpu(), encodings.double().cpu().flatten(1), driver="gelsd"
    ).solution
    return solution.reshape(-1, *encodings.shape[1:]).to(encodings.dtype)


@dataclass(frozen=True)
class InstaHideDecoding:
    """Images that were decoded from InstaHide's encodings, which have random signs.

    Attributes:
        images: the decoded images X (n, C, H, W), normalised as the network takes them.
        residual: root mean square of |W X| − |E|, with the encodings E and the matrix W of their
            coefficients. The attacker can compute it.
        starts: number of random starts of the regression for each pixel.
    """

    images: Float[Tensor, "n C H W"]
    residual: float
    starts: int


def decode_instahide(
    encodings: Float[Tensor, "M C H W"],
    weights: Float[Tensor, "M n"],
    spec: InputSpec,
    generator: torch.Generator,
    num_starts: int = 24,
) -> InstaHideDecoding:
    """Return the n images X that minimise ‖ |W X| − |E| ‖², solved pixel by pixel.

    InstaHide flips the sign of each pixel at random, which leaves only |E| (Carlini et al. 2020,
    section 4.4). For each pixel, with values x (n,) in the images and |e| (M,) in the encodings,
    the regression alternates s ← sign(W x) and x ← W⁺(s · |e|) from random starts. These steps
    never increase the residual. The result with the least residual is kept.

    |W x| is the same for x and −x, so that the sign of each pixel is still open. Neighbouring
    pixels are similar in most natural images. So signs are carried along the spanning tree of
    largest |correlation| between neighbouring pixels. The one sign that is left for all images is
    chosen so that the pixels are, in sum, nearer to their valid range.

    Args:
        encodings: the M recovered encodings E of all epochs, with flipped signs.
        weights: the matrix W, whose row m holds the coefficients of the n images in encoding m.
        spec: the public normalisation, which tells the valid range of inputs.
        generator: the generator of the random starts.
        num_starts: number of random starts for each pixel, ≥ 1.
    """
    _check(encodings, weights)
    if num_starts < 1:
        raise ValueError(f"num_starts must be at least 1, got {num_starts}.")
    matrix = weights.double().cpu()
    magnitudes = encodings.double().cpu().flatten(1).abs()
    inverse = torch.linalg.pinv(matrix)
    best = torch.zeros(matrix.shape[1], magnitudes.shape[1], dtype=torch.float64)
    lowest = torch.full((magnitudes.shape[1],), math.inf, dtype=torch.float64)
    for _ in range(num_starts):
        candidate = torch.randn(best.shape, generator=generator, dtype=torch.float64)
        signs = (matrix @ candidate).sign()
        for _ in range(60):
            candidate = inverse @ (signs * magnitudes)
            updated = (matrix @ candidate).sign()
            if torch.equal(updated, signs):
                break
            signs = updated
        loss = ((matrix @ candidate).abs() - magnitudes).square().mean(0)
        better = loss < lowest
        best = torch.where(better, candidate, best)
        lowest = torch.where(better, loss, lowest)
    shape = tuple(encodings.shape[1:])
    images = (best * consistent_signs(best, shape)).reshape(-1, *shape)
    if _outside(-images, spec) < _outside(images, spec):
        images = -images
    residual = float(lowest.mean().sqrt())
    return InstaHideDecoding(images.to(encodings.dtype), residual, num_starts)


def consistent_signs(pixels: Float[Tensor, "n D"], shape: tuple[int, ...]) -> Float[Tensor, " D"]:
    """Return a sign ±1 for each of D pixels, with which neighbours correlate positively.

    Column p of ``pixels`` (n, D) holds pixel p of each of n images, up to one sign per column.
    Neighbours are compared over the images, along the spanning tree of largest |correlation|. They
    are next to each other in height or width of the shape (C, H, W), with D = C·H·W, or are values
    of successive channels at the same place. The first pixel has the sign 1.
    """
    grid = np.arange(pixels.shape[1]).reshape(shape)
    pairs = [
        np.stack([grid[:-1].ravel(), grid[1:].ravel()]),
        np.stack([grid[:, :-1].ravel(), grid[:, 1:].ravel()]),
        np.stack([grid[:, :, :-1].ravel(), grid[:, :, 1:].ravel()]),
    ]
    first, second = np.concatenate(pairs, axis=1)
    norms = pixels.norm(dim=0).clamp_min(torch.finfo(pixels.dtype).tiny)
    unit = (pixels / norms).numpy()
    correlation = (unit[:, first] * unit[:, second]).sum(0)
    # Costs must be positive, as SciPy treats a zero as a missing edge.
    cost = 1 + 1e-6 - np.abs(correlation).clip(max=1)
    size = pixels.shape[1]
    tree = minimum_spanning_tree(coo_array((cost, (first, second)), shape=(size, size)))
    order, parents = breadth_first_order(tree, 0, directed=False)
    signs = np.ones(size)
    for pixel in order[1:]:
        parent = parents[pixel]
        agrees = unit[:, pixel] @ unit[:, parent] >= 0
        signs[pixel] = signs[parent] if agrees else -signs[parent]
    return torch.from_numpy(signs).to(pixels.dtype)


def _outside(images: Tensor, spec: InputSpec) -> float:
    """Return the sum of distances of all values of normalised images from the valid range."""
    return float((images - spec.clamp(images)).abs().sum())


def _check(encodings: Tensor, weights: Tensor) -> None:
    if len(encodings) != len(weights) or len(encodings) == 0:
        raise ValueError(
            f"encodings and weights must have the same positive number of rows, got "
            f"{len(encodings)} and {len(weights)}."
        )
