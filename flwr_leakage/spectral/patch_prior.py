"""Define a prior of images by their patches, which are flat, smooth, textured, or have an edge."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.spectral.image_prior import NATURAL_CHROMA, OPPONENTS, ImagePrior

SIDE = 4
"""Side of a patch in pixels; patches of smaller images have the image's side. The time of a product
of images with the matrix of :class:`PatchCost` grows with the side's fourth power."""

STRIDE = 2
"""Number of pixels from one patch to the next. With 1, reconstructed images were the same, for four
times the work; no results are kept."""

BRIGHTNESS = 0.25
"""Standard deviation of the brightness that all pixels of a patch share, for pixels in [0, 1],
times √C for C channels. It is that of :class:`ImagePrior`."""

CONTRASTS = (0.003, 0.007, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5)
"""Sizes of contrast: standard deviations of a pixel's grey about its patch's brightness, for pixels
in [0, 1], times √C for C channels. The mixture of :class:`PatchPrior` has a component for each
size, colour and direction."""

COLOURFUL = (0.03, 0.3, 2.0)
"""Variances of the colour differences within a patch, as multiples of :data:`NATURAL_CHROMA`, from
grey to colourful. The mixture of :class:`PatchPrior` has a component for each value, contrast and
direction."""

EXTENTS = ((4.0, 4.0), (2.5, 20.0))
"""Distances in pixels over which the correlation of two pixels falls to 1/e. The first pair holds
for a patch without an edge, in both directions, and the second across and along an edge. They were
chosen by the likelihood of patches of CIFAR-10's training images."""

ANGLES = 4
"""Number of directions of edges, equally spaced. The mixture of :class:`PatchPrior` has a component
for each direction, contrast and colour."""

SMOOTHNESS = 1.5
"""The power p of the correlation exp(−d^p) of two pixels of a patch, at their distance d in units
of :data:`EXTENTS`. With 1, likely patches are rough, with 2 smooth."""

PIXEL_ROUNDING = 1 / 255**2 / 12
"""Variance of the rounding error of a pixel in [0, 1] of an image of 8 bits."""


