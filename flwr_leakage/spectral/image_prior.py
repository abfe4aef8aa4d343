"""Define a normal prior of natural images, with most variance at low frequencies and in grey."""

import math
from dataclasses import dataclass, replace

import numpy as np
import scipy.fft
import torch
from torch import Tensor

from flwr_leakage.records import InputSpec

NATURAL_CHROMA = (0.1, 0.04)
"""Variances of the two colour differences relative to that of the mean, for colourful images.

Their means over 2,000 training images of CIFAR-10, without the frequency zero, are 0.05 and 0.01,
but images differ. Ruderman, Cronin and Chiao (1998) found even smaller ones in logarithms of cone
responses.
"""

NATURAL_FALL = 0.75
"""Frequency f, in units of the highest, at which lenses and pixels are taken to reduce an image's
variance, about 1/f², by the factor 1/e. The value was chosen on development draws; no results are
kept."""

OPPONENTS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))
"""Weights of red, green and blue in their mean and in two differences, which are nearly
uncorrelated in natural images (Ruderman, Cronin and Chiao 1998)."""


@dataclass(frozen=True)
class ImagePrior:
    """A normal distribution of images x = μ + L s, normalised as a network takes them, s ~ N(0, I).

    μ is grey. The coordinates s of an image are cosine coefficients of the mean and the differences
    of its colours, each divided by its standard deviation. L turns them into normalised inputs:
    ``L s = scale · coloursᵀ (rowsᵀ (deviations · s) columns)``. The prior is a formula that was not
    fitted to images of a client.

    Attributes:
        grey: μ (1, C, H, W).
        deviations: (C, H, W) standard deviations of the coefficients, for pixels in [0, 1].
        scale: (C, 1, 1) factor from pixels in [0, 1] to normalised inputs, for each channel.
        colours: (C, C) orthonormal rows; each gives the mean or one difference of the channels.
        rows: (H, H) orthonormal discrete cosine transform along the height.
        columns: (W, W) orthonormal discrete cosine transform along the width.
    """

    grey: Tensor
    deviations: Tensor
    scale: Tensor
    colours: Tensor
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(
        cls,
        spec: InputSpec,
        spread: float = 0.25,
        chroma: float | tuple[float, float] = 0.1,
        fall: float = math.inf,
    ) -> "ImagePrior":
        """Return the prior of images of a shape and normalisation, in double precision. The
        coefficient of frequency (u, v) has a variance proportional to 1/(1 + u² + v²), as natural
        images have a power spectrum of about 1/f² (Field 1987), times exp(−(f / fall)²), with f² =
        (u/H)² + (v/W)² for images of H × W pixels.

        Args:
            spec: shape and normalisation of the inputs.
            spread: standard deviation of (sum of the C channels) / √C about grey, over images and
                positions, for pixels in [0, 1]; > 0.
            chroma: variance of the two colour differences relative to the mean's, > 0; one number
                for both, or two.
            fall: the frequency f at which the factor exp(−(f / fall)²) of the variance is 1/e, > 0.
        """
        both = (chroma, chroma) if isinstance(chroma, float | int) else chroma
        if not (spread > 0 and len(both) == 2 and min(both) > 0 and fall > 0):
            raise ValueError(
                f"spread, chroma and fall must be above 0, got {spread}, {chroma} and {fall}."
            )
        channels, height, width = spec.shape
        frequencies = (
            torch.arange(height).double()[:, None] ** 2 + torch.arange(width).double() ** 2
        )
        variances = 1 / (1 + frequencies)
        variances = variances * (spread**2 * height * width / variances.sum())
        heights = torch.arange(height).double()[:, None] / height
        widths = torch.arange(width).double() / width
        variances = variances * (-(heights**2 + widths**2) / fall**2).exp()
        colours = torch.eye(channels, dtype=torch.float64)
        shares = torch.ones(channels, 1, 1, dtype=torch.float64)
        if channels == 3:
            colours = torch.nn.functional.normalize(torch.tensor(OPPONENTS, dtype=torch.float64))
            shares[1:] = torch.tensor(both, dtype=torch.float64).reshape(2, 1, 1)
        grey = torch.full((1, *spec.shape), 0.5, dtype=torch.float64)
        return cls(
            spec.normalize(grey),
            (shares * variances).sqrt(),
            1 / torch.tensor(spec.std, dtype=torch.float64).reshape(-1, 1, 1),
            colours,
            cosine_transform(height),
            cosine_transform(width),
        )

    @classmethod
    def natural(cls, spec: InputSpec) -> "ImagePrior":
        """Return the prior of photographs: the colour differences have 0.1 and 0.04 times the
        variance of the mean, and high frequencies are weakened as by lenses and pixels (``fall`` is
        0.75).
        """
        return cls.of(spec, chroma=NATURAL_CHROMA, fall=NATURAL_FALL)

    def single(self) -> "ImagePrior":
        """Return the same prior in single precision."""
        return replace(self, **{name: value.float() for name, value in vars(self).items()})

    def fitted(self, inputs: Tensor, ring: float = 1.35) -> "ImagePrior":
        """Return the prior with standard deviations that are estimated from one normalised image
        (1, C, H, W), an empirical Bayes estimate.

        The frequencies (u, v) are divided into rings of about equal u² + v², whose outer radius is
        ``ring`` > 1 times the inner one. In a ring, the variance of the coefficients of the
        colours' mean, or of one of their differences, is the mean square of the image's
        coefficients. Between rings, its logarithm is interpolated linearly in log(1 + u² + v²).
        """
        energies = (self.deviations * self.coordinates(inputs)[0]).square().flatten(1).numpy()
        _, height, width = inputs.shape[1:]
        squares = (np.arange(height)[:, None] ** 2 + np.arange(width) ** 2).ravel()
        numbers = (np.log(squares.clip(1)) / (2 * math.log(ring))).astype(int)
        rings = [numbers == each for each in np.unique(numbers)]
        places = np.log1p(squares)
        centres = [places[each].mean() for each in rings]

        def deviations(energy: np.ndarray) -> np.ndarray:
            # The addend 1e-12 keeps the logarithm finite: the colour differences of a grey image
            # are zero.
            levels = [math.log(energy[each].mean() + 1e-12) for each in rings]
            return np.exp(np.interp(places, centres, levels) / 2)

        fitted = torch.from_numpy(np.stack([deviations(energy) for energy in energies]))
        return replace(self, deviations=fitted.reshape(self.deviations.shape))

    def coordinates(self, inputs: Tensor) -> Tensor:
        """Return the coordinates s (B, C, H, W) of normalised images x = μ + L s, ``inputs``. Under
        the prior, s ~ N(0, I).
        """
        found = []
        # Each image is transformed by itself, so that its coordinates are the same to the last bit
        # in a batch of any size.
        for each in (inputs - self.grey) / self.scale:
            images = torch.einsum("oc,chw->ohw", self.colours, each)
            found.append(self.rows @ images @ self.columns.T / self.deviations)
        return torch.stack(found)

    def inputs(self, coordinates: Tensor) -> Tensor:
        """Return the normalised images x = μ + L s (B, C, H, W) with the given coordinates s. Under
        the prior, s ~ N(0, I).
        """
        return self.grey + self.push(coordinates)

    def push(self, coordinates: Tensor) -> Tensor:
        """Return L s (…, C, H, W), the change of images x = μ + L s if coordinates change by s."""
        images = self.rows.T @ (self.deviations * coordinates) @ self.columns
        return self.scale * torch.einsum("oc,...ohw->...chw", self.colours, images)

    def pull(self, inputs: Tensor) -> Tensor:
        """Return Lᵀ g (…, C, H, W), the gradient by the coordinates s of x = μ + L s, for a
        gradient g by the images x.
        """
        images = torch.einsum("oc,...chw->...ohw", self.colours, self.scale * inputs)
        return self.deviations * (self.rows @ images @ self.columns.T)


def cosine_transform(size: int) -> Tensor:
    """Return the matrix (size, size) of the orthonormal discrete cosine transform (Ahmed et al.
    1974), which torch lacks, in double precision, with one frequency in each row.

    Example:
        >>> cosine_transform(2)
        tensor([[ 0.7071,  0.7071],
                [ 0.7071, -0.7071]], dtype=torch.float64)
    """
    return torch.from_numpy(scipy.fft.dct(np.eye(size), axis=0, norm="ortho"))
