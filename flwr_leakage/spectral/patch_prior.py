"""A prior of images by their patches: flat, smooth, textured, or with an edge."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.spectral.image_prior import NATURAL_CHROMA, OPPONENTS, ImagePrior

SIDE = 4
"""Of a patch, in pixels; smaller where images are."""

STRIDE = 2
"""Between patches. At 1 the same images come out, for four times the work."""

BRIGHTNESS = 0.25
"""Standard deviation of what a patch has in common, in pixel values times √C."""

CONTRASTS = (0.003, 0.007, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5)
"""Standard deviations about that, of one kind of patch each."""

COLOURFUL = (0.03, 0.3, 2.0)
"""How colourful contrasts are, in units of :data:`NATURAL_CHROMA`, of one kind of patch each."""

EXTENTS = ((4.0, 4.0), (2.5, 20.0))
"""Pixels over which correlation falls to 1/e, of a patch without direction, and across and along
an edge."""

ANGLES = 4
"""Directions of edges."""

SMOOTHNESS = 1.5
"""p of the correlation exp(−d^p) at the distance d in these units; 1 is rough, 2 is smooth."""

ROUNDING = 1 / 255**2 / 12
"""Variance of each pixel of an image of 8 bits."""


@dataclass(frozen=True)
class PatchPrior:
    """A mixture of normal distributions of each patch of an image (Zoran and Weiss 2011).

    A patch u, in pixel values about grey, is of one of K kinds, all alike probable:
    ``u ~ N(0, Σ_k)``, where Σ_k is a patch's brightness, plus a contrast of some size, colour and
    direction, plus rounding. It is a scale mixture (Portilla et al. 2003): a normal law of
    one size takes an edge for unlikely and noise in the sky for likely.

    The covariances are formulas; no image is read. Their constants were chosen by the likelihood
    of patches of CIFAR-10's training images.

    Attributes:
        whitening: W_k with W_kᵀ W_k = Σ_k⁻¹, (K, D, D), in double precision, for patches of D
            numbers: channel by channel, row by row.
        log_scales: log det W_k, (K,).
        scale: normalised inputs per pixel value (C, 1, 1).
        grey: (1, C, H, W), normalised.
        index: positions of each patch's numbers in a flat image (N, D).
    """

    whitening: Tensor
    log_scales: Tensor
    scale: Tensor
    grey: Tensor
    index: Tensor

    @classmethod
    def of(cls, prior: ImagePrior, stride: int = STRIDE) -> "PatchPrior":
        """For images of a prior's shape and normalisation.

        Args:
            prior: its spectrum is not used.
            stride: pixels between patches, ≥ 1. The last ones end where the image does.
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
        """The cost where each patch is of the kind that it most likely is.

        Args:
            inputs: (B, C, H, W), normalised.

        Returns:
            In the inputs' precision. Up to a constant it is nowhere below −2 log of the likeliest
            kinds' density, and equal to it here.
        """
        patches = _taken(((inputs.double() - self.grey) / self.scale).flatten(1), self.index)
        # Kind by kind: all at once would take 0.6 GB of an image of 224 × 224.
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
    """``λ Σ_n ‖W_k(n) u_n‖²``, a quadratic form of images about grey.

    λ is pixels over numbers of all patches, as each pixel lies in several. Products cost
    ``N D²`` multiplications an image.
    """

    def __init__(
        self, whitening: Tensor, kinds: Tensor, scale: Tensor, grey: Tensor, index: Tensor
    ) -> None:
        self.whitening, self.kinds = whitening, kinds
        self.precisions = (whitening.mT @ whitening)[kinds]
        self.scale, self.grey, self.index = scale, grey, index
        self.share = grey.numel() / index.numel()

    def product(self, direction: Tensor) -> Tensor:
        """Q d, of a direction (B, C, H, W), normalised."""
        patches = _taken((direction / self.scale).flatten(1), self.index)
        # As rows, which is three times as fast; the matrices are symmetric.
        products = (patches[..., None, :] @ self.precisions)[..., 0, :]
        return self._returned(self.share * products, direction)

    def __call__(self, inputs: Tensor) -> float:
        """The cost of images (B, C, H, W)."""
        about = inputs - self.grey
        return float((about.double() * self.product(about)).sum())

    def noise(self, generator: torch.Generator) -> Tensor:
        """A draw of N(0, Q), (B, C, H, W): Q⁻¹ of it is a draw of the prior."""
        shape = (len(self.kinds), *self.index.shape)
        white = torch.randn(shape, generator=generator, dtype=self.whitening.dtype)
        patches = (white[..., None, :] @ self.whitening[self.kinds])[..., 0, :]
        images = self.grey.expand(len(patches), *self.grey.shape[1:])
        return self._returned(math.sqrt(self.share) * patches, images)

    def _returned(self, patches: Tensor, like: Tensor) -> Tensor:
        """The transpose of taking patches: their sum, where they overlap."""
        flat = patches.new_zeros(len(patches), like[0].numel())
        flat.index_add_(1, self.index.flatten(), patches.flatten(1))
        return flat.reshape(like.shape) / self.scale


def covariances(channels: int, side: int) -> Tensor:
    """Σ_k of every kind (K, D, D), D = channels · side², in double precision and pixel values."""
    rows, columns = torch.meshgrid(*[torch.arange(side).double()] * 2, indexing="ij")
    down = rows.flatten()[:, None] - rows.flatten()
    right = columns.flatten()[:, None] - columns.flatten()
    correlations = [_correlation(down, right, 0.0, EXTENTS[0])]
    for angle in range(ANGLES):
        correlations.append(_correlation(down, right, math.pi * angle / ANGLES, EXTENTS[1]))
    common = torch.ones(side**2, side**2, dtype=torch.float64)
    brightness = torch.kron(_colours(channels, 1.0), BRIGHTNESS**2 * common)
    rounding = ROUNDING * torch.eye(channels * side**2, dtype=torch.float64)
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
    """The covariance of the channels: of all that are not three, none."""
    if channels != 3:
        return torch.eye(channels, dtype=torch.float64)
    axes = torch.nn.functional.normalize(torch.tensor(OPPONENTS, dtype=torch.float64))
    shares = [1.0, *(colourful * chroma for chroma in NATURAL_CHROMA)]
    return axes.T @ torch.diag(torch.tensor(shares, dtype=torch.float64)) @ axes


def _places(size: int, side: int, stride: int) -> list[int]:
    """Where patches begin."""
    last = size - side
    return sorted({*range(0, last, stride), last})


def _taken(flat: Tensor, index: Tensor) -> Tensor:
    """Patches (B, N, D) of flat images (B, C·H·W)."""
    return flat.index_select(1, index.flatten()).reshape(len(flat), *index.shape)
