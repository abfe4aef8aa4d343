"""Distances between images with pixels in [0, 1], one value for each pair of images."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

import flwr_leakage._torchvision  # noqa: F401

# isort: split
from torchmetrics.functional.image import (
    peak_signal_noise_ratio,
    structural_similarity_index_measure,
)

SSIM_WINDOW = 11
"""The side of SSIM's Gaussian window in pixels (Wang et al. 2004). The sides of an image must be at
least as long.
"""


def mse(
    reconstructed: Float[Tensor, "B C H W"], truth: Float[Tensor, "B C H W"]
) -> Float[Tensor, " B"]:
    """Return the mean squared error of each pair of images, in squared pixel units."""
    return F.mse_loss(reconstructed, truth, reduction="none").flatten(1).mean(1)


def rmse(
    reconstructed: Float[Tensor, "B C H W"], truth: Float[Tensor, "B C H W"]
) -> Float[Tensor, " B"]:
    """Return the root of the mean squared error of each pair of images, in pixel units.

    Example:
        >>> import torch
        >>> rmse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))
        tensor([0.5000])
    """
    return mse(reconstructed, truth).sqrt()


def psnr(
    reconstructed: Float[Tensor, "B C H W"], truth: Float[Tensor, "B C H W"]
) -> Float[Tensor, " B"]:
    """Return the PSNR ``10·log₁₀(1 / MSE)`` of each pair of images in dB, infinite for an exact
    match.
    """
    return peak_signal_noise_ratio(
        reconstructed, truth, data_range=1.0, reduction="none", dim=(1, 2, 3)
    )


def fit_brightness_and_contrast(
    reconstructed: Float[Tensor, "B C H W"], truth: Float[Tensor, "B C H W"]
) -> Float[Tensor, "B C H W"]:
    """Return each reconstruction with the contrast and brightness that bring it nearest its
    original.

    A reconstruction x̂ becomes ``a · x̂ + b``, with a contrast a > 0 and a brightness b. The result
    minimises the squared error over all pixels and channels of the image, and is not clamped. A
    constant image, or one whose best contrast is negative, becomes the original's mean grey level
    everywhere. The pixels of both arguments are in [0, 1].

    Example:
        >>> import torch
        >>> truth = torch.tensor([[[[0.0, 1.0]]]])
        >>> torch.allclose(fit_brightness_and_contrast(0.2 * truth + 0.4, truth), truth, atol=1e-6)
        True
    """
    axes = (1, 2, 3)
    level = truth.mean(axes, keepdim=True)
    ours = reconstructed - reconstructed.mean(axes, keepdim=True)
    variance = ours.square().mean(axes, keepdim=True)
    contrast = (ours * (truth - level)).mean(axes, keepdim=True).clamp_min(0)
    # A variance of at most 1e-12, a spread of 1e-6 where white is 1, is rounding: such an image
    # counts as constant.
    contrast = torch.where(variance > 1e-12, contrast / variance.clamp_min(1e-12), 0.0)
    return contrast * ours + level


def ssim(
    reconstructed: Float[Tensor, "B C H W"], truth: Float[Tensor, "B C H W"]
) -> Float[Tensor, " B"]:
    """Return the structural similarity SSIM of each pair of images (Wang et al. 2004, equation 13).

    SSIM is the mean over all windows of 11×11 pixels that lie within the image, weighted by a
    Gaussian with a standard deviation of 1.5 pixels. It is at most 1, the value of equal images.

    Raises:
        ValueError: the images are smaller than the window.
    """
    if min(truth.shape[2:]) < SSIM_WINDOW:
        raise ValueError(
            f"images must be at least {SSIM_WINDOW}×{SSIM_WINDOW} for SSIM, got "
            f"{truth.shape[2]}×{truth.shape[3]}."
        )
    _, index_map = structural_similarity_index_measure(
        reconstructed, truth, data_range=1.0, reduction="none", sigma=1.5, return_full_image=True
    )
    # torchmetrics pads images by reflection, so that its own mean would count border pixels twice.
    # The mean here is over the windows that lie within the image.
    border = SSIM_WINDOW // 2
    return index_map[..., border:-border, border:-border].flatten(1).mean(1)
