"""A prior of images by their patches, which are flat, smooth, textured, or have an edge."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.spectral.image_prior import NATURAL_CHROMA, OPPONENTS, ImagePrior

SIDE = 4
"""Side of a patch in pixels; patches of smaller images have the image's side."""

STRIDE = 2
"""Number of pixels between patches. With 1 the images were the same, for four times the work."""

BRIGHTNESS = 0.25
"""Standard deviation of the brightness that a patch's pixels share, in pixel values times √C."""

CONTRASTS = (0.003, 0.007, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5)
"""Sizes of contrast: standard deviations of a pixel's grey about its patch's brightness, in pixel
values times √C for C channels."""

COLOURFUL = (0.03, 0.3, 2.0)
"""Variances of colour, in units of :data:`NATURAL_CHROMA`, one for each colour of contrast."""

EXTENTS = ((4.0, 4.0), (2.5, 20.0))
"""Pixels over which correlation falls to 1/e: in both directions of a patch without an edge, and
across and along an edge."""

ANGLES = 4
"""Number of directions of edges."""

SMOOTHNESS = 1.5
"""The power p of the correlation exp(−d^p) at the distance d in these units; 1 is rough, 2 is
smooth."""

PIXEL_ROUNDING = 1 / 255**2 / 12
"""Variance of the rounding of each pixel in an image of 8 bits."""


@dataclass(frozen=True)
class PatchPrior:
    """A mixture of normal distributions of each patch of an image (Zoran and Weiss 2011).

    A patch u, in pixel values about grey, is of one of K kinds with equal probability:
    ``u ~ N(0, Σ_k)``. Σ_k is the covariance of a patch's brightness, plus that of a contrast of
    some size, colour and direction, plus that of rounding. It is a scale mixture (Portilla et al.
    2003), as under a normal law of one size an edge is unlikely and noise in the sky is likely.

    The covariances are formulas; no image is read. Their constants were chosen by the likelihood
    of patches of CIFAR-10's training images.

    Attributes:
        whitening: (K, D, D) W_k with W_kᵀ W_k = Σ_k⁻¹, in double precision, for patches of D
            numbers, channel by channel and row by row.
        log_scales: (K,) log det W_k.
        scale: (C, 1, 1) normalised inputs per pixel value.
        grey: (1, C, H, W) normalised grey.
        index: (N, D) positions of each patch's numbers in a flat image.
    """

    whitening: Tensor
    log_scales: Tensor
    scale: Tensor
    grey: Tensor
    index: Tensor

    @classmethod
    def of(cls, prior: ImagePrior, stride: int = STRIDE) -> "PatchPrior":
        """Return the prior of images with another prior's shape and normalisation.

        Args:
            prior: the other prior, whose spectrum is not used.
            stride: number of pixels between patches, ≥ 1. The last patches end at the border.
        """
        if stride < 1:
            raise ValueError(f"stride must be at least 1, got {stride}.")
        _, channels, height, width = prior.grey.shape
        side = min(SIDE, height, width)
        factors = torch.linalg.cholesky(covariances(channels, side))
        whitening = torch.linalg.inv(factors)
        log_scales = whitening.diagonal(dim1=1, dim2=2).log().sum(1)
        numbers = torch.arange(channels * height * width).reshape(channels, height, width)
        patches = [
            numbers[:, top : top + side, left : left + side].flatten()
            for top in _places(height, side, stride)
            for left in _places(width, side, stride)
        ]
        scale, grey = prior.scale.double(), prior.grey.double()
        return cls(whitening, log_scales, scale, grey, torch.stack(patches))

    def at(self, inputs: Tensor) -> "PatchCost":
        """Return the cost in which each patch has its likeliest kind at some images.

        Args:
            inputs: (B, C, H, W) normalised images.

        Returns:
            The cost, in the inputs' precision. Up to a constant it is nowhere below −2 log of the
            likeliest kinds' density, and equal to it at ``inputs``.
        """
        patches = _taken(((inputs.double() - self.grey) / self.scale).flatten(1), self.index)
        # All kinds at once would take 0.6 GB for an image of 224 × 224.
        squares = [(patches @ root.T).square().sum(-1) for root in self.whitening]
        kinds = (self.log_scales - torch.stack(squares, -1) / 2).argmax(-1)
        return PatchCost(
            self.whitening.to(inputs),
            kinds,
            self.scale.to(inputs),
            self.grey.to(inputs),
            self.index,
        )


