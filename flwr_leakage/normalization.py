"""Compute BatchNorm with batch, running or given statistics, free of side effects.

``torch.func`` refuses a BatchNorm layer that updates its running statistics in place, and an audit
must not change the model that it looks at. Here every BatchNorm layer of a copy of the model is
replaced by one that has the same parameters and buffers and never writes to them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_leakage.model_copy import copy_of
from flwr_leakage.params import Params

BatchNormMode = Literal["batch", "running"]


class StatelessBatchNorm(nn.Module):
    """A BatchNorm layer that never writes to its buffers.

    In mode ``batch`` it normalises by the mean and biased variance of its input, as for a client in
    train mode. In mode ``running`` it normalises by its buffers, which may hold given statistics.
    """

    def __init__(self, source: _BatchNorm, mode: BatchNormMode) -> None:
        super().__init__()
        if mode == "running" and source.running_mean is None:
            raise ValueError(
                "batch_norm='running' needs running statistics, got a BatchNorm layer with "
                "track_running_stats=False; use batch_norm='batch'."
            )
        self.weight: Tensor | None
        self.bias: Tensor | None
        self.running_mean: Tensor | None
        self.running_var: Tensor | None
        self.mode = mode
        self.eps = source.eps
        self.momentum = source.momentum
        self.register_parameter("weight", source.weight)
        self.register_parameter("bias", source.bias)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(source, name))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the input (B, C, …) normalised over all dimensions but the channels'."""
        if self.mode == "batch":
            return F.batch_norm(
                inputs, None, None, self.weight, self.bias, training=True, eps=self.eps
            )
        return F.batch_norm(
            inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def without_side_effects(model: nn.Module, mode: BatchNormMode) -> nn.Module:
    """Return a copy of a model, set to eval mode, so that dropout is inactive. Its BatchNorm layers
    never write to their buffers, and normalise by the batch's statistics (``batch``) or by the
    buffers (``running``). Parameters and buffers keep their names.
    """
    return with_stateless_batch_norm(model, mode).eval()


def with_stateless_batch_norm(model: nn.Module, mode: BatchNormMode) -> nn.Module:
    """Return a copy of a model whose BatchNorm layers never write to their buffers, and normalise
    by the batch's statistics (``batch``) or by the buffers (``running``). Other layers keep their
    mode.

    Raises:
        ValueError: the mode is unknown, or the model cannot be copied; see ``copy_of``.
    """
    if mode not in ("batch", "running"):
        raise ValueError(f"batch_norm must be 'batch' or 'running', got {mode!r}.")
    stateless = copy_of(model)
    for parent in list(stateless.modules()):
        # ``named_children()`` would list a layer with two names under its first name only, and the
        # original layer would stay under the second one.
        for name, child in list(parent._modules.items()):
            if isinstance(child, _BatchNorm):
                setattr(parent, name, StatelessBatchNorm(child, mode))
    if isinstance(stateless, _BatchNorm):
        return StatelessBatchNorm(stateless, mode)
    return stateless


def mode_of(model: nn.Module) -> BatchNormMode:
    """Return the mode of a model's BatchNorm layers: ``batch`` in train mode, else ``running``.

    Raises:
        ValueError: some layers are in train mode and others in eval mode.
    """
    modes = {
        name: layer.training or layer.running_mean is None
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
    }
    if len(set(modes.values())) > 1:
        training = [name for name, batch in modes.items() if batch]
        raise ValueError(
            f"BatchNorm layers must all be in train mode or all in eval mode, got {len(training)} "
            f"of {len(modes)} in train mode ({', '.join(training[:3])}): one batch_norm for all "
            f"of them, 'batch' or 'running', must be chosen."
        )
    return "batch" if any(modes.values()) else "running"


@contextmanager
def capture_batch_norm_inputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary into which each forward pass within the context writes the input of every
    BatchNorm layer, by the layer's name.
    """
    captured: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, StatelessBatchNorm | _BatchNorm):

            def keep(_: nn.Module, inputs: tuple[Tensor, ...], key: str = name) -> None:
                captured[key] = inputs[0]

            handles.append(module.register_forward_pre_hook(keep))
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def statistics_of(layer_inputs: dict[str, Tensor]) -> Params:
    """Return the mean and biased variance of each BatchNorm layer's input (B, C, …), by channel,
    keyed as the layers' buffers, ``….running_mean`` and ``….running_var``.
    """
    statistics: Params = {}
    for name, inputs in layer_inputs.items():
        dims = [0, *range(2, inputs.ndim)]
        prefix = f"{name}." if name else ""
        statistics[f"{prefix}running_mean"] = inputs.mean(dims)
        statistics[f"{prefix}running_var"] = inputs.var(dims, unbiased=False)
    return statistics


def held_loss(
    model: nn.Module,
    layer_inputs: Mapping[str, Tensor],
    statistics: Mapping[str, Tensor],
    held: Mapping[str, tuple[Tensor, Tensor]],
) -> Tensor | float:
    """Return the loss term that keeps the gradient if BatchNorm's statistics become constants.

    BatchNorm in train mode computes ``y = γ x̂ + β`` with ``x̂ = (z − μ) / σ``, where μ and σ² are
    the mean and variance of the N inputs z of a channel. With ``d = ∂L/∂y`` and means over N,

        ∂L/∂z = (γ d − mean(γ d) − x̂ mean(γ d x̂)) / σ.

    The two means are ``γ ∂L/∂β / N`` and ``γ ∂L/∂γ / N``, which an attacker knows from the update
    of one step. So the gradient is that of the same network with constant μ and σ, and with the
    loss L plus the term

        − Σ_layers Σ_channels ( γ ∂L/∂β mean(x̂) + ½ γ ∂L/∂γ mean(x̂²) ).

    ``model`` gives each layer's ε, with ``σ = √(variance + ε)``. ``layer_inputs`` are the inputs z
    (B, C, …) by layer; a layer without one adds nothing. ``statistics`` are μ and σ², keyed as
    buffers. ``held`` are the constants ``γ ∂L/∂β`` and ``γ ∂L/∂γ``, each (C,), by layer.
    """
    total: Tensor | float = 0.0
    for name, inputs in layer_inputs.items():
        if name not in held:
            continue
        layer = model.get_submodule(name)
        assert isinstance(layer, StatelessBatchNorm)
        mean, variance = (
            statistics[f"{name}.{each}" if name else each].to(inputs)
            for each in ("running_mean", "running_var")
        )
        first, second = (each.to(inputs) for each in held[name])
        shape = (-1, *[1] * (inputs.ndim - 2))
        scale = (variance + layer.eps).rsqrt()
        normal = (inputs - mean.reshape(shape)) * scale.reshape(shape)
        axes = [0, *range(2, inputs.ndim)]
        total = total - (first * normal.mean(axes) + second * normal.square().mean(axes) / 2).sum()
    return total


def derive_statistics(
    model: nn.Module, before: Params, after: Params, num_steps: int, layer_inputs: dict[str, Tensor]
) -> Params:
    """Return BatchNorm's batch statistics, from running buffers before and after local training.

    They are the mean and the biased variance (C,) of each layer's input, keyed as the buffers.

    A BatchNorm layer with momentum m updates r ← (1 − m)·r + m·s at each step, with s the batch
    mean or the *unbiased* batch variance. After n steps ``s̄ = (r_after − (1 − m)ⁿ r_before) / (1 −
    (1 − m)ⁿ)`` is the exponentially weighted mean of the steps' statistics. For n = 1 these are the
    batch's own.

    Args:
        model: the model whose BatchNorm layers are read for their momentum.
        before: the buffers that the server sent.
        after: the buffers that the client returned.
        num_steps: the number n of local steps.
        layer_inputs: for each layer by name, a tensor that has the shape of the layer's input for
            the client's batch. Only the shapes are used, to undo the factor N/(N − 1) of the
            unbiased variance, with N the number of values per channel.

    Raises:
        ValueError: a layer averages cumulatively (``momentum=None``) or not at all
            (``momentum=0``), or a buffer is missing.
    """
    statistics: Params = {}
    layers = dict(model.named_modules())
    for name, inputs in layer_inputs.items():
        momentum = layers[name].momentum
        if momentum is None or not 0 < momentum <= 1:
            raise ValueError(f"layer {name!r} must have a momentum in (0, 1], got {momentum!r}.")
        kept = (1 - momentum) ** num_steps
        count = inputs.numel() // inputs.shape[1]
        for suffix in ("running_mean", "running_var"):
            key = f"{name}.{suffix}" if name else suffix
            if key not in before or key not in after:
                raise ValueError(f"buffer {key!r} must be sent and returned to derive statistics.")
            value = (after[key].double() - kept * before[key].double()) / (1 - kept)
            if suffix == "running_var":
                value = (value * (count - 1) / count).clamp_min(0)
            statistics[key] = value.to(after[key].dtype)
    return statistics
