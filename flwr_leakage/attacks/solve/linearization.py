"""Linearise a function at one point, for many products with its Jacobian."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Linearized:
    """A function f at one point x, given by f(x) and by products with J = ∂f/∂x (P, N).

    Attributes:
        value: (P,) f(x).
        products: number of products with J or its transpose so far.
    """

    def __init__(
        self, value: Tensor, push: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor]
    ) -> None:
        """Take the value f(x), and the maps v ↦ J v and u ↦ Jᵀ u."""
        self.value, self._push, self._pull = value, push, pull
        self.products = 0

    def push(self, direction: Tensor) -> Tensor:
        """Return the product J v (P,) for a direction v of the point's shape."""
        self.products += 1
        return self._push(direction)

    def pull(self, dual: Tensor) -> Tensor:
        """Return the product Jᵀ u, of the point's shape, for a vector u (P,)."""
        self.products += 1
        return self._pull(dual)


class Linearization(Linearized):
    """A function f that autograd linearises, with graphs that are built once.

    ``Jᵀu`` is a backward pass of f. It is linear in u, so that ``Jv`` is a backward pass of
    ``u ↦ Jᵀu`` at any u. If f has several parts, each has a vector u of its own: autograd would
    fill a common one anew for each part, which would take most of the time of large networks.
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor | Sequence[Tensor]], point: Tensor
    ) -> None:
        """Evaluate f at a point. f returns one tensor or several parts, all of any shape.

        Raises:
            ValueError: no part depends on the point.
        """
        at = point.detach().requires_grad_()
        with torch.enable_grad():
            found = function(at)
            parts = (found,) if isinstance(found, Tensor) else found
            outputs = [part for part in parts if part.requires_grad]
            if not outputs:
                raise ValueError("the gradient does not depend on the inputs.")
            duals = [torch.zeros_like(output, requires_grad=True) for output in outputs]
            (pulled,) = torch.autograd.grad(outputs, at, duals, create_graph=True)

        def columns(directions: Tensor, batched: bool = True) -> Tensor:
            images = iter(
                torch.autograd.grad(
                    pulled,
                    duals,
                    directions,
                    retain_graph=True,
                    is_grads_batched=batched,
                    allow_unused=True,
                )
            )
            many = directions.shape[:1] if batched else ()
            whole = []
            for part in parts:
                image = next(images) if part.requires_grad else None
                whole.append(part.new_zeros(*many, *part.shape) if image is None else image)
            return torch.cat([each.reshape(*many, -1) for each in whole], -1)

        def pull(given: Tensor) -> Tensor:
            pieces = given.split([part.numel() for part in parts])
            shaped = [
                piece.reshape(part.shape)
                for piece, part in zip(pieces, parts, strict=True)
                if part.requires_grad
            ]
            (image,) = torch.autograd.grad(outputs, at, shaped, retain_graph=True)
            return image

        value = torch.cat([part.detach().reshape(-1) for part in parts])
        super().__init__(value, lambda direction: columns(direction, False), pull)
        self._columns = columns

    def columns(self, directions: Tensor) -> Tensor:
        """Return the products J v (M, P) for M directions v (M, ...), computed at once."""
        self.products += len(directions)
        return self._columns(directions)
