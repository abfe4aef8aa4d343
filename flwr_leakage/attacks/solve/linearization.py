"""Linearise a function at one point, so that products with its Jacobian there are cheap."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Linearized:
    """A function f at one point x of N entries, given by f(x) and products with J = ∂f/∂x (P, N).

    Attributes:
        value: f(x) (P,).
        products: number of products with J or its transpose so far.
    """

    def __init__(
        self, value: Tensor, push: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor]
    ) -> None:
        """Take f(x) (P,), and the functions that compute J v and Jᵀ u.

        ``push`` maps v, of the shape of x, to J v (P,), and ``pull`` maps u (P,) to Jᵀ u.
        """
        self.value, self._push, self._pull = value, push, pull
        self.products = 0

    def push(self, direction: Tensor) -> Tensor:
        """Return the product J v (P,) of the derivative J, for v of the shape of the point."""
        self.products += 1
        return self._push(direction)

    def pull(self, dual: Tensor) -> Tensor:
        """Return Jᵀ u, in the shape of the point, for u (P,) and the derivative J at the point."""
        self.products += 1
        return self._pull(dual)


class Linearization(Linearized):
    """A function f that autograd linearises at a point, with graphs that are built once.

    J is the derivative of f. A product ``Jᵀu`` is a backward pass of f. It is linear in u, so that
    ``Jv`` is a backward pass of ``u ↦ Jᵀu`` at any u. If f returns several tensors, each has a
    vector u of its own: for a common one, autograd would fill a tensor of zeros for each of them,
    which would take most of the time of large networks.
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor | Sequence[Tensor]], point: Tensor
    ) -> None:
        """Evaluate f at a point of any shape, and build graphs for products with its derivative.

        f returns one tensor or several, all of any shape.

        Raises:
            ValueError: nothing that f returns depends on the point.
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
        """Return the products J v (M, P) for M directions v (M, *shape), all computed at once.

        J is the derivative of the function at the point, which has this shape.
        """
        self.products += len(directions)
        return self._columns(directions)
