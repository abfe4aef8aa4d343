"""Errors of single samples from masks alone, if the next layer leaves few directions to them.

A layer with weights W₂ follows a linear layer with ReLU. Its errors lie in a known span V₂ (of
K − 1 directions for the logits: errors of cross-entropy sum to zero). A sample's errors are
``s = D W₂ᵀ V₂ e``, with D its mask, and ``s = U q``, as they are one column of the gradient's
factor S. With D given, this is an equation for each unit about the few numbers e and q. With e and
q given, a unit is on if U q is nearer to ``W₂ᵀ V₂ e`` than to zero. Both steps in turn lead from
the mask of a mixture of samples to the mask of one sample. The layer's inputs are not used.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.attacks.rounding import SPARE_EQUATIONS


def settle_masks(
    left: Float[Tensor, "m b"],
    behind: Float[Tensor, "m d"],
    masks: Bool[Tensor, "s m"],
    max_corrections: int = 40,
) -> list[tuple[int, Tensor, float]]:
    """Return the errors of masks that were corrected until nothing changed.

    For a mask D, the errors are the vector of span(D W₂ᵀ V₂) with the least angle to span(U). A
    correction takes m d (b + d) operations for each mask.

    Args:
        left: U (m, b), the orthonormal columns of the factored gradient.
        behind: a basis (m, d) of W₂ᵀ V₂, with W₂ the next layer's weights and V₂ the span of its
            errors.
        masks: (s, m) masks to start from. A mask needs ``SPARE_EQUATIONS`` more units that are on
            than directions d, and is left out otherwise.
        max_corrections: largest number of corrections; masks that still change are left out.

    Returns:
        For each mask that no further correction changes, the index of the mask that it came from,
        its errors (m,) of length 1, and the share of these outside the span of U, in [0, 1].
    """
    behind = torch.linalg.qr(behind).Q
    directions = behind.shape[1]
    products = (behind[:, :, None] * behind[:, None]).flatten(1)
    starts, ends = torch.arange(len(masks)), []
    for _ in range(max_corrections):
        enough = masks.sum(1) >= directions + SPARE_EQUATIONS
        masks, starts = masks[enough], starts[enough]
        if not len(masks):
            break
        masked = torch.where(masks.T[:, :, None], behind[:, None], 0.0)  # (m, S, d)
        inside = (left.T @ masked.flatten(1)).reshape(-1, *masked.shape[1:]).transpose(0, 1)
        gram = (masks.to(behind) @ products).reshape(-1, directions, directions)
        # The rows of the units that are on may be dependent: the ridge keeps the root finite.
        gram.diagonal(dim1=1, dim2=2).add_(1e-10 * float(gram.amax()))
        root = torch.linalg.inv(torch.linalg.cholesky(gram))
        through = inside @ root.mT
        angles = torch.linalg.eigh(through.mT @ through).eigenvectors[:, :, -1:]
        mixtures = root.mT @ angles  # (S, d, 1)
        fits = (inside @ mixtures)[:, :, 0] @ left.T
        corrected = (fits - mixtures[:, :, 0] @ behind.T).abs() < fits.abs()
        same = (corrected == masks).all(1)
        ends += list(zip(starts[same].tolist(), masks[same], strict=True))
        masks, starts = corrected[~same], starts[~same]
    # Errors from the Gram matrix have half of the digits, so that they are computed anew.
    return [(start, *_nearest(left, behind, mask)) for start, mask in ends]


def _nearest(left: Tensor, behind: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    """Return the errors (m,) of a mask with the least angle to span(U), and that angle's sine."""
    basis = torch.linalg.qr(torch.where(mask[:, None], behind, 0.0)).Q
    _, singular, right = torch.linalg.svd(basis - left @ (left.T @ basis), full_matrices=False)
    return basis @ right[-1], float(singular[-1])
