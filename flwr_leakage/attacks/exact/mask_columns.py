"""Samples' columns of errors by masks alone, where the layer behind leaves few directions to them.

Behind a linear layer with ReLU comes one of weights W₂, whose errors lie in a known span V₂ (of
K − 1 directions for the logits: errors of cross-entropy sum to zero). A sample's errors are
``s = D W₂ᵀ V₂ e``, with D its mask, and ``s = U q``, as they are one column behind the gradient.
With D given, that is an equation for each unit, of the few numbers e and q. With e and q given, a
unit is on where U q is nearer to ``W₂ᵀ V₂ e`` than to zero. The two in turn end at the mask of a
sample, from that of a mixture of several. Inputs have no part in it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

TURNS = 40
"""Times at most that a mask is corrected."""

LEAST = 20
"""Units beyond the unknown numbers, of all and of those that are on, that a mask must have."""

RIDGE = 1e-10
"""Of the matrix whose root is taken, in units of its largest entry: units on may be dependent."""


@dataclass(frozen=True)
class Settled:
    """Masks that agree with the errors that they tell.

    Attributes:
        starts: which mask each has come from (S,).
        errors: of length 1 (S, m).
        misfits: the share of each outside the span of U (S,).
    """

    starts: Tensor
    errors: Float[Tensor, "s m"]
    misfits: Float[Tensor, " s"]


def settle_masks(
    left: Float[Tensor, "m b"], behind: Float[Tensor, "m d"], masks: Bool[Tensor, "s m"]
) -> Settled:
    """Correct masks by the errors that they tell, until nothing changes.

    For a mask D, the errors are the vector of span(D W₂ᵀ V₂) of least angle to span(U). A turn
    takes m d (b + d) operations a mask.

    Args:
        left: U, orthonormal.
        behind: a basis of W₂ᵀ V₂.
        masks: to start from.

    Returns:
        Those that settled; the others are left out.
    """
    behind = torch.linalg.qr(behind).Q
    units, directions = behind.shape
    products = (behind[:, :, None] * behind[:, None]).flatten(1)
    starts, ends = torch.arange(len(masks)), []
    for _ in range(TURNS):
        enough = masks.sum(1) >= directions + LEAST
        masks, starts = masks[enough], starts[enough]
        if not len(masks):
            break
        masked = torch.where(masks.T[:, :, None], behind[:, None], 0.0)  # (m, S, d)
        inside = (left.T @ masked.flatten(1)).reshape(-1, *masked.shape[1:]).transpose(0, 1)
        gram = (masks.to(behind) @ products).reshape(-1, directions, directions)
        gram.diagonal(dim1=1, dim2=2).add_(RIDGE * float(gram.amax()))
        root = torch.linalg.inv(torch.linalg.cholesky(gram))
        through = inside @ root.mT
        angles = torch.linalg.eigh(through.mT @ through).eigenvectors[:, :, -1:]
        mixtures = root.mT @ angles  # (S, d, 1)
        fits = (inside @ mixtures)[:, :, 0] @ left.T
        corrected = (fits - mixtures[:, :, 0] @ behind.T).abs() < fits.abs()
        same = (corrected == masks).all(1)
        ends += list(zip(starts[same].tolist(), masks[same], strict=True))
        masks, starts = corrected[~same], starts[~same]
    # The Gram matrix holds half of the digits.
    exact = [_nearest(left, behind, mask) for _, mask in ends]
    return Settled(
        torch.tensor([start for start, _ in ends], dtype=torch.int64),
        torch.stack([errors for errors, _ in exact]) if exact else left.new_zeros(0, units),
        left.new_tensor([misfit for _, misfit in exact]),
    )


def _nearest(left: Tensor, behind: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """The errors of a mask of least angle to span(U), and the sine of that angle."""
    basis = torch.linalg.qr(torch.where(mask[:, None], behind, 0.0)).Q
    _, singular, right = torch.linalg.svd(basis - left @ (left.T @ basis), full_matrices=False)
    return basis @ right[-1], float(singular[-1])
