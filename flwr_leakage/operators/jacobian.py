"""Operators of the Jacobian of the gradient map, of a sample, a batch or a local training.

Let F: x ↦ ∇_θL(x, y; θ) be the gradient map and A = ∂F/∂x ∈ R^{P×N}. Then J = ∇ₓ∇_θL of Zhang et
al. (2023, section 3) is Aᵀ ∈ R^{N×P}, while J of Hong et al. (2024, theorem 3) is A. The product u
↦ Aᵀu (``rmatvec``) is the pullback of F. It is linear in u, so that its own pullback is v ↦ Av
(``matvec``). Both graphs are built once at a point, and a product runs through them without a new
forward pass.
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
    """The operator ∂F/∂x of a function F of S independent rows, at a point x.

    Its attribute ``value`` is F(x), and ``value_product`` is (∂F/∂x)ᵀF(x) = ∇ₓ‖F(x)‖²/2.

    Args:
        function: F, from (S, N) to (S, P), where row s of the result depends on row s alone.
        point: the floating-point inputs x, (S, N).
        meter: the meter that counts products; see ``LinearOperator``.
        rounding: (S,) the relative rounding error of a product; see ``LinearOperator``.
        plain: whether F is differentiated by plain autograd, as ``torch.func`` does not support it.

    Raises:
        ValueError: the point is no floating-point tensor of shape (S, N).
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
            # The pullback u ↦ (∂F/∂x)ᵀu is linear, so that its Jacobian is the same at every u. It
            # is taken at u = F(x), as the pullback's value there is ``value_product``.
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
            # A few operations lack the third derivative that the pullback of a pullback takes. So
            # products v ↦ (∂F/∂x)v use forward mode here, which needs two derivatives only.
            self._pushforward = lambda v: jvp(function, (point,), (v,))[1]
        self.value_product = product.detach()

    def _matvec(self, vectors: Tensor) -> Tensor:
        return self._pushforward(vectors).detach()

    def _rmatvec(self, vectors: Tensor) -> Tensor:
        return self._pullback(vectors).detach()


def _pullback(function: Function, point: Tensor) -> tuple[Tensor, Function]:
    """Return F(x) at a point x, and u ↦ (∂F/∂x)ᵀu, whose graph is kept for many calls."""
    value, backward = vjp(function, point)[:2]
    return value, lambda vectors: backward(vectors)[0]


def _autograd_pullback(function: Function, point: Tensor) -> tuple[Tensor, Function]:
    """Return F(x), and the function u ↦ (∂F/∂x)ᵀu, both by plain autograd. The function gives zeros
    if F(x) does not depend on x.
    """
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
    """Return the gradient ∇_θL of each of S samples alone, as flat rows in the order of ``params``.

    Args:
        gradient_map: the gradient map, whose BatchNorm must not use batch statistics.
        params: the parameters θ, by name.
        batch: the S samples.
        buffers: the BatchNorm statistics that the map uses; by default the model's own.
        names: the parameters whose gradients are returned; all by default, zero if not trained.
    """
    chosen = {name: value for name, value in params.items() if names is None or name in names}
    wanted = {name: value for name, value in chosen.items() if name in gradient_map.trained}

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        sample = Batch(x[None], y[None])
        found = gradient_map.gradient_of(wanted, params, sample, buffers)
        # A parameter that is not trained does not change, so that its gradient counts as zero.
        return ravel({k: found[k] if k in found else zeros_like(v) for k, v in chosen.items()})

    if gradient_map.one_by_one:
        pairs = zip(batch.inputs, batch.targets, strict=True)
        return torch.stack([gradient(x, y) for x, y in pairs])
    return vmap(gradient)(batch.inputs, batch.targets)


def last_layer(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the parameters' ``names`` that belong to the module of the last name."""
    every = tuple(names)
    owner = every[-1].rpartition(".")[0]
    return tuple(name for name in every if name.rpartition(".")[0] == owner)


class SampleJacobian(FunctionJacobian):
    """The Jacobian ∂ₓ∂_θL of the gradient of each of S samples alone: S maps R^{C·H·W} → R^P.

    Args:
        gradient_map: the gradient map, whose BatchNorm must not use batch statistics.
        params: the parameters θ, by name.
        batch: the S samples.
        buffers: the BatchNorm statistics that the map uses; by default the model's own.
        meter: the meter that counts products; see ``LinearOperator``.
        rounding: (S,) the relative rounding error of a product; see ``LinearOperator``.
        names: the names of the parameters whose gradients are differentiated; all by default.
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
        """Return the Jacobian of the same samples' gradients by the last layer's trained parameters
        alone.
        """
        return self._of(self._batch, rounding=self.rounding, names=self._last_layer)

    def narrow(self, rows: Int[Tensor, " R"]) -> LinearOperator:
        """Return the operator of the samples with the indices ``rows`` alone.

        If these are at most half of the samples, autograd graphs of them alone are built after a
        few products. Otherwise each product computes all samples.
        """
        if 2 * len(rows) > self.num_blocks:
            return super().narrow(rows)
        batch, rounding, names, of = self._batch, self.rounding, self._names, self._of
        return DeferredRows(self, lambda r: of(batch[r], rounding=rounding[r], names=names), rows)


class BatchJacobian(FunctionJacobian):
    """The Jacobian ∂ₓ∂_θL of the gradient of a whole batch's loss: one map R^{B·C·H·W} → R^P.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        params: the parameters θ, by name.
        batch: the B samples.
        buffers: the BatchNorm statistics that the map uses; by default the model's own.
        meter: the meter that counts products, a product once for each sample; see
            ``LinearOperator``.
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
    """The Jacobian of a whole local training's pseudo-gradient, −(θ_local − θ_t)/learning_rate.

    It is one map R^{N·C·H·W} → R^P of all N samples of the round. For one plain step over all of
    them it equals ``BatchJacobian``.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        params: the parameters θ_t before training, by name.
        batch: all N samples of the round.
        schedule: the schedule of the local training.
        buffers: the BatchNorm statistics that the map uses; by default the model's own.
        meter: the meter that counts products, a product once for each sample of each step; see
            ``LinearOperator``.
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
