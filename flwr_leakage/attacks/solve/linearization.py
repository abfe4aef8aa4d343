"""A function and its Jacobian at one point, by graphs that are kept for many products."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Linearized(Protocol):
    """f(x) and products with J = ∂f/∂x (P, N) at one point x."""

    @property
    def value(self) -> Tensor:
        """f(x), (P,)."""

    @property
    def products(self) -> int:
        """How many products with J or its transpose were computed so far."""

    def push(self, direction: Tensor) -> Tensor:
        """J v (P,), for v of the point's shape."""

    def pull(self, dual: Tensor) -> Tensor:
        """Jᵀ u, of the point's shape, for u (P,)."""


@dataclass
class Products:
    """A linear map that is told by its two products; see :class:`Linearized`."""

    value: Tensor
    push: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor], Tensor]
    products: int = 0


class Linearization:
    """f(x) and products with J = ∂f/∂x (P, N) at x.

    Both graphs are built once. ``Jᵀu`` is a backward pass of f. It is linear in u, so that ``Jv``
    is a backward pass of ``u ↦ Jᵀu``, whatever u is.

    Attributes:
        value: f(x), (P,).
        products: with J or its transpose, so far.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], point: Tensor) -> None:
        """Evaluate f, which returns a flat tensor, at a point of any shape."""
        self._point = point.detach().requires_grad_()
        with torch.enable_grad():
            self._output = function(self._point)
            self._dual = torch.zeros_like(self._output, requires_grad=True)
            (self._pulled,) = torch.autograd.grad(
                self._output, self._point, self._dual, create_graph=True
            )
        self.value = self._output.detach()
        self.products = 0

    def push(self, direction: Tensor) -> Tensor:
        """J v (P,), for v of the point's shape."""
        self.products += 1
        (image,) = torch.autograd.grad(self._pulled, self._dual, direction, retain_graph=True)
        return image

    def pull(self, dual: Tensor) -> Tensor:
        """Jᵀ u, of the point's shape, for u (P,)."""
        self.products += 1
        (image,) = torch.autograd.grad(self._output, self._point, dual, retain_graph=True)
        return image

    def columns(self, directions: Tensor) -> Tensor:
        """J v (M, P) for M directions v (M, ...), computed at once."""
        self.products += len(directions)
        (images,) = torch.autograd.grad(
            self._pulled, self._dual, directions, retain_graph=True, is_grads_batched=True
        )
        return images
