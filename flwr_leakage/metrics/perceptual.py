"""Measure LPIPS, a perceptual distance that needs a network with trained weights."""

import functools
import os
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

import flwr_leakage._torchvision  # noqa: F401
from flwr_leakage.metrics.checkpoint import (
    URLS,
    BackboneUnavailableError,
    checkpoint,
    hub_folder,
)
from flwr_leakage.params import Params
from flwr_leakage.untrusted import check_archive

# isort: split
import lpips

Backbone = Literal["alex", "vgg", "squeeze"]


@dataclass(frozen=True)
class Lpips:
    """The perceptual distance LPIPS of Zhang et al. (2018), version 0.1.

    It compares the features of two images in the backbone, a network trained on ImageNet. The
    weights on top of the features come with the ``lpips`` package; the backbone's do not.

    Attributes:
        net: the backbone: ``alex`` (AlexNet), ``vgg`` (VGG-16) or ``squeeze`` (SqueezeNet 1.1).
        backbone: the path of a ``state_dict`` file of torchvision's network or of its ``features``;
            with ``None`` it is torchvision's own checkpoint in torch's hub folder.
        download: whether torchvision's checkpoint may be fetched if the hub folder lacks it, once
            and for at most ten seconds; see ``metrics.checkpoint``.
        min_size: the least length in pixels of an image's shorter side, to which smaller images are
            enlarged bilinearly.
    """

    net: Backbone = "alex"
    backbone: str | os.PathLike[str] | None = None
    download: bool = False
    min_size: int = 64

    def __post_init__(self) -> None:
        if self.net not in URLS:
            raise ValueError(f"net must be one of {sorted(URLS)}, got {self.net!r}.")
        if self.min_size < 32:
            raise ValueError(f"min_size must be at least 32 pixels, got {self.min_size}.")

    def network(self) -> nn.Module:
        """Return the network that computes LPIPS, loaded only once in a process.

        Raises:
            BackboneUnavailableError: the trained weights of the backbone are missing; the message
                says why.
        """
        backbone = None if self.backbone is None else os.fspath(self.backbone)
        outcome = _try_load_network(self.net, backbone, self.download)
        if isinstance(outcome, BackboneUnavailableError):
            raise outcome
        return outcome

    def distance(
        self, reconstructed: Float[Tensor, "B C H W"], truth: Float[Tensor, "B C H W"]
    ) -> Float[Tensor, " B"]:
        """Return the LPIPS of each pair of images with pixels in [0, 1].

        Raises:
            BackboneUnavailableError: the trained weights of the backbone are missing; the message
                says why.
            ValueError: the images have neither one nor three channels.
        """
        network = self.network()
        pair = [prepare_images(images, self.min_size) for images in (reconstructed, truth)]
        with torch.no_grad():
            return network(*pair, normalize=True).reshape(len(truth))

    def describe(self, shape: tuple[int, int, int]) -> str:
        """Return in words how images of ``shape`` (C, H, W) are prepared for the comparison."""
        channels, height, width = shape
        words = [f"LPIPS 0.1, {self.net}"]
        if min(height, width) < self.min_size:
            new_height, new_width = _enlarged(height, width, self.min_size)
            words.append(
                f"images enlarged bilinearly from {height}×{width} to {new_height}×{new_width}"
            )
        if channels == 1:
            words.append("grey repeated to three channels")
        return ", ".join(words)


def prepare_images(images: Float[Tensor, "B C H W"], min_size: int) -> Float[Tensor, "B 3 H2 W2"]:
    """Return images with three channels whose shorter side has at least ``min_size`` pixels.

    The channel of grey images is repeated. Smaller images are enlarged bilinearly.

    Raises:
        ValueError: the images have neither one nor three channels.
    """
    channels, height, width = images.shape[1:]
    if channels not in (1, 3):
        raise ValueError(f"images must have one or three channels for LPIPS, got {channels}.")
    colour = images.float().expand(-1, 3, -1, -1)
    if min(height, width) >= min_size:
        return colour
    size = _enlarged(height, width, min_size)
    return F.interpolate(colour, size=size, mode="bilinear", align_corners=False)


def _enlarged(height: int, width: int, min_size: int) -> tuple[int, int]:
    factor = min_size / min(height, width)
    return round(height * factor), round(width * factor)


@functools.lru_cache(maxsize=4)
def _try_load_network(
    net: Backbone, backbone: str | None, download: bool
) -> nn.Module | BackboneUnavailableError:
    """Return the network that computes LPIPS, or the error that says why its weights are missing.

    The arguments are the attributes of :class:`Lpips` with these names. The result is cached, so
    that a failed download is not tried again.
    """
    try:
        return _load_network(net, backbone, download)
    except BackboneUnavailableError as error:
        return error


def _load_network(net: Backbone, backbone: str | None, download: bool) -> nn.Module:
    weights = _read_backbone(net, backbone, download)
    # The constructor draws random weights, which are replaced below. The fork keeps these draws
    # from changing torch's global generator.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = lpips.LPIPS(net=net, pnet_rand=True, verbose=False)
    # The package lpips cuts torchvision's ``features`` into slices: its ``slice2.3.weight`` is
    # ``features.3.weight``.
    keys = {key: key.split(".", 1)[1] for key in network.net.state_dict()}
    source = backbone or "torchvision's checkpoint"
    missing = sorted(set(keys.values()) - weights.keys())
    if missing:
        raise BackboneUnavailableError(
            f"{source} is no backbone for net={net}: it lacks {missing[:3]} …"
        )
    try:
        network.net.load_state_dict({key: weights[name] for key, name in keys.items()})
    except RuntimeError as error:
        raise BackboneUnavailableError(f"{source} is no backbone for net={net}: {error}") from error
    return network.requires_grad_(False)


def _read_backbone(net: Backbone, backbone: str | None, download: bool) -> Params:
    """Return the weights of the backbone ``net`` by name, without the prefix ``features.``.

    The weights are read from the file ``backbone``, or with ``None`` from torchvision's checkpoint,
    which may be fetched if ``download`` is true.

    Raises:
        BackboneUnavailableError: there is no file that can be read as a ``state_dict``.
    """
    if backbone is None:
        path = checkpoint(URLS[net], hub_folder(), download)
    else:
        path = Path(backbone).expanduser()
    try:
        check_archive(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.PickleError) as error:
        # The first line of torch's error says why; several paragraphs of advice follow.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BackboneUnavailableError(f"cannot read the backbone {path}: {reason}") from error
    if not isinstance(weights, dict):
        raise BackboneUnavailableError(
            f"{path} must hold a state_dict, got {type(weights).__name__}"
        )
    return {key.removeprefix("features."): value for key, value in weights.items()}
