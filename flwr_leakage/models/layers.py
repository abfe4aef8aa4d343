"""Define layers that several networks share, and check the sizes with which networks are made."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


def make_activation(name: str) -> nn.Module:
    """Return a new activation layer: relu, leaky_relu, elu, gelu, silu, softplus, sigmoid or tanh.

    It does not work in place, as attacks differentiate twice through it.

    Raises:
        ValueError: no activation has that name.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(_ACTIVATIONS)}, got {name!r}.")
    return _ACTIVATIONS[name]()


def check_sizes(input_shape: Sequence[int], num_classes: int) -> None:
    """Raise ``ValueError`` unless the input is (C, H, W) and there are at least two classes."""
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(f"input_shape must be positive (C, H, W), got {tuple(input_shape)}.")
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}.")


def check_positive(**settings: int) -> None:
    """Raise ``ValueError`` if a setting is smaller than 1, and name the first such setting."""
    for name, value in settings.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")


def make_classifier(
    in_features: int, hidden_features: int, num_classes: int, activation: str
) -> nn.Sequential:
    """Return the last part of AlexNet and VGG: three linear layers with activations between them.

    They map ``in_features`` values to two hidden layers of ``hidden_features`` units, and these to
    K = ``num_classes`` logits; see ``make_activation``.
    """
    return nn.Sequential(
        nn.Linear(in_features, hidden_features),
        make_activation(activation),
        nn.Linear(hidden_features, hidden_features),
        make_activation(activation),
        nn.Linear(hidden_features, num_classes),
    )


def count_features(features: nn.Module, input_shape: Sequence[int]) -> int:
    """Return the number of values that ``features``, a network's convolutional part, gives for an
    input.

    Raises:
        ValueError: ``input_shape`` (C, H, W) is too small for the strides and poolings.
    """
    was_training = features.training
    try:
        # Compute in eval mode: train mode would change BatchNorm's running statistics.
        with torch.no_grad():
            return features.eval()(torch.zeros(1, *input_shape)).numel()
    except RuntimeError as error:
        raise ValueError(
            f"input_shape {tuple(input_shape)} is too small for this network: {error}"
        ) from error
    finally:
        features.train(was_training)
