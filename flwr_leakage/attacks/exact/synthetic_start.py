"""A first candidate, predicted from known features by regression on images of noise.

Through many ReLUs a fit of the input gets stuck unless it starts near the solution. Features after
pooling are local: a linear map of the 3×3 features around a position predicts the block of pixels
under it well enough for a start. The attacker learns that map on its own images, which it sends
through the network. They are noise with the falling spectrum of natural images (Field 1987,
amplitudes ~ 1/f), so that no data are needed.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.records import InputSpec


def noise_images(
    spec: InputSpec,
    count: int,
    generator: torch.Generator,
    power: float = 1.5,
    colour: float = 0.4,
) -> Tensor:
    """Return images of noise with random contrast and mean.

    Args:
        spec: holds the shape (C, H, W) of an image.
        count: number of images.
        generator: draws the images.
        power: amplitudes are proportional to f^−power at frequency f.
        colour: standard deviation of each channel's own noise, relative to that of the noise that
            all channels share.

    Returns:
        Pixels (count, C, H, W) in [0, 1].
    """
    channels, height, width = spec.shape
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None])
    amplitude = frequency.clamp_min(1 / max(height, width)) ** -power

    def noise(number: int) -> Tensor:
        white = torch.randn(count, number, height, width, generator=generator)
        images = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(height, width))
        return images / images.std((2, 3), keepdim=True)

    contrast = 0.05 + 0.3 * torch.rand(count, 1, 1, 1, generator=generator)
    mean = 0.2 + 0.6 * torch.rand(count, 1, 1, 1, generator=generator)
    mean = mean + 0.1 * torch.randn(count, channels, 1, 1, generator=generator)
    return (mean + contrast * (noise(1) + colour * noise(channels))).clamp(0, 1)


def read_input(
    features: Callable[[Tensor], Tensor],
    known: Tensor,
    spec: InputSpec,
    count: int,
    generator: torch.Generator,
    ridge: float = 1e-3,
    batch_size: int = 25,
) -> Tensor:
    """Return the input (1, C, H, W), in model space, that ridge regression predicts from features.

    Args:
        features: maps a batch of inputs to features (B, N, H', W'), with H' ≤ H and W' ≤ W.
        known: the features (1, N, H', W') of the input sought.
        spec: the public facts about the data.
        count: number of synthetic images to learn from, ≥ 1.
        generator: draws these images.
        ridge: weight of the penalty, as a share of the mean diagonal entry of the Gram matrix.
        batch_size: number of images that are sent through the network at once.

    Raises:
        ValueError: count is less than 1, or the features have more positions than the input.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}.")
    height, width = spec.shape[1:]
    rows, columns = known.shape[2:]
    block = (height // rows, width // columns)
    if 0 in block:
        raise ValueError(f"features at {rows}×{columns} positions of {height}×{width} pixels.")
    # Blocks may not cover the border. Patches reach beyond their block to cover these pixels.
    margin = (block[0] - 1, block[1] - 1)
    patch = (block[0] + 2 * margin[0], block[1] + 2 * margin[1])
    canvas = (rows * block[0] + 2 * margin[0], columns * block[1] + 2 * margin[1])
    right, below = canvas[1] - width - margin[1], canvas[0] - height - margin[0]

    def design(maps: Tensor) -> Tensor:
        around = F.unfold(maps, 3, padding=1).mT.flatten(0, 1)
        return F.pad(around, (0, 1), value=1.0)

    images = spec.normalize(noise_images(spec, count, generator)).to(known.dtype)
    gram: Tensor | float = 0.0
    moments: Tensor | float = 0.0
    for batch in images.split(batch_size):
        with torch.no_grad():
            regressors = design(features(batch))
        around = F.pad(batch, (margin[1], right, margin[0], below), mode="replicate")
        pixels = F.unfold(around, patch, stride=block).mT
        gram = gram + (regressors.T @ regressors).double()
        moments = moments + (regressors.T @ pixels.flatten(0, 1)).double()
    assert isinstance(gram, Tensor)
    damping = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    reading = torch.linalg.solve(gram + damping, moments).to(known.dtype)
    patches = (design(known) @ reading).T[None]
    total = F.fold(patches, canvas, patch, stride=block)
    overlaps = F.fold(torch.ones_like(patches), canvas, patch, stride=block)
    found = (total / overlaps)[..., margin[0] :, margin[1] :][..., :height, :width]
    return spec.clamp(found)