class PatchCost:
    """The quadratic form ``λ Σ_n ‖W_k(n) u_n‖²`` of images about grey.

    λ is the number of pixels relative to that of all patches' numbers, as each pixel lies in
    several patches. A product costs ``N D²`` multiplications for each image.
    """

    def __init__(
        self, whitening: Tensor, kinds: Tensor, scale: Tensor, grey: Tensor, index: Tensor
    ) -> None:
        self.whitening, self.kinds = whitening, kinds
        self.precisions = (whitening.mT @ whitening)[kinds]
        self.scale, self.grey, self.index = scale, grey, index
        self.share = grey.numel() / index.numel()

    def product(self, direction: Tensor) -> Tensor:
        """Return Q d, for a normalised direction d (B, C, H, W)."""
        patches = _taken((direction / self.scale).flatten(1), self.index)
        # Products of rows are three times as fast, and the matrices are symmetric.
        products = (patches[..., None, :] @ self.precisions)[..., 0, :]
        return self._returned(self.share * products, direction)

    def __call__(self, inputs: Tensor) -> float:
        """Return the cost of images (B, C, H, W)."""
        about = inputs - self.grey
        return float((about.double() * self.product(about)).sum())

    def noise(self, generator: torch.Generator) -> Tensor:
        """Return a draw of N(0, Q) (B, C, H, W), of which Q⁻¹ is a draw of the prior."""
        shape = (len(self.kinds), *self.index.shape)
        white = torch.randn(shape, generator=generator, dtype=self.whitening.dtype)
        patches = (white[..., None, :] @ self.whitening[self.kinds])[..., 0, :]
        images = self.grey.expand(len(patches), *self.grey.shape[1:])
        return self._returned(math.sqrt(self.share) * patches, images)

    def _returned(self, patches: Tensor, like: Tensor) -> Tensor:
        """Return the images that are the sums of overlapping patches, the transpose of taking."""
        flat = patches.new_zeros(len(patches), like[0].numel())
        flat.index_add_(1, self.index.flatten(), patches.flatten(1))
        return flat.reshape(like.shape) / self.scale


def covariances(channels: int, side: int) -> Tensor:
    """Return Σ_k of every kind (K, D, D), D = channels · side², in float64 and pixel values."""
    rows, columns = torch.meshgrid(*[torch.arange(side).double()] * 2, indexing="ij")
    down = rows.flatten()[:, None] - rows.flatten()
    right = columns.flatten()[:, None] - columns.flatten()
    correlations = [_correlation(down, right, 0.0, EXTENTS[0])]
    for angle in range(ANGLES):
        correlations.append(_correlation(down, right, math.pi * angle / ANGLES, EXTENTS[1]))
    common = torch.ones(side**2, side**2, dtype=torch.float64)
    brightness = torch.kron(_colours(channels, 1.0), BRIGHTNESS**2 * common)
    rounding = PIXEL_ROUNDING * torch.eye(channels * side**2, dtype=torch.float64)
    found = []
    for contrast in CONTRASTS:
        for colourful in COLOURFUL if channels == 3 else (1.0,):
            colours = contrast**2 * _colours(channels, colourful)
            for correlation in correlations:
                found.append(brightness + torch.kron(colours, correlation) + rounding)
    return torch.stack(found)


def _correlation(down: Tensor, right: Tensor, angle: float, extents: Sequence[float]) -> Tensor:
    across = (right * math.cos(angle) + down * math.sin(angle)) / extents[0]
    along = (down * math.cos(angle) - right * math.sin(angle)) / extents[1]
    return (-torch.hypot(across, along).pow(SMOOTHNESS)).exp()


def _colours(channels: int, colourful: float) -> Tensor:
    """Return the covariance of the channels; unless they are three, they are uncorrelated."""
    if channels != 3:
        return torch.eye(channels, dtype=torch.float64)
    axes = torch.nn.functional.normalize(torch.tensor(OPPONENTS, dtype=torch.float64))
    shares = [1.0, *(colourful * chroma for chroma in NATURAL_CHROMA)]
    return axes.T @ torch.diag(torch.tensor(shares, dtype=torch.float64)) @ axes


def _places(size: int, side: int, stride: int) -> list[int]:
    """Return the positions at which patches begin."""
    last = size - side
    return sorted({*range(0, last, stride), last})


def _taken(flat: Tensor, index: Tensor) -> Tensor:
    """Return the patches (B, N, D) of flat images (B, C·H·W)."""
    return flat.index_select(1, index.flatten()).reshape(len(flat), *index.shape)
