"""A function at one point, with graphs for many products with its Jacobian."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Linearized(Protocol):
    """A function f(x) with products with J = ∂f/∂x (P, N) at one point x."""

    @property
    def value(self) -> Tensor:
        """(P,) f(x)."""

    @property
    def products(self) -> int:
        """Number of products with J or its transpose so far."""

    def push(self, direction: Tensor) -> Tensor:
        """Return J v (P,), for v of the point's shape."""

    def pull(self, dual: Tensor) -> Tensor:
        """Return Jᵀ u, of the point's shape, for u (P,)."""


class Products:
    """A linearised function that is given by its value and its two products.

    Attributes:
        value: (P,) f(x).
        products: number of products with J or its transpose so far.
    """

    def __init__(
        self,
        value: Tensor,
        push: Callable[[Tensor], Tensor],
        pull: Callable[[Tensor], Tensor],
    ) -> None:
        """Take f(x), and the maps v ↦ J v and u ↦ Jᵀ u."""
        self.value, self._push, self._pull = value, push, pull
        self.products = 0

    @classmethod
    def sum_of(cls, parts: Sequence[Linearized], value: Tensor) -> "Products":
        """Return the sum of a constant and of linearised functions, whose value is given."""
        return cls(
            value,
            lambda direction: torch.stack([part.push(direction) for part in parts]).sum(0),
            lambda dual: torch.stack([part.pull(dual) for part in parts]).sum(0),
        )

    def push(self, direction: Tensor) -> Tensor:
        """Return J v (P,), for v of the point's shape."""
        self.products += 1
        return self._push(direction)

    def pull(self, dual: Tensor) -> Tensor:
        """Return Jᵀ u, of the point's shape, for u (P,)."""
        self.products += 1
        return self._pull(dual)


class Linearization:
    """A function f(x) with products with J = ∂f/∂x (P, N) at x, by autograd.

    Both graphs are built once. ``Jᵀu`` is a backward pass of f. It is linear in u, so that ``Jv``
    is a backward pass of ``u ↦ Jᵀu`` at any u.

    Attributes:
        value: (P,) f(x).
        products: number of products with J or its transpose so far.
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
        """Return J v (P,), for v of the point's shape."""
        self.products += 1
        (image,) = torch.autograd.grad(self._pulled, self._dual, direction, retain_graph=True)
        return image

    def pull(self, dual: Tensor) -> Tensor:
        """Return Jᵀ u, of the point's shape, for u (P,)."""
        self.products += 1
        (image,) = torch.autograd.grad(self._output, self._point, dual, retain_graph=True)
        return image

    def columns(self, directions: Tensor) -> Tensor:
        """Return J v (M, P) for M directions v (M, ...), computed at once."""
        self.products += len(directions)
        (images,) = torch.autograd.grad(
            self._pulled, self._dual, directions, retain_graph=True, is_grads_batched=True
        )
        return images
