"""Distances between images with pixels in [0, 1], one value a pair of images."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.image import (
    peak_signal_noise_ratio,
    structural_similarity_index_measure,
)

SSIM_WINDOW = 11
"""Side of SSIM's Gaussian window in pixels; images must be at least as large."""


def mse(
    reconstructed: Float[Tensor, "B C H W"], truth: Float[Tensor, "B C H W"]
) -> Float[Tensor, " B"]:
    """Mean squared error, in pixel²."""
    return F.mse_loss(reconstructed, truth, reduction="none").flatten(1).mean(1)


def rmse(
    reconstructed: Float[Tensor, "B C H W"], truth: Float[Tensor, "B C H W"]
) -> Float[Tensor, " B"]:
    """Root of the mean squared error, in pixels.

    Example:
        >>> import torch
        >>> rmse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))
        tensor([0.5000])
    """
    return mse(reconstructed, truth).sqrt()


def psnr(
    reconstructed: Float[Tensor, "B C H W"], truth: Float[Tensor, "B C H W"]
) -> Float[Tensor, " B"]:
    """Peak signal-to-noise ratio ``10·log₁₀(1 / MSE)`` in dB; infinite for an exact match."""
    return peak_signal_noise_ratio(
        reconstructed, truth, data_range=1.0, reduction="none", dim=(1, 2, 3)
    )


def ssim(
    reconstructed: Float[Tensor, "B C H W"], truth: Float[Tensor, "B C H W"]
) -> Float[Tensor, " B"]:
    """Structural similarity (Wang et al. 2004, eq. 13): Gaussian window of 11×11, σ = 1.5.

    The mean is over the windows that lie inside the image, as in the paper's own code.

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
    # torchmetrics pads by reflection, so that its mean counts border pixels twice.
    border = SSIM_WINDOW // 2
    return index_map[..., border:-border, border:-border].flatten(1).mean(1)
