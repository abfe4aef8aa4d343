"""Draw a model's initial weights from a given random generator alone."""

import math
from typing import Literal, get_args

import torch
from torch import nn

Scheme = Literal["default", "uniform", "normal", "normal_variance", "kaiming", "xavier"]

_SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


def initialize(model: nn.Module, scheme: Scheme, generator: torch.Generator) -> nn.Module:
    """Draw the parameters of ``model`` anew, in place, from ``generator`` alone.

    ===============  =================================================  ============
    scheme           weights                                            biases
    ===============  =================================================  ============
    default          each layer's own ``reset_parameters``              likewise
    uniform          U(−0.5, 0.5) (Zhu et al. 2019)                     U(−0.5, 0.5)
    normal           N(0, 0.5²) (Zhang et al. 2023's published code)    N(0, 0.5²)
    normal_variance  N(0, 0.5) (Zhang et al. 2023, section 5.3)         N(0, 0.5)
    kaiming          N(0, 2 / fan_in) (He et al. 2015)                  0
    xavier           U(±√(6 / (fan_in + fan_out))) (Glorot 2010)        0
    ===============  =================================================  ============

    N(μ, v) is normal with mean μ and variance v; U(a, b) is uniform, and U(±a) is U(−a, a).
    Normalisation layers, whose weight is a vector, start in every scheme as torch starts them
    (BatchNorm: weight 1, bias 0, running mean 0, running variance 1): the network of Zhu et al.,
    for which the random schemes were made, has none.

    Args:
        model: the model, all of whose parameters belong to layers with ``reset_parameters``.
        scheme: the name of the scheme, one of the table's first column.
        generator: the only source of randomness; torch's global generators keep their states.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: the scheme is unknown, or a parameter belongs to a layer without
            ``reset_parameters``.
    """
    if scheme not in _SCHEMES:
        raise ValueError(f"initialization must be one of {_SCHEMES}, got {scheme!r}.")
    _check_all_reached(model)
    layers = [
        (layer, reset)
        for layer in model.modules()
        if callable(reset := getattr(layer, "reset_parameters", None))
    ]
    seed = int(torch.randint(2**62, (), generator=generator))
    # ``reset_parameters`` draws from torch's global generator. So that one is seeded here by a draw
    # from ``generator``, and restored afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _, reset in layers:
            reset()
    if scheme == "default":
        return model
    for layer, _ in layers:
        own = _own_parameters(layer)
        if own and own["weight"].ndim > 1:
            _draw(own, scheme, generator)
    return model


def _own_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    return dict(layer.named_parameters(recurse=False))


def _check_all_reached(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        own = _own_parameters(layer)
        if own and (not hasattr(layer, "reset_parameters") or not own.keys() <= {"weight", "bias"}):
            raise ValueError(
                f"every parameter must be the weight or bias of a layer with reset_parameters, "
                f"got {sorted(own)} in {name or 'the model'} ({type(layer).__name__})."
            )


@torch.no_grad()
def _draw(own: dict[str, nn.Parameter], scheme: Scheme, generator: torch.Generator) -> None:
    weight, bias = own["weight"], own.get("bias")
    match scheme:
        case "uniform":
            for value in own.values():
                value.uniform_(-0.5, 0.5, generator=generator)
        case "normal" | "normal_variance":
            std = 0.5 if scheme == "normal" else math.sqrt(0.5)
            for value in own.values():
                value.normal_(0, std, generator=generator)
        case "kaiming":
            nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)
        case "xavier":
            nn.init.xavier_uniform_(weight, generator=generator)
    if bias is not None and scheme in ("kaiming", "xavier"):
        bias.zero_()
