"""Mix images as MixUp does, then give every pixel a random sign (InstaHide)."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.defenses.base import Defense
from flwr_leakage.defenses.mixing import (
    Mixing,
    check_mixing,
    draw_coefficients,
    draw_indices,
    mix,
    soft_targets,
)
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Batch, InputSpec
from flwr_leakage.untrusted import read_npz
from flwr_leakage.values import require_option

Partners = Literal["intra", "inter"]


_CHUNK = 32
_SIGNS_OF_BYTE = 1.0 - 2.0 * ((torch.arange(256)[:, None] >> torch.arange(8)) & 1)


def flip_signs(
    inputs: Float[Tensor, "B C H W"], randomness: Randomness
) -> Float[Tensor, "B C H W"]:
    """Return the inputs with each entry negated with probability 1/2, independently."""
    return _flip_in_place(inputs.clone(), randomness)


def _flip_in_place(inputs: Tensor, randomness: Randomness) -> Tensor:
    # Each random byte gives eight signs, and a chunk fits into the processor's cache. Drawing a
    # random number for every entry would add more than a tenth to the training time of a small
    # network.
    signs_of_byte = _SIGNS_OF_BYTE.to(inputs)
    for chunk in inputs.split(_CHUNK):
        count = -(-chunk.numel() // 8)
        signs = F.embedding(randomness.bytes(count).to(inputs.device), signs_of_byte)
        chunk.mul_(signs.reshape(-1)[: chunk.numel()].reshape(chunk.shape))
    return inputs


def instahide_batch(
    batch: Batch,
    mixing: Mixing,
    num_classes: int,
    public: Float[Tensor, "M C H W"] | None = None,
) -> Batch:
    """Return the mixtures of n private samples before signs are flipped (Huang et al. 2020, alg.
    2): inputs x̃ = Σⱼ λⱼ xⱼ with the coefficients λ of ``mixing``, and targets (B, K). Targets are
    mixed from the private samples only, whose coefficients are scaled to sum to one. The index n +
    m in ``mixing`` is that of image m of ``public``, in model input units.
    """
    inputs = batch.inputs
    targets = soft_targets(batch.targets, num_classes, inputs.dtype)
    if public is not None:
        inputs = torch.cat([inputs, public.to(inputs.device, inputs.dtype)])
        targets = torch.cat([targets, targets.new_zeros(len(public), num_classes)])
    mixed = mix(targets, mixing)
    return Batch(mix(inputs, mixing), mixed / mixed.sum(1, keepdim=True))


def load_public_images(
    path: str | os.PathLike[str] | None,
    mean: tuple[float, ...] | list[float] = (0.0,),
    std: tuple[float, ...] | list[float] = (1.0,),
) -> Float[Tensor, "M C H W"]:
    """Return the images of an ``npz`` file as model inputs (M, C, H, W), as InstaHide's public
    images.

    Args:
        path: the path of a file with an array ``images`` of uint8, (M, H, W) or (M, H, W, C).
        mean: the mean of the model's normalisation for each channel, in pixel units.
        std: the standard deviation of the normalisation for each channel, in pixel units.

    Raises:
        ValueError: there is no such file, or it has no such array.
    """
    if path is None or not Path(path).is_file():
        raise ValueError(f"InstaHide with public partners needs a public set, got path={path!r}.")
    try:
        (found,) = read_npz(Path(path), ["images"])
    except ValueError as error:
        raise ValueError(f"{path} must hold uint8 'images': {error}.") from error
    if found.dtype != np.uint8:
        raise ValueError(f"{path} must hold uint8 'images', got {found.dtype}.")
    images = torch.from_numpy(found)
    images = images[:, None] if images.ndim == 3 else images.movedim(-1, 1)
    center, width = (torch.tensor(list(v)).reshape(-1, 1, 1) for v in (mean, std))
    return (images / 255 - center) / width


@dataclass(frozen=True)
class InstaHide(Defense):
    """A defense that mixes each training image with others and flips the signs of its pixels.

    The draws are fresh for every batch; see :func:`instahide_batch` and :func:`flip_signs`.

    Attributes:
        k: the number of images in each mixture, ≥ 1; with ``inter`` at least 3, of which two are
            private.
        partners: ``intra`` to mix private images only; ``inter`` to mix two private images and k −
            2 of the public set.
        max_coefficient: the largest coefficient that an image may have in a mixture, in (1 / k, 1].
        random_signs: whether every entry of a mixture gets a random sign.
        public: (M, C, H, W) public images in the model's input space, for ``inter``.
    """

    effect: ClassVar[str] = (
        "the client trains on mixtures of several images with random signs of pixels"
    )
    takes_texts: ClassVar[bool] = False

    k: int = 4
    partners: Partners = "intra"
    max_coefficient: float = 0.65
    random_signs: bool = True
    public: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_mixing(self.k, self.max_coefficient)
        require_option(self, "partners", Partners)
        if self.partners == "inter":
            if self.k < 3:
                raise ValueError(f"k must be at least 3 with public partners, got {self.k}.")
            if self.public is None:
                raise ValueError("partners='inter' needs a public set, got public=None.")
            if len(self.public) < self.k - 2:
                raise ValueError(
                    f"the public set must hold at least k − 2 = {self.k - 2} images, "
                    f"got {len(self.public)}."
                )

    @property
    def num_private(self) -> int:
        """Return the number of private images in each mixture."""
        return 2 if self.partners == "inter" else self.k

    @property
    def flips_signs(self) -> bool:
        """Return whether signs are flipped: the setting ``random_signs``."""
        return self.random_signs

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Raise ``ValueError`` for too few samples to mix, or public images of another shape."""
        super().validate(gradient_map, spec, num_examples)
        if num_examples < self.num_private:
            raise ValueError(
                f"{self.num_private} private images are mixed, but only {num_examples} are encoded "
                "at once."
            )
        if self.public is not None and tuple(self.public.shape[1:]) != spec.shape:
            raise ValueError(
                f"public images must have shape {spec.shape}, got {tuple(self.public.shape[1:])}."
            )

    def draw_mixing(self, num_samples: int, randomness: Randomness) -> Mixing:
        """Return random partners and coefficients for each of B = ``num_samples`` samples. Indices
        from B on belong to public images.
        """
        indices = draw_indices(num_samples, self.num_private, randomness)
        if self.partners == "inter":
            assert self.public is not None
            draws = randomness.uniform((num_samples, len(self.public)))
            partners = draws.topk(self.k - 2, dim=1).indices
            indices = torch.cat([indices, num_samples + partners], dim=1)
        coefficients = draw_coefficients(num_samples, self.k, self.max_coefficient, randomness)
        return Mixing(indices, coefficients)

    def mixing_matrix(
        self, num_samples: int, randomness: Randomness
    ) -> Float[Tensor, "B n"] | None:
        """Return the matrix W (n, n) of the mixtures W · samples before signs are flipped. With M
        public images, W is (n, n + M), and its last columns are theirs. ``None`` is returned if a
        mixture has a single image.
        """
        if self.k == 1:
            return None
        columns = num_samples + (0 if self.public is None else len(self.public))
        return self.draw_mixing(num_samples, randomness).matrix(columns)

    def on_batch(self, batch: Batch, num_classes: int, randomness: Randomness) -> Batch:
        """Return mixtures of the batch's images with random signs. Their targets are class
        probabilities (B, K); if a mixture has a single image, targets stay as they are.
        """
        if self.k == 1:
            inputs, targets = batch.inputs.clone(), batch.targets
        else:
            mixing = self.draw_mixing(len(batch), randomness)
            mixed = instahide_batch(batch, mixing, num_classes, self.public)
            inputs, targets = mixed.inputs, mixed.targets
        return Batch(_flip_in_place(inputs, randomness) if self.random_signs else inputs, targets)