@dataclass(frozen=True)
class PatchPrior:
    """A prior of images under which each patch has a mixture of K normal laws.

    The idea is that of Zoran and Weiss (2011). A patch u, with pixels in [0, 1] minus grey, is of
    one of K kinds with equal probability: ``u ~ N(0, Σ_k)``. Σ_k is the covariance of a patch's
    brightness, plus that of a contrast of some size, colour and direction, plus that of rounding.
    Kinds differ in the size of contrast, too (a scale mixture, Portilla et al. 2003), as under a
    normal law of one size an edge would be unlikely and noise in the sky likely.

    The covariances are formulas, with constants chosen by the likelihood of patches of CIFAR-10's
    training images.

    Attributes:
        whitening: (K, D, D) matrices W_k with W_kᵀ W_k = Σ_k⁻¹, in double precision, for patches of
            D numbers, channel by channel and row by row.
        log_scales: (K,) log det W_k.
        scale: (C, 1, 1) factor from pixels in [0, 1] to normalised inputs, for each channel.
        grey: (1, C, H, W) a grey image, normalised.
        index: (N, D) for each of N patches of an image, the indices of its numbers in the flattened
            image.
    """

    whitening: Tensor
    log_scales: Tensor
    scale: Tensor
    grey: Tensor
    index: Tensor

    @classmethod
    def of(cls, prior: ImagePrior, stride: int = STRIDE) -> "PatchPrior":
        """Return the prior of patches for images of another prior's shape and normalisation.
        ``stride`` ≥ 1 is the number of pixels from one patch to the next; the last patches end at
        the border.
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
        """Return a quadratic cost of images (B, C, H, W): −2 log of the prior's density, up to a
        constant, if each patch has that kind (flat, smooth, textured or with an edge) which is
        likeliest for it in the normalised ``inputs``. It is an upper bound of the cost under each
        image's own likeliest kinds, and equal to it at ``inputs``.
        """
        patches = _taken(((inputs.double() - self.grey) / self.scale).flatten(1), self.index)
        # Patches are whitened for one kind after another: those of an image of 224 × 224 pixels
        # would take 0.6 GB for all kinds at once.
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
    """The quadratic cost ``xᵀ Q x = λ Σ_n ‖W_k(n) u_n‖²`` of images x minus grey.

    u_n is patch n of N, with D numbers. k(n) is its kind, a component of the mixture in
    :class:`PatchPrior`, and ``W_kᵀ W_k`` the inverse covariance of kind k. As each pixel lies in
    several patches, λ is the number of an image's values divided by that of all its patches, N D. A
    product costs ``N D²`` multiplications for each image.
    """

    def __init__(
        self, whitening: Tensor, kinds: Tensor, scale: Tensor, grey: Tensor, index: Tensor
    ) -> None:
        self.whitening, self.kinds = whitening, kinds
        self.precisions = (whitening.mT @ whitening)[kinds]
        self.scale, self.grey, self.index = scale, grey, index
        self.share = grey.numel() / index.numel()

    def product(self, direction: Tensor) -> Tensor:
        """Return Q d for directions d (B, C, H, W) of normalised images x, with Q of the cost ``xᵀ
        Q x``.
        """
        patches = _taken((direction / self.scale).flatten(1), self.index)
        # Rows times matrices are computed three times as fast as matrices times columns. As the
        # precisions are symmetric, both give the same numbers.
        products = (patches[..., None, :] @ self.precisions)[..., 0, :]
        return self._returned(self.share * products, direction)

    def noise(self, generator: torch.Generator) -> Tensor:
        """Return a draw n (B, C, H, W) of N(0, Q), with Q of the cost ``xᵀ Q x``. Q⁻¹ n is then a
        draw of N(0, Q⁻¹), the prior whose −2 log density the cost is.
        """
        shape = (len(self.kinds), *self.index.shape)
        white = torch.randn(shape, generator=generator, dtype=self.whitening.dtype)
        patches = (white[..., None, :] @ self.whitening[self.kinds])[..., 0, :]
        images = self.grey.expand(len(patches), *self.grey.shape[1:])
        return self._returned(math.sqrt(self.share) * patches, images)

    def _returned(self, patches: Tensor, like: Tensor) -> Tensor:
        """Return images of the shape of ``like`` (B, C, H, W) that are sums of overlapping patches
        (B, N, D), divided by ``scale``. This map is the transpose of taking patches of images.
        """
        flat = patches.new_zeros(len(patches), like[0].numel())
        flat.index_add_(1, self.index.flatten(), patches.flatten(1))
        return flat.reshape(like.shape) / self.scale


def covariances(channels: int, side: int) -> Tensor:
    """Return the covariances (K, D, D) of patches of K kinds, for pixels in [0, 1], in float64.

    A kind is a size of contrast, with a colour and a direction. A patch has D = channels · side²
    numbers, channel by channel and row by row.
    """
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
    """Return the covariance (C, C) of a pixel's C channels, in units of the variance of their sum
    divided by √C. Three channels have the variances ``colourful`` times ``NATURAL_CHROMA`` along
    the two differences in ``OPPONENTS``; other numbers of channels are uncorrelated.
    """
    if channels != 3:
        return torch.eye(channels, dtype=torch.float64)
    axes = torch.nn.functional.normalize(torch.tensor(OPPONENTS, dtype=torch.float64))
    shares = [1.0, *(colourful * chroma for chroma in NATURAL_CHROMA)]
    return axes.T @ torch.diag(torch.tensor(shares, dtype=torch.float64)) @ axes


def _places(size: int, side: int, stride: int) -> list[int]:
    """Return the positions along an axis of ``size`` pixels at which patches of length ``side``
    begin, ``stride`` pixels apart. The last patch ends at the border.
    """
    last = size - side
    return sorted({*range(0, last, stride), last})


def _taken(flat: Tensor, index: Tensor) -> Tensor:
    """Return the patches (B, N, D) of flattened images (B, C·H·W), by the indices (N, D) of their
    numbers.
    """
    return flat.index_select(1, index.flatten()).reshape(len(flat), *index.shape)
