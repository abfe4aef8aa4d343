"""The gradient map x ↦ ∇_θ L(x, y; θ), and local training as a differentiable function."""

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


class GradientMap:
    """x ↦ ∇_θ L(x, y; θ) of a model and a loss, without side effects.

    A parameter that is not trained has the gradient 0, and local training leaves it as it is.
    Attention, recurrent and normalising layers are computed by plain kernels, see ``PlainKernels``.

    Args:
        model: any module; it is copied, with BatchNorm made free of side effects.
        loss: (logits, targets) ↦ scalar; the mean cross-entropy by default, which takes class
            indices (B,) and probabilities (B, K). A module's tensors follow the logits' dtype.
        batch_norm: ``batch`` if the client trains in train mode, ``running`` in eval mode.
        trained: the model's parameters that the client's optimizer holds, such as
            ``model.head.parameters()``; by default all that require a gradient.
        device: the device of the copy, on which everything is computed. It is the CPU even if the
            model itself trains on a GPU: scores and attacks of second order take no other.

    Attributes:
        trained: names of the trained parameters.
        kernels: the kernels by which the model is computed.
        transposed: names of the parameters of shape (m, n) that the model itself keeps as (n, m).
        one_by_one: why ``torch.func`` cannot take this model, so that plain autograd has to, one
            sample at a time; empty where it can. See ``differentiated_by_autograd``.
        held: the terms that the loss takes of each BatchNorm layer whose buffers hold a batch's own
            statistics, by name; empty where none do. See ``with_statistics_held``.

    Raises:
        ValueError: no parameter is trained, or one of ``trained`` is none of the model's; the model
            is scripted, parallel or not initialised; the loss is no function.
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
        """Return the parameters of the model's copy, detached."""
        own = {name: value.detach() for name, value in self.model.named_parameters()}
        return self.turned(own)

    def turned(self, params: Params) -> Params:
        """Return parameters or gradients with the ``transposed`` ones transposed."""
        return {k: v.T.contiguous() if k in self.transposed else v for k, v in params.items()}

    @property
    def buffers(self) -> Params:
        """Return the buffers in the copied model's ``state_dict``, mostly those of BatchNorm."""
        persistent = self.model.state_dict().keys()
        return {name: b for name, b in self.model.named_buffers() if name in persistent}

    @property
    def has_batch_norm(self) -> bool:
        """Return whether the model has a BatchNorm layer."""
        return any(isinstance(layer, StatelessBatchNorm) for layer in self.model.modules())

    @property
    def uses_batch_statistics(self) -> bool:
        """Return whether a sample's gradient depends on the batch that it is in.

        True of a client that trains BatchNorm layers in train mode: they normalise with the mean
        and variance of the batch.
        """
        return self.batch_norm == "batch" and self.has_batch_norm

    def with_batch_norm(self, mode: BatchNormMode) -> "GradientMap":
        """Return the same map with another BatchNorm mode."""
        if mode == self.batch_norm:
            return self
        other = copy.copy(self)
        other.model = _switch_mode(self.model, mode)
        other.batch_norm = mode
        return other

    def with_statistics_held(
        self, params: Mapping[str, Tensor], gradient: Mapping[str, Tensor]
    ) -> "GradientMap":
        """Return the map of an update of known batch statistics, which the buffers hold.

        At the private samples, its gradient is that of this map; see
        :func:`flwr_leakage.normalization.held_loss`.

        Args:
            params: θ.
            gradient: ∇_θ L of the private samples, as it was observed.

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
        """Return the loss's part that holds a batch's statistics as constants, 0 where none are."""
        return held_loss(self.model, layer_inputs, {**self.buffers, **(buffers or {})}, self.held)

    def differentiated_by_autograd(self, reason: str) -> "GradientMap":
        """Return the same map, differentiated by plain autograd in place of ``torch.func``.

        Args:
            reason: why ``torch.func`` cannot, which ``one_by_one`` keeps.
        """
        other = copy.copy(self)
        other.one_by_one = reason
        return other

    def without_dropout(self) -> "GradientMap":
        """Return the same map with all dropout off, even what the model applies in eval mode."""
        if self.kernels.skips_dropout:
            return self
        other = copy.copy(self)
        other.kernels = replace(self.kernels, skips_dropout=True)
        return other

    def with_masks(self, masks: Sequence[Tensor | None]) -> "GradientMap":
        """Return the map with given masks of dropout; see :class:`flwr_leakage.dropout.Masked`."""
        other = copy.copy(self)
        other.kernels = replace(self.kernels, masks=tuple(masks))
        return other

    def with_transposed(self, names: frozenset[str]) -> "GradientMap":
        """Return the same map as a function of the transposes of some matrices."""
        other = copy.copy(self)
        other.transposed = names
        return other

    def with_trained(self, names: Collection[str]) -> "GradientMap":
        """Return the same map of which only some of the trained parameters count as trained.

        An attack then uses their updates alone, as where a client sends a part of its model.
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
        """Return logits (B, K) of inputs (B, C, H, W), or (B, T, V) of texts (B, T).

        Raises:
            ValueError: the model returns neither one tensor nor something with ``logits``.
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
        """Return L(x, y; θ), a scalar.

        Raises:
            ValueError: the loss returns one number a sample, or none that is a tensor.
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

        Zero for a parameter that is not trained.
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
        """Return ∂L/∂θ for the entries of θ in ``wanted`` only, whether trained or not."""

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
        """Return each BatchNorm input's mean and biased variance, keyed as the layer's buffers."""
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
        """Return buffers in the dtype of the inputs, or of the parameters where inputs are token
        ids.

        A float64 analysis needs float64 statistics.
        """
        own = dict(self.model.named_buffers())
        merged = {name: (buffers or {}).get(name, value) for name, value in own.items()}
        return {
            name: value.to(inputs.dtype) if value.is_floating_point() else value
            for name, value in merged.items()
        }


def _switch_mode(model: nn.Module, mode: BatchNormMode) -> nn.Module:
    switched = copy_of(model)  # hooks may keep tensors of the last pass
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
    """Return θ_local − θ_t after the schedule's SGD steps on ``batch``; it is differentiable.

    Follows ``torch.optim.SGD``: with v₀ = 0,
    ``g = ∇L(θ) + weight_decay·θ``, ``v ← momentum·v + g``, ``θ ← θ − learning_rate·v``.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        params: θ_t.
        batch: all N samples of the round; the schedule says which are used at which step.
        schedule: learning rate, steps, batch size, momentum, weight decay.
        buffers: BatchNorm statistics, where the map uses running ones.

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
