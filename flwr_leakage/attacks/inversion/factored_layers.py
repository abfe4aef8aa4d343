"""Layers with constant weights, differentiable twice in their inputs; see ``factored``."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Matrices:
    """Products of rows with constant weights.

    Each weight is stored once as it is, which a product needs, and once transposed, which the
    product's derivative needs.
    """

    def __init__(self) -> None:
        self.cache: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def product(self, rows: Tensor, name: str, weight: Tensor, target: int = -1) -> Tensor:
        """Return ``rows @ Wᵀ`` (S, N) of rows (S, K), differentiable in the rows.

        Args:
            rows: (S, K) rows.
            name: the name of the weight.
            weight: (N, ...) the weight, with K entries in each row.
            target: index of the target whose gradient serves as the weight; −1 for the model's own
                weight.
        """
        if (name, target) not in self.cache:
            matrix = weight.flatten(1).contiguous()
            self.cache[name, target] = matrix, matrix.T.contiguous()
        return _Product.apply(rows, *self.cache[name, target])


class _Product(torch.autograd.Function):
    """``rows @ Wᵀ``, whose derivative ``errors @ W`` is the same function of Wᵀ."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, transposed: Tensor) -> Tensor:
        ctx.save_for_backward(weight, transposed)
        return multiply(rows, weight)

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor, None, None]:
        weight, transposed = ctx.saved_tensors
        return _Product.apply(errors, transposed, weight), None, None


def multiply(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows @ weightᵀ``, by oneDNN if torch was built with it.

    The BLAS that torch ships for x86 is up to two times slower than oneDNN on processors of
    makers other than its own.
    """
    fits = rows.device.type == "cpu" and rows.dtype == torch.float32 and len(rows) > 1
    if fits and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(rows.contiguous(), weight, None, "none", [], "")
    return rows @ weight.T


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...]
) -> Tensor:
    """Return a convolution with constant weights, which a second derivative does not include.

    Args:
        inputs: (S, C, H, W) images.
        weight: (N, C, k, k) weight.
        bias: (N,) bias, or ``None``.
        settings: stride, padding and dilation, two numbers each.
    """
    outputs: Tensor = _Convolution.apply(inputs, weight, bias, settings)
    return outputs


class _Convolution(torch.autograd.Function):
    """The convolution that :func:`convolve` computes, with its own derivative."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.settings = settings
        return F.conv2d(inputs, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor, None, None, None]:
        inputs, weight = ctx.saved_tensors
        return _TransposedConvolution.apply(errors, weight, inputs, ctx.settings), None, None, None


class _TransposedConvolution(torch.autograd.Function):
    """The derivative of :class:`_Convolution`, whose own derivative is the convolution."""

    @staticmethod
    def forward(
        ctx: Any, errors: Tensor, weight: Tensor, like: Tensor, settings: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.settings = settings
        return _convolution_backward(errors, like, weight, settings, 1, 0)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _Convolution.apply(outer, weight, None, ctx.settings), None, None, None


def convolution_products(
    inputs: Tensor, errors: Tensor, observed: Tensor, settings: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Return ⟨g, g*⟩ and ‖g‖², (A,) each, of A targets' weight gradients g of a convolution.

    The targets are groups of one convolution.

    Args:
        inputs: (A · B, C, H, W) inputs, with B samples for each target.
        errors: (A · B, N, h, w) errors of the outputs.
        observed: (A, N, C, k, k) g*.
        settings: stride, padding and dilation, two numbers each.
    """
    inner, squared = _ConvolutionProducts.apply(inputs, errors, observed, settings)
    return inner, squared


class _ConvolutionProducts(torch.autograd.Function):
    """The products that :func:`convolution_products` computes, with their own derivative."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, errors: Tensor, observed: Tensor, settings: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        count = len(observed)
        inputs, errors = _grouped(inputs, count), _grouped(errors, count)
        weight = observed.flatten(0, 1)
        gradient = _convolution_backward(errors, inputs, weight, settings, count, 1)
        gradient = gradient.view_as(observed)
        ctx.save_for_backward(inputs, errors, observed, gradient)
        ctx.settings = settings
        return (gradient * observed).flatten(1).sum(1), gradient.square().flatten(1).sum(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, inner: Tensor, squared: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inputs, errors, observed, gradient = ctx.saved_tensors
        count, over = len(observed), (-1, 1, 1, 1, 1)
        outer = torch.addcmul(inner.view(over) * observed, squared.view(over), gradient, value=2)
        weight = outer.flatten(0, 1)
        to_inputs = _convolution_backward(errors, inputs, weight, ctx.settings, count, 0)
        stride, padding, dilation = ctx.settings
        to_errors = F.conv2d(inputs, weight, None, stride, padding, dilation, count)
        return _ungrouped(to_inputs, count), _ungrouped(to_errors, count), None, None


def _grouped(images: Tensor, count: int) -> Tensor:
    """Return (A · B, C, H, W) of A targets as (B, A · C, H, W)."""
    return images.unflatten(0, (count, -1)).transpose(0, 1).flatten(1, 2)


def _ungrouped(images: Tensor, count: int) -> Tensor:
    """Return (B, A · C, H, W) as (A · B, C, H, W)."""
    return images.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)


def _convolution_backward(
    errors: Tensor,
    inputs: Tensor,
    weight: Tensor,
    settings: tuple[Any, ...],
    groups: int,
    wanted: int,
) -> Tensor:
    """Return the derivative with respect to the input (``wanted`` = 0) or to the weight (1)."""
    stride, padding, dilation = settings
    mask = [wanted == 0, wanted == 1, False]
    derivative: Tensor = torch.ops.aten.convolution_backward(
        errors, inputs, weight, None, stride, padding, dilation, False, [0, 0], groups, mask
    )[wanted]
    return derivative
