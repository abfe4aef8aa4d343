"""ReLU whose second derivative is smoothed, so that matching gradients sees where it flips.

A ReLU network's gradient depends on x through masks ``1[z > 0]``, whose derivative is zero
wherever it exists: an attack that descends on a distance of gradients is blind to every flip
that would lower it. Here the activation and its first derivative stay exact, so that the
candidate's gradient is the true one, and only the derivative *of the mask* is replaced by that
of a sigmoid: ``d1[z > 0]/dz := β σ'(β z) = β σ(βz) (1 − σ(βz))``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flwr_leakage.attacks.relus import relu_call
from flwr_leakage.function_mode import FunctionMode


def smoothed_relu(inputs: Tensor, sharpness: float) -> Tensor:
    """``max(0, z)``: exact in value and first derivative, smoothed in the second.

    Args:
        inputs: z, of any shape.
        sharpness: β > 0, in units of 1/z; the mask's derivative has width 1/β and area one.
    """
    outputs: Tensor = _Relu.apply(inputs, sharpness)
    return outputs


class SmoothedRelu(FunctionMode):
    """Within this context every ReLU is a :func:`smoothed_relu`.

    It catches every spelling that :func:`flwr_leakage.attacks.relus.relu_call` knows, so that any
    model can be attacked as it is.

    Args:
        sharpness: β > 0.
    """

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        if sharpness <= 0:
            raise ValueError(f"sharpness must be positive, got {sharpness}.")
        self.sharpness = sharpness

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call :func:`smoothed_relu` in place of a ReLU, and any other function as it is."""
        call = relu_call(function, args, kwargs)
        if call is None:
            return function(*args, **kwargs)
        inputs = call.inputs.clone() if call.in_place else call.inputs
        return call.answer(smoothed_relu(inputs, self.sharpness))


class _Relu(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, sharpness: float) -> Tensor:
        return inputs.clamp_min(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.sharpness = inputs[1]

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor, None]:
        return _Masked.apply(errors, ctx.saved_tensors[0], ctx.sharpness), None


class _Masked(torch.autograd.Function):
    """``e · 1[z > 0]``, with the mask's derivative smoothed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(errors: Tensor, inputs: Tensor, sharpness: float) -> Tensor:
        return torch.where(inputs > 0, errors, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.sharpness = inputs[2]

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None]:
        errors, inputs = ctx.saved_tensors
        sigmoid = torch.sigmoid(ctx.sharpness * inputs)
        slope = ctx.sharpness * sigmoid * (1 - sigmoid)
        return torch.where(inputs > 0, outer, 0.0), outer * errors * slope, None
