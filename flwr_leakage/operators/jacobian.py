"""The Jacobian of the gradient map: J = ∂ₓ∂_θL, per sample, per batch and per local update.

Let F: x ↦ ∇_θL(x, y; θ) and A = ∂F/∂x ∈ R^{P×N}, so that J = ∇ₓ∇_θL (Zhang et al. 2023, section 3)
is Aᵀ ∈ R^{N×P}; that of Hong et al. 2024, theorem 3, is A. ``rmatvec`` is the pullback of F.
It is linear in its argument, so its own pullback is ``matvec``: both graphs are built once at a
point, and a product walks them without a new forward pass.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, zeros_like
from torch.func import jvp, vjp, vmap

from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.operators.base import DeferredRows, LinearOperator
from flwr_leakage.operators.budget import Meter
from flwr_leakage.params import Params, ravel
from flwr_leakage.records import Batch, LocalSchedule

Function = Callable[[Tensor], Tensor]


class FunctionJacobian(LinearOperator):
    """∂F/∂x at ``point``, with ``value`` F(x), of a function of S independent rows.

    ``value_product`` is (∂F/∂x)ᵀF(x) = ∇ₓ‖F(x)‖²/2, a product that building the graphs leaves.

    Args:
        function: F: (S, N) → (S, P), row s of the result depending on row s alone.
        point: x, (S, N), floating.
        meter: see ``LinearOperator``.
        rounding: see ``LinearOperator``.
        plain: differentiate by plain autograd, for a function that ``torch.func`` cannot take.

    Raises:
        ValueError: the point is no (S, N) floating-point tensor.
        RuntimeError: an operation of the function has no derivative.
    """

    def __init__(
        self,
        function: Function,
        point: Float[Tensor, "S N"],
        meter: Meter | None = None,
        rounding: Float[Tensor, " S"] | None = None,
        plain: bool = False,
    ) -> None:
        if point.ndim != 2 or not point.is_floating_point():
            raise ValueError(
                f"point must be a floating-point tensor of shape (S, N), got "
                f"{point.dtype} of shape {tuple(point.shape)}."
            )
        point = point.detach()
        pull = _autograd_pullback if plain else _pullback
        self.value, pullback = pull(function, point)
        num_blocks, num_inputs = point.shape
        super().__init__(num_blocks, num_inputs, self.value.shape[1], point, meter, rounding)
        self.point = point
        self._pullback = pullback
        try:
            # The pullback is linear, so that any u serves; F(x) is asked for later anyway.
            product, self._pushforward = pull(pullback, self.value)
        except RuntimeError as error:
            try:
                product = pullback(self.value)
            except RuntimeError:
                plain = True
            if plain:
                raise RuntimeError(
                    f"the model's gradient cannot be differentiated in its inputs: {error}"
                ) from error
            # A few operations have no third derivative; forward mode needs two only.
            self._pushforward = lambda v: jvp(function, (point,), (v,))[1]
        self.value_product = product.detach()

    def _matvec(self, vectors: Tensor) -> Tensor:
        return self._pushforward(vectors).detach()

    def _rmatvec(self, vectors: Tensor) -> Tensor:
        return self._pullback(vectors).detach()


def _pullback(function: Function, point: Tensor) -> tuple[Tensor, Function]:
    """Return F(x), and u ↦ (∂F/∂x)ᵀu on a graph that is kept."""
    value, backward = vjp(function, point)[:2]
    return value, lambda vectors: backward(vectors)[0]


def _autograd_pullback(function: Function, point: Tensor) -> tuple[Tensor, Function]:
    """Do what ``_pullback`` does by plain autograd; zeros if the value depends on nothing."""
    with torch.enable_grad():
        leaf = point.detach().requires_grad_()
        value = function(leaf)

    def pull(vectors: Tensor) -> Tensor:
        if not value.requires_grad:
            return torch.zeros_like(leaf)
        return torch.autograd.grad(
            value,
            leaf,
            vectors,
            retain_graph=True,
            create_graph=vectors.requires_grad,
            materialize_grads=True,
        )[0]

    return value.detach(), pull


def sample_gradients(
    gradient_map: GradientMap,
    params: Mapping[str, Tensor],
    batch: Batch,
    buffers: Mapping[str, Tensor] | None = None,
    names: Collection[str] | None = None,
) -> Float[Tensor, "S P"]:
    """Return ∇_θL of each of S samples on its own, flat, in the order of ``params``.

    Args:
        gradient_map: the gradient map of the client's model and loss; its BatchNorm must not use
            the statistics of the batch, which a sample on its own does not have.
        params: θ.
        batch: S samples.
        buffers: BatchNorm statistics for the map to use.
        names: the parameters whose gradients are wanted; all of them by default. Those that are
            not trained have zeros.
    """
    chosen = {name: value for name, value in params.items() if names is None or name in names}
    wanted = {name: value for name, value in chosen.items() if name in gradient_map.trained}

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        sample = Batch(x[None], y[None])
        found = gradient_map.gradient_of(wanted, params, sample, buffers)
        # A parameter that is not trained leaves nothing in the update.
        return ravel({k: found[k] if k in found else zeros_like(v) for k, v in chosen.items()})

    if gradient_map.one_by_one:
        pairs = zip(batch.inputs, batch.targets, strict=True)
        return torch.stack([gradient(x, y) for x, y in pairs])
    return vmap(gradient)(batch.inputs, batch.targets)


def last_layer(names: Iterable[str]) -> tuple[str, ...]:
    """Return the parameters of the module that owns the last one."""
    every = tuple(names)
    owner = every[-1].rpartition(".")[0]
    return tuple(name for name in every if name.rpartition(".")[0] == owner)


class SampleJacobian(FunctionJacobian):
    """∂ₓ∂_θL of each of S samples on its own: S maps R^{C·H·W} → R^P.

    Args:
        gradient_map: the gradient map of the client's model and loss; its BatchNorm must not use
            the statistics of the batch, which a sample on its own does not have.
        params: θ.
        batch: S samples.
        buffers: BatchNorm statistics for the map to use.
        meter: see ``LinearOperator``.
        rounding: see ``LinearOperator``.
        names: the parameters whose gradients are differentiated; all of them by default.
    """

    def __init__(
        self,
        gradient_map: GradientMap,
        params: Mapping[str, Tensor],
        batch: Batch,
        buffers: Mapping[str, Tensor] | None = None,
        meter: Meter | None = None,
        rounding: Float[Tensor, " S"] | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        _require_floating(batch.inputs)
        theta: Params = dict(params)

        def function(x: Tensor) -> Tensor:
            samples = Batch(x.reshape(batch.inputs.shape), batch.targets)
            return sample_gradients(gradient_map, theta, samples, buffers, names)

        plain = bool(gradient_map.one_by_one)
        super().__init__(function, batch.inputs.flatten(1), meter, rounding, plain)
        self._last_layer = last_layer(name for name in params if name in gradient_map.trained)
        self._of = partial(SampleJacobian, gradient_map, theta, buffers=buffers, meter=self.meter)
        self._batch = batch
        self._names = names

    def last_layer(self) -> "SampleJacobian":
        """Return the Jacobian of the same samples' gradients by the last layer's parameters alone.

        It maps R^{C·H·W} to R^{P'}, with the P' entries of that layer's trained parameters.
        """
        return self._of(self._batch, rounding=self.rounding, names=self._last_layer)

    def narrow(self, rows: Int[Tensor, " R"]) -> LinearOperator:
        """See ``LinearOperator``; the graphs of a half of the samples or fewer are built anew."""
        if 2 * len(rows) > self.num_blocks:
            return super().narrow(rows)
        batch, rounding, names, of = self._batch, self.rounding, self._names, self._of
        return DeferredRows(self, lambda r: of(batch[r], rounding=rounding[r], names=names), rows)


class BatchJacobian(FunctionJacobian):
    """∂ₓ∂_θL of the mean loss of a whole batch: one map R^{B·C·H·W} → R^P.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        params: θ.
        batch: B samples.
        buffers: BatchNorm statistics for the map to use.
        meter: see ``LinearOperator``; a product counts once for each sample.
    """

    def __init__(
        self,
        gradient_map: GradientMap,
        params: Mapping[str, Tensor],
        batch: Batch,
        buffers: Mapping[str, Tensor] | None = None,
        meter: Meter | None = None,
    ) -> None:
        _require_floating(batch.inputs)
        theta = dict(params)

        def function(x: Tensor) -> Tensor:
            inputs = x.reshape(batch.inputs.shape)
            return ravel(gradient_map(theta, Batch(inputs, batch.targets), buffers))[None]

        plain = bool(gradient_map.one_by_one)
        super().__init__(function, batch.inputs.reshape(1, -1), meter, plain=plain)
        self.samples_a_product = len(batch)


class UpdateJacobian(FunctionJacobian):
    """Jacobian of a whole local training: x ↦ −(θ_local − θ_t)/learning_rate.

    One map R^{N·C·H·W} → R^P over all samples of the round; for one plain step over all of
    them it equals ``BatchJacobian``.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        params: θ_t.
        batch: all samples of the round.
        schedule: the schedule of the local training.
        buffers: BatchNorm statistics for the map to use.
        meter: see ``LinearOperator``; a product counts once for each sample of each step.
    """

    def __init__(
        self,
        gradient_map: GradientMap,
        params: Mapping[str, Tensor],
        batch: Batch,
        schedule: LocalSchedule,
        buffers: Mapping[str, Tensor] | None = None,
        meter: Meter | None = None,
    ) -> None:
        _require_floating(batch.inputs)
        theta: Params = dict(params)

        def function(x: Tensor) -> Tensor:
            samples = Batch(x.reshape(batch.inputs.shape), batch.targets)
            delta = local_update(gradient_map, theta, samples, schedule, buffers)
            return -ravel(delta)[None] / schedule.learning_rate

        plain = bool(gradient_map.one_by_one)
        super().__init__(function, batch.inputs.reshape(1, -1), meter, plain=plain)
        windows = schedule.slices(len(batch))
        self.samples_a_product = sum(window.stop - window.start for window in windows)


def _require_floating(inputs: Tensor) -> None:
    if not inputs.is_floating_point():
        raise ValueError(
            f"inputs must be floating-point to be differentiated, got {inputs.dtype}; convert "
            f"images to floats, and score the embeddings of tokens."
        )
