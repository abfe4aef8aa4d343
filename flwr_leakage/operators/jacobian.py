"""The Jacobian of the gradient map: J = ∂ₓ∂_θL, per sample, per batch and per local update.

Let F: x ↦ ∇_θL(x, y; θ) and A = ∂F/∂x ∈ R^{P×N}, so that the papers' J = ∇ₓ∇_θL (Zhang et al.
2023, section 3; Hong et al. 2024, section 3) is Aᵀ ∈ R^{N×P}. ``rmatvec`` is the pullback of F.
It is linear in its argument, so its own pullback is ``matvec``: both graphs are built once at a
point, and a product walks them without a new forward pass.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.operators.budget import Meter
from flwr_leakage.params import Params, ravel
from flwr_leakage.records import Batch, LocalSchedule

Function = Callable[[Tensor], Tensor]


class FunctionJacobian(LinearOperator):
    """∂F/∂x at ``point``, with ``value`` F(x), of a function of S independent rows.

    Args:
        function: F: (S, N) → (S, P), row s of the result depending on row s alone.
        point: x, (S, N), floating.
        meter: see ``LinearOperator``.
        rounding: see ``LinearOperator``.

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
    ) -> None:
        if point.ndim != 2 or not point.is_floating_point():
            raise ValueError(
                f"point must be a floating-point tensor of shape (S, N), got "
                f"{point.dtype} of shape {tuple(point.shape)}."
            )
        point = point.detach()
        self.value, pullback = _pullback(function, point)
        num_blocks, num_inputs = point.shape
        super().__init__(num_blocks, num_inputs, self.value.shape[1], point, meter, rounding)
        self.point = point
        self._pullback = pullback
        try:
            _, self._pushforward = _pullback(pullback, torch.zeros_like(self.value))
        except RuntimeError as error:
            try:
                pullback(torch.zeros_like(self.value))
            except RuntimeError:
                raise RuntimeError(
                    f"the model's gradient cannot be differentiated in its inputs: {error}"
                ) from error
            # A few operations have no third derivative; forward mode needs two only.
            self._pushforward = lambda v: jvp(function, (point,), (v,))[1]

    def _matvec(self, vectors: Tensor) -> Tensor:
        return self._pushforward(vectors).detach()

    def _rmatvec(self, vectors: Tensor) -> Tensor:
        return self._pullback(vectors).detach()


def _pullback(function: Function, point: Tensor) -> tuple[Tensor, Function]:
    """F(x), and u ↦ (∂F/∂x)ᵀu on a graph that is kept."""
    value, backward = vjp(function, point)[:2]
    return value, lambda vectors: backward(vectors)[0]


def sample_gradients(
    gradient_map: GradientMap,
    params: Mapping[str, Tensor],
    batch: Batch,
    buffers: Mapping[str, Tensor] | None = None,
    names: Collection[str] | None = None,
) -> Float[Tensor, "S P"]:
    """∇_θL of each of S samples on its own, flat, in the order of ``params``.

    Args:
        gradient_map: of the client's model and loss; its BatchNorm must not use the statistics
            of the batch, which a sample on its own does not have.
        params: θ.
        batch: S samples.
        buffers: BatchNorm statistics for the map to use.
        names: the parameters whose gradients are wanted; all of them by default.
    """
    wanted = {name: value for name, value in params.items() if names is None or name in names}

    def loss(part: Params, x: Tensor, y: Tensor) -> Tensor:
        return gradient_map.loss_value({**params, **part}, Batch(x[None], y[None]), buffers)

    return vmap(lambda x, y: ravel(grad(loss)(wanted, x, y)))(batch.inputs, batch.targets)


def last_layer(names: Iterable[str]) -> tuple[str, ...]:
    """The parameters of the module that owns the last one."""
    every = tuple(names)
    owner = every[-1].rpartition(".")[0]
    return tuple(name for name in every if name.rpartition(".")[0] == owner)


class SampleJacobian(FunctionJacobian):
    """∂ₓ∂_θL of each of S samples on its own: S maps R^{C·H·W} → R^P.

    Args:
        gradient_map: of the client's model and loss; its BatchNorm must not use the statistics
            of the batch, which a sample on its own does not have.
        params: θ.
        batch: S samples.
        buffers: BatchNorm statistics for the map to use.
        meter: see ``LinearOperator``.
        rounding: see ``LinearOperator``.
    """

    def __init__(
        self,
        gradient_map: GradientMap,
        params: Mapping[str, Tensor],
        batch: Batch,
        buffers: Mapping[str, Tensor] | None = None,
        meter: Meter | None = None,
        rounding: Float[Tensor, " S"] | None = None,
    ) -> None:
        _require_floating(batch.inputs)
        theta: Params = dict(params)

        def function(x: Tensor, names: Collection[str] | None = None) -> Tensor:
            samples = Batch(x.reshape(batch.inputs.shape), batch.targets)
            return sample_gradients(gradient_map, theta, samples, buffers, names)

        super().__init__(function, batch.inputs.flatten(1), meter, rounding)
        self._function = function
        self._last_layer = last_layer(params)

    def last_layer(self) -> FunctionJacobian:
        """The Jacobian of the last layer's gradient alone."""
        function = partial(self._function, names=self._last_layer)
        return FunctionJacobian(function, self.point, self.meter)


class BatchJacobian(FunctionJacobian):
    """∂ₓ∂_θL of the mean loss of a whole batch: one map R^{B·C·H·W} → R^P.

    Args:
        gradient_map: of the client's model and loss.
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

        super().__init__(function, batch.inputs.reshape(1, -1), meter)
        self.samples_a_product = len(batch)


class UpdateJacobian(FunctionJacobian):
    """Jacobian of a whole local training: x ↦ −(θ_local − θ_t)/learning_rate.

    One map R^{N·C·H·W} → R^P over all samples of the round; for one plain step over all of
    them it equals ``BatchJacobian``.

    Args:
        gradient_map: of the client's model and loss.
        params: θ_t.
        batch: all samples of the round.
        schedule: of the local training.
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

        super().__init__(function, batch.inputs.reshape(1, -1), meter)
        windows = schedule.slices(len(batch))
        self.samples_a_product = sum(window.stop - window.start for window in windows)


def _require_floating(inputs: Tensor) -> None:
    if not inputs.is_floating_point():
        raise ValueError(
            f"inputs must be floating-point to be differentiated, got {inputs.dtype}; convert "
            f"images to floats, and score the embeddings of tokens."
        )
