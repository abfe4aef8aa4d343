"""Bounds on reconstruction from an update's clipping norm and noise alone, without a Jacobian."""

import math

from scipy.special import gammainc, ndtr, ndtri


def guess_bound(mu: float, prior: float) -> float:
    """Return the largest probability with which an attacker identifies a record in a private
    release.

    It is the reconstruction robustness Φ(Φ⁻¹(κ) + μ), where κ is the probability before the release
    and Φ the normal distribution function (Balle et al. 2022; Hayes et al. 2023; for Gaussian
    privacy Kaissis et al. 2023). It holds for every attacker, whatever else it knows.

    Args:
        mu: the parameter μ ≥ 0 of Gaussian differential privacy: √T Δ/σ for T releases with
            sensitivity Δ and noise of standard deviation σ.
        prior: κ in (0, 1); the probability to identify the record without the release, such as 1/n
            for n equally likely records.

    Raises:
        ValueError: ``prior`` does not lie in (0, 1).
    """
    if not 0 < prior < 1:
        raise ValueError(f"prior must lie in (0, 1), got {prior}.")
    return float(ndtr(ndtri(prior) + mu))


def image_psnr(noise_to_clip: float, num_pixels: int, mean_square: float = 0.25) -> float:
    """Return the PSNR in dB of an image that is read off a noisy update, without a prior on images.

    This is the client's worst case: the update is the image x in [0, 1]^N scaled to the clipping
    norm C, as a wide linear first layer reveals it for a batch of one, plus noise of standard
    deviation σ. The attacker scales the update back to the size of the image. The noise then has
    the standard deviation (σ/C) ‖x‖ on each pixel, so that PSNR = −20 log₁₀(σ/C) − 10 log₁₀(N ·
    mean square) (Riess et al. 2024). An attacker who knows how images look can reach a larger PSNR.
    Without noise the result is infinite.

    Args:
        noise_to_clip: σ/C ≥ 0; over several releases of the same image, σ is the standard deviation
            of their averaged noise.
        num_pixels: the number N of pixels.
        mean_square: the mean square of the image's pixels; 0.25 is that of a bright photograph.
    """
    if noise_to_clip == 0:
        return math.inf
    return -20 * math.log10(noise_to_clip) - 10 * math.log10(num_pixels * mean_square)


def psnr_chance(
    noise_to_clip: float, num_pixels: int, psnr: float, mean_square: float = 0.25
) -> float:
    """Return the probability that the image read off a noisy update has at least a given PSNR.

    The update is the image x in [0, 1]^N scaled to the clipping norm C, plus noise of standard
    deviation σ. The attacker scales it back and uses no prior on images, as in :func:`image_psnr`.

    The errors of the N pixels are independent N(0, (σ/C)²‖x‖²), so that N · MSE over that variance
    is χ² distributed with N degrees of freedom. P(PSNR ≥ t) is then the regularised lower gamma
    function γ(N/2, 10^(−t/10)/(2 (σ/C)² mean square)) (Riess et al. 2024).

    Args:
        noise_to_clip: the ratio σ/C > 0.
        num_pixels: the number N of pixels.
        psnr: the PSNR t in dB.
        mean_square: the mean square of the image's pixels.

    Raises:
        ValueError: ``noise_to_clip`` is not positive.
    """
    if noise_to_clip <= 0:
        raise ValueError(f"noise_to_clip must be positive, got {noise_to_clip}.")
    squared = 10 ** (-psnr / 10) / (noise_to_clip**2 * mean_square)
    return float(gammainc(num_pixels / 2, squared / 2))
