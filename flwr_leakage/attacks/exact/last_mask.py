"""The mask of a network's last ReLU, where features are pooled before the last layer.

The last convolution must have a 3×3 kernel, padding 1 and stride 1. Its weight gradient is a
product ``B A``. Each column of B is the mask of one position, times known errors. The same row of A
is the patch that the convolution took in there. The columns have to be found, and the position that
each belongs to (:mod:`flwr_leakage.attacks.exact.binary_columns`).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.exact.binary_columns import arrange, binary_columns, disjoint_columns
from flwr_leakage.attacks.network.geometry import Geometry, Pair

LAST_GEOMETRY = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
"""The geometry that the last convolution must have: its overlapping patches reveal their places."""


def averaged_mask(error: Tensor, gradient: Tensor) -> Tensor:
    """Return the mask (1, N, H, W) of the last ReLU before global average pooling of a square map.

    Args:
        error: (1, N, H, W), the error of the last convolution's output as if every ReLU were
            active.
        gradient: (N, C, 3, 3), the gradient of the convolution's weight.

    Raises:
        ValueError: the errors differ between positions, or the masks are not found.
    """
    shared = error.flatten(2)[0, :, 0]
    if not torch.allclose(error.flatten(2)[0], shared[:, None].expand(-1, error[0, 0].numel())):
        raise ValueError(
            "features must be averaged over positions before the last layer, or be the maxima of "
            "windows that do not overlap."
        )
    product = gradient.flatten(1) / shared[:, None]
    channels, positions = len(shared), error[0, 0].numel()
    if positions >= channels:
        raise ValueError(
            f"the gradient of the last convolution cannot determine {positions} masks, one for "
            f"each position, as they span all of its {channels} channels."
        )
    columns = binary_columns(product, positions)
    patches = torch.linalg.lstsq(columns, product).solution
    order = arrange(patches.reshape(positions, *gradient.shape[1:]))
    return columns[:, order].reshape(error.shape)


def maxima_mask(
    error: Tensor,
    gradient: Tensor,
    active: Tensor,
    window: Pair,
    rank_tolerance: float = 1e-6,
) -> Tensor:
    """Return the mask (1, N, H, W) of the last ReLU before max pooling with flattened outputs.

    The mask is 1 where an entry is active and the maximum of its window.

    Args:
        error: (1, N, H, W), the error of the last convolution's output as if every entry were its
            window's maximum.
        gradient: (N, C, 3, 3), the gradient of the convolution's weight.
        active: (N · windows,) booleans, true where the pooled outputs are positive.
        window: height and width of a window; together the windows cover a square.
        rank_tolerance: singular values below this share of the largest count as zero.

    Raises:
        ValueError: the errors differ within windows, the pooled outputs are not those that the
            last layer takes in, or the masks are not found.
    """
    channels, height, width = error.shape[1:]
    grid = (height // window[0], width // window[1])
    covered = (grid[0] * window[0], grid[1] * window[1])
    if len(active) != channels * grid[0] * grid[1]:
        raise ValueError("the maxima of the last pooling must be what the last layer takes in.")
    blocks = F.unfold(error[0, :, None, : covered[0], : covered[1]], window, stride=window)
    shared = blocks[:, 0]
    if not torch.allclose(blocks, shared[:, None].expand_as(blocks)):
        raise ValueError("errors must be shared within each window of the last pooling.")
    shared = shared * active.reshape(shared.shape)
    left, singular, _ = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
    count = covered[0] * covered[1]
    if len(singular) < count or singular[count - 1] < rank_tolerance * singular[0]:
        raise ValueError(f"the masks must have rank {count}.")
    columns = torch.cat(
        [
            disjoint_columns(left[:, :count], scales, window[0] * window[1]) * scales[:, None]
            for scales in shared.T
        ],
        1,
    )
    patches = torch.linalg.lstsq(columns, gradient.flatten(1)).solution
    order = arrange(patches.reshape(count, *gradient.shape[1:]))
    mask = (columns[:, order] != 0).to(error.dtype).reshape(1, channels, *covered)
    return F.pad(mask, (0, width - covered[1], 0, height - covered[0]))
