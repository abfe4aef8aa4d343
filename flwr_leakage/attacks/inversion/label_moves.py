"""Corrections of inferred labels, from what a fit under them leaves of the last bias's gradient.

The mean cross-entropy's gradient by the last bias is ``p̄ − counts / B``. Under wrong counts a fit
has to bend p̄; where the prior and the other gradients resist, ``B (g_b(x̂) − g_b*)`` stays positive
at classes that the labels have too few of, and negative at those that they have too many of.
"""

import torch
from torch import Tensor


def label_moves(targets: Tensor, bias_residual: Tensor, most: int) -> list[Tensor]:
    """Labels with one of them changed, the change that the residual asks for most first.

    Args:
        targets: (B,), class indices.
        bias_residual: ``g_b(x̂) − g_b*`` (K,) of the fit under these labels.
        most: how many to return at most.

    Example:
        >>> label_moves(torch.tensor([0, 2]), torch.tensor([-0.2, 0.3, 0.0]), 1)
        [tensor([1, 2])]
    """
    present = targets.unique()
    gains = bias_residual[None, :] - bias_residual[present][:, None]
    gains[torch.arange(len(present)), present] = -torch.inf
    moves = []
    for flat in gains.flatten().argsort(descending=True)[:most].tolist():
        row, new = divmod(flat, len(bias_residual))
        if not torch.isfinite(gains[row, new]):
            break
        changed = targets.clone()
        changed[(targets == present[row]).nonzero()[0, 0]] = new
        moves.append(changed.sort().values)
    return moves
