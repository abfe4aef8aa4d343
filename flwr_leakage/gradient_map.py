"""Define the gradient map x ↦ ∇_θ L(x, y; θ), and local training as a differentiable function."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.forward import PlainKernels, gradient_by_autograd, logits_of, trained_names
from flwr_leakage.losses import Loss, following, scalar
from flwr_leakage.model_copy import copy_of, require_plain
from flwr_leakage.normalization import (
    BatchNormMode,
    StatelessBatchNorm,
    capture_batch_norm_inputs,
    held_loss,
    statistics_of,
    without_side_effects,
)
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, LocalSchedule

OPTIMIZERS = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop")
"""Optimizers of ``torch.optim`` with which :func:`repeat_training` takes steps. Beyond the learning
rate, momentum and weight decay they have their defaults."""


class GradientMap:
    """The map x ↦ ∇_θ L(x, y; θ) of a model with parameters θ and a loss L, without side effects.

    Here x are inputs and y targets of a batch. The map returns the gradient 0 for a parameter that
    is not trained, and local training leaves the parameter as it is. Attention, recurrent and
    normalising layers are computed by kernels that can be differentiated twice, see
    ``PlainKernels``.

    Args:
        model: any module; it is copied, with BatchNorm made free of side effects.
        loss: (logits, targets) ↦ scalar; the mean cross-entropy by default, which takes class
            indices (B,) and probabilities (B, K). Tensors that the loss holds, such as class
            weights, are cast to the logits' dtype.
        batch_norm: ``batch`` if the client trains in train mode, so that BatchNorm normalises by
            the batch's statistics; ``running`` if it trains in eval mode, by the running ones.
        trained: the model's parameters that the client's optimizer holds, such as
            ``model.head.parameters()``; by default all that require a gradient.
        device: the device of the copy, on which everything is computed. The default is the CPU even
            if the model itself trains on a GPU, as scores and attacks that use second derivatives
            accept no other device.

    Attributes:
        trained: names of the trained parameters.
        kernels: the context of kernels with right second derivatives, within which the model is
            computed.
        transposed: names of the matrices that this map takes and returns as (m, n), while the model
            holds them as (n, m).
        one_by_one: the reason why ``torch.func`` cannot differentiate this model, so that autograd
            differentiates it, one sample at a time; empty if ``torch.func`` can. See
            ``differentiated_by_autograd``.
        held: for each BatchNorm layer by name, the two vectors (C,) ``γ ∂L/∂β`` and ``γ ∂L/∂γ`` of
            an observed gradient, with the layer's weight γ and bias β; empty for the plain map. See
            ``with_statistics_held``.

    Raises:
        ValueError: no parameter is trained, or ``trained`` holds a parameter of another model; the
            model is scripted, parallel or not initialised; the loss cannot be called.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = F.cross_entropy,
        batch_norm: BatchNormMode = "running",
        trained: Iterable[nn.Parameter] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        require_plain(model)
        self.trained = trained_names(model, trained)
        copied = without_side_effects(model, batch_norm)
        self.model = copied.requires_grad_(False).to(device)
        self.loss = following(loss)
        self.batch_norm: BatchNormMode = batch_norm
        self.kernels = PlainKernels.of(self.model)
        self.transposed: frozenset[str] = frozenset()
        self.one_by_one = ""
        self.held: Mapping[str, tuple[Tensor, Tensor]] = {}

    @property
    def params(self) -> Params:
        """Return the parameters of the model's copy by name, detached from any graph."""
        own = {name: value.detach() for name, value in self.model.named_parameters()}
        return self.turned(own)

    def turned(self, params: Params) -> Params:
        """Return ``params`` with those matrices transposed that ``transposed`` names."""
        return {k: v.T.contiguous() if k in self.transposed else v for k, v in params.items()}

    @property
    def buffers(self) -> Params:
        """Return the buffers in the ``state_dict`` of the model's copy by name, mostly BatchNorm's
        statistics.
        """
        persistent = self.model.state_dict().keys()
        return {name: b for name, b in self.model.named_buffers() if name in persistent}

    @property
    def has_batch_norm(self) -> bool:
        """Return whether the model has a BatchNorm layer."""
        return any(isinstance(layer, StatelessBatchNorm) for layer in self.model.modules())

    @property
    def uses_batch_statistics(self) -> bool:
        """Return whether a sample's gradient depends on its batch, as it does if BatchNorm layers
        are trained in train mode, and normalise with the batch's mean and variance.
        """
        return self.batch_norm == "batch" and self.has_batch_norm

    def with_batch_norm(self, mode: BatchNormMode) -> "GradientMap":
        """Return the same map with another mode of BatchNorm, ``batch`` or ``running``."""
        if mode == self.batch_norm:
            return self
        other = copy.copy(self)
        other.model = _switch_mode(self.model, mode)
        other.batch_norm = mode
        return other

    def with_statistics_held(
        self, params: Mapping[str, Tensor], gradient: Mapping[str, Tensor]
    ) -> "GradientMap":
        """Return a map with constant batch statistics that has the original map's gradient at the
        samples.

        The returned map normalises by known batch statistics, which are given to it as buffers. Its
        loss has an additional term, by which its gradient at the private samples equals that of the
        original map; see :func:`flwr_leakage.normalization.held_loss`.

        Args:
            params: θ, the parameters by name.
            gradient: ∇_θ L of the private samples by parameter name, as it was observed.

        Raises:
            ValueError: a BatchNorm layer has no trained weight and bias.
        """
        held = {}
        for name, layer in self.model.named_modules():
            if not isinstance(layer, StatelessBatchNorm):
                continue
            weight, bias = (f"{name}.{each}" if name else each for each in ("weight", "bias"))
            if not {weight, bias} <= self.trained & gradient.keys():
                raise ValueError(
                    f"layer {name!r} must have a trained weight and bias, as their gradients tell "
                    f"how the loss depends on the batch's statistics."
                )
            scale = params[weight]
            held[name] = (scale * gradient[bias], scale * gradient[weight])
        other = copy.copy(self.with_batch_norm("running"))
        other.held = held
        return other

    def held_loss(
        self, layer_inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
    ) -> Tensor | float:
        """Return the additional loss term by which :meth:`with_statistics_held` keeps the gradient.

        The term stands for the dependence of batch statistics on the samples. It is 0 for every
        other map.

        Args:
            layer_inputs: the input of each BatchNorm layer in a forward pass, by the layer's name.
            buffers: the known batch statistics, keyed as the model's buffers.
        """
        return held_loss(self.model, layer_inputs, {**self.buffers, **(buffers or {})}, self.held)

    def differentiated_by_autograd(self, reason: str) -> "GradientMap":
        """Return the same map, which is differentiated by autograd in place of ``torch.func``.

        Args:
            reason: why ``torch.func`` cannot differentiate the model; kept as ``one_by_one``.
        """
        other = copy.copy(self)
        other.one_by_one = reason
        return other

    def without_dropout(self) -> "GradientMap":
        """Return the same map with all dropout switched off, also dropout that stays active in eval
        mode.
        """
        if self.kernels.skips_dropout:
            return self
        other = copy.copy(self)
        other.kernels = replace(self.kernels, skips_dropout=True)
        return other

    def with_masks(self, masks: Sequence[Tensor | None]) -> "GradientMap":
        """Return the same map with dropout calls that multiply their inputs by given masks.

        Args:
            masks: a mask for each dropout call in the order of a forward pass; see
                :class:`flwr_leakage.dropout.Masked`.
        """
        other = copy.copy(self)
        other.kernels = replace(self.kernels, masks=tuple(masks))
        return other

    def with_transposed(self, names: frozenset[str]) -> "GradientMap":
        """Return the same map, but it takes and returns the matrices of these names transposed."""
        other = copy.copy(self)
        other.transposed = names
        return other

    def with_trained(self, names: Collection[str]) -> "GradientMap":
        """Return the same map with fewer trained parameters: those whose names are in ``names``.

        An attack on this map uses the updates of these parameters alone, as is necessary if a
        client sends only a part of its model.
        """
        other = copy.copy(self)
        other.trained = type(self.trained)(name for name in self.trained if name in names)
        return other

    def with_loss(self, loss: Loss) -> "GradientMap":
        """Return the same map with another loss."""
        other = copy.copy(self)
        other.loss = following(loss)
        return other

    def logits(
        self,
        params: Mapping[str, Tensor],
        inputs: Tensor,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the logits (B, K) of inputs (B, C, H, W), or of token ids (B, T).

        A model of the next token gives logits (B, T, V), with V the size of its vocabulary.

        Raises:
            ValueError: the model returns neither one tensor nor an output with ``logits``.
        """
        own = {
            name: value.T if name in self.transposed else value for name, value in params.items()
        }
        like = inputs if inputs.is_floating_point() else next(iter(params.values()))
        state = {**self._buffers_like(like, buffers), **own}
        with self.kernels():
            return logits_of(torch.func.functional_call(self.model, state, (inputs,)))

    def loss_value(
        self,
        params: Mapping[str, Tensor],
        batch: Batch,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the loss L(x, y; θ) of a batch, a scalar tensor.

        Raises:
            ValueError: the loss returns no tensor, or one number per sample in place of a scalar.
        """
        if not self.held:
            return scalar(self.loss(self.logits(params, batch.inputs, buffers), batch.targets))
        with capture_batch_norm_inputs(self.model) as captured:
            logits = self.logits(params, batch.inputs, buffers)
        return scalar(self.loss(logits, batch.targets)) + self.held_loss(captured, buffers)

    def __call__(
        self,
        params: Mapping[str, Tensor],
        batch: Batch,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Params:
        """Return ∇_θ L(x, y; θ), keyed as ``params``; differentiable in the inputs, targets and θ.
        The gradient of a parameter that is not trained is zero.
        """
        trained = {name: value for name, value in params.items() if name in self.trained}
        found = self.gradient_of(trained, params, batch, buffers)
        return {
            name: found[name] if name in found else torch.zeros_like(value)
            for name, value in params.items()
        }

    def gradient_of(
        self,
        wanted: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        batch: Batch,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Params:
        """Return ∂L/∂θ for the parameters named in ``wanted``, whether they are trained or not.

        Args:
            wanted: the values of these parameters, which replace those in ``params``.
            params: θ, the parameters by name.
            batch: the inputs and targets.
            buffers: the model's buffers; by default its own.
        """

        def value(part: Mapping[str, Tensor]) -> Tensor:
            return self.loss_value({**params, **part}, batch, buffers)

        if self.one_by_one:
            return gradient_by_autograd(value, wanted, (batch.inputs, batch.targets))
        return torch.func.grad(value)(dict(wanted))

    def statistics(
        self,
        params: Mapping[str, Tensor],
        inputs: Tensor,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Params:
        """Return the mean and biased variance of each BatchNorm layer's input, by channel.

        Each has shape (C,). The keys are the names of the layers' buffers, ``….running_mean`` and
        ``….running_var``.
        """
        return statistics_of(self.batch_norm_inputs(params, inputs, buffers))

    def batch_norm_inputs(
        self,
        params: Mapping[str, Tensor],
        inputs: Tensor,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return the input of every BatchNorm layer, by the layer's name."""
        with capture_batch_norm_inputs(self.model) as captured:
            self.logits(params, inputs, buffers)
        return dict(captured)

    def _buffers_like(self, inputs: Tensor, buffers: Mapping[str, Tensor] | None) -> Params:
        """Return all buffers of the model, with given ones in place of its own. Their dtype is that
        of the inputs; for token ids, it is that of the parameters.
        """
        own = dict(self.model.named_buffers())
        merged = {name: (buffers or {}).get(name, value) for name, value in own.items()}
        return {
            name: value.to(inputs.dtype) if value.is_floating_point() else value
            for name, value in merged.items()
        }


def _switch_mode(model: nn.Module, mode: BatchNormMode) -> nn.Module:
    # Forward hooks of the model may keep tensors of its last pass. ``copy_of`` detaches them, as
    # ``copy.deepcopy`` refuses tensors that belong to a graph.
    switched = copy_of(model)
    for module in switched.modules():
        if isinstance(module, StatelessBatchNorm):
            module.mode = mode
    return switched


def local_update(
    gradient_map: GradientMap,
    params: Mapping[str, Tensor],
    batch: Batch,
    schedule: LocalSchedule,
    buffers: Mapping[str, Tensor] | None = None,
) -> Params:
    """Return the change θ_local − θ_t by local SGD, differentiable in the batch and the parameters.

    Each step is that of ``torch.optim.SGD``: ``g = ∇L(θ) + weight_decay·θ``, ``v ← momentum·v +
    g``, ``θ ← θ − learning_rate·v``, with v = 0 at first.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        params: θ_t, the parameters before training, by name.
        batch: all N samples of the round; the schedule says which samples each step uses.
        schedule: learning rate, steps, batch size, momentum, weight decay.
        buffers: BatchNorm statistics, for a map that uses running ones; by default the model's own.

    Returns:
        θ_local − θ_t, keyed as ``params``.
    """
    current = dict(params)
    velocity: Params | None = None
    for window in schedule.slices(len(batch)):
        gradient = gradient_map(current, batch[window], buffers)
        if schedule.weight_decay:
            decay = schedule.weight_decay
            gradient = {
                k: g + decay * current[k] if k in gradient_map.trained else g
                for k, g in gradient.items()
            }
        if velocity is None or not schedule.momentum:
            velocity = gradient
        else:
            velocity = {k: schedule.momentum * velocity[k] + g for k, g in gradient.items()}
        current = {k: v - schedule.learning_rate * velocity[k] for k, v in current.items()}
    return {k: value - params[k] for k, value in current.items()}


def require_optimizer(optimizer: str) -> None:
    """Raise ``ValueError`` unless the name is one of ``OPTIMIZERS``."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"the optimizer must be one that a rehearsal repeats, {', '.join(OPTIMIZERS)}, got "
            f"{optimizer!r}."
        )


def repeat_training(
    optimizer: str,
    gradient_map: GradientMap,
    params: Mapping[str, Tensor],
    batches: Iterable[Batch],
    schedule: LocalSchedule,
    buffers: Mapping[str, Tensor] | None = None,
) -> Params:
    """Return θ_local − θ_t, keyed as ``params``, after one step of an optimizer on each batch.

    Unlike :func:`local_update`, it is not differentiable.

    Args:
        optimizer: the name of the optimizer's class, one of ``OPTIMIZERS``.
        gradient_map: the gradient map of the client's model and loss.
        params: θ_t, the parameters before training, by name.
        batches: the samples of each step.
        schedule: the learning rate, the weight decay, and the momentum of SGD and RMSprop.
        buffers: BatchNorm statistics, for a map that uses running ones; by default the model's own.

    Raises:
        ValueError: ``optimizer`` is none of ``OPTIMIZERS``.
    """
    require_optimizer(optimizer)
    moved = {
        name: value.detach().clone().requires_grad_(name in gradient_map.trained)
        for name, value in params.items()
    }
    settings = {"lr": schedule.learning_rate, "weight_decay": schedule.weight_decay}
    if optimizer in ("SGD", "RMSprop"):
        settings["momentum"] = schedule.momentum
    leaves = [value for value in moved.values() if value.requires_grad]
    steps = getattr(torch.optim, optimizer)(leaves, **settings)
    for batch in batches:
        steps.zero_grad()
        with torch.enable_grad():
            gradient_map.loss_value(moved, batch, buffers).backward()
        steps.step()
    return {name: (moved[name] - value).detach() for name, value in params.items()}
