"""Bounds that need no Jacobian: they follow from clipping norm and noise alone."""

import math

from scipy.special import gammainc, ndtr, ndtri


def guess_bound(mu: float, prior: float) -> float:
    """Return the largest chance that an attacker with chance ``prior`` before names a record.

    Reconstruction robustness Φ(Φ⁻¹(κ) + μ) (Balle et al. 2022; Hayes et al. 2023; for Gaussian
    privacy Kaissis et al. 2023). It holds for every attacker, whatever else it knows.

    Args:
        mu: the μ of Gaussian differential privacy, ≥ 0: √T Δ/σ for T releases with sensitivity Δ.
        prior: κ in (0, 1): 1/n for one of n equally likely records.
    """
    if not 0 < prior < 1:
        raise ValueError(f"prior must lie in (0, 1), got {prior}.")
    return float(ndtr(ndtri(prior) + mu))


def image_psnr(noise_to_clip: float, num_pixels: int, mean_square: float = 0.25) -> float:
    """Return the PSNR in dB of an image that makes up the whole update, read without a prior.

    The client's worst case: the update is the image x in [0, 1]^N times C/‖x‖, as a wide linear
    first layer gives away for a batch of one. Scaled back, the noise has standard deviation
    (σ/C) ‖x‖ a pixel (Riess et al. 2024): PSNR = −20 log₁₀(σ/C) − 10 log₁₀(N · mean square). An
    attacker who knows how images look does better where this is low.

    Args:
        noise_to_clip: σ/C, after averaging over the releases of the same image.
        num_pixels: N.
        mean_square: the mean square of the image's pixels; 0.25 is that of a bright photograph.
    """
    if noise_to_clip == 0:
        return math.inf
    return -20 * math.log10(noise_to_clip) - 10 * math.log10(num_pixels * mean_square)


def psnr_chance(
    noise_to_clip: float, num_pixels: int, psnr: float, mean_square: float = 0.25
) -> float:
    """Return the chance that the attacker of :func:`image_psnr` reaches a PSNR.

    Its N errors are independent N(0, (σ/C)²‖x‖²), so that N · MSE over that variance is χ² of N
    degrees of freedom, and P(PSNR ≥ t) is the regularised gamma function
    γ(N/2, 10^(−t/10)/(2 (σ/C)² mean square)) (Riess et al. 2024).

    Args:
        noise_to_clip: σ/C > 0.
        num_pixels: N.
        psnr: t, in dB.
        mean_square: the mean square of the image's pixels.
    """
    if noise_to_clip <= 0:
        raise ValueError(f"noise_to_clip must be positive, got {noise_to_clip}.")
    squared = 10 ** (-psnr / 10) / (noise_to_clip**2 * mean_square)
    return float(gammainc(num_pixels / 2, squared / 2))
