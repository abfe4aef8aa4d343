"""Linearise a function at one point, for many products with its Jacobian."""

from collections.abc import Callable

import torch
from torch import Tensor


class Linearized:
    """A function f(x) at one point x, given by its value and its products with J = ∂f/∂x (P, N).

    Attributes:
        value: (P,) f(x).
        products: number of products with J or its transpose so far.
    """

    def __init__(
        self, value: Tensor, push: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor]
    ) -> None:
        """Take f(x), and the maps v ↦ J v and u ↦ Jᵀ u."""
        self.value, self._push, self._pull = value, push, pull
        self.products = 0

    def push(self, direction: Tensor) -> Tensor:
        """Return J v (P,), for v of the point's shape."""
        self.products += 1
        return self._push(direction)

    def pull(self, dual: Tensor) -> Tensor:
        """Return Jᵀ u, of the point's shape, for u (P,)."""
        self.products += 1
        return self._pull(dual)


class Linearization(Linearized):
    """A function that is linearised by autograd, with graphs that are built once.

    ``Jᵀu`` is a backward pass of f. It is linear in u, so that ``Jv`` is a backward pass of
    ``u ↦ Jᵀu`` at any u.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], point: Tensor) -> None:
        """Evaluate f, which returns a flat tensor, at a point of any shape."""
        at = point.detach().requires_grad_()
        with torch.enable_grad():
            output = function(at)
            dual = torch.zeros_like(output, requires_grad=True)
            (pulled,) = torch.autograd.grad(output, at, dual, create_graph=True)

        def columns(directions: Tensor, batched: bool = True) -> Tensor:
            (images,) = torch.autograd.grad(
                pulled, dual, directions, retain_graph=True, is_grads_batched=batched
            )
            return images

        def pull(given: Tensor) -> Tensor:
            (image,) = torch.autograd.grad(output, at, given, retain_graph=True)
            return image

        super().__init__(output.detach(), lambda direction: columns(direction, False), pull)
        self._columns = columns

    def columns(self, directions: Tensor) -> Tensor:
        """Return J v (M, P) for M directions v (M, ...), computed at once."""
        self.products += len(directions)
        return self._columns(directions)
