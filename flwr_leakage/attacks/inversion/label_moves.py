"""Corrections of inferred labels, from the residual of the last bias's gradient after a fit.

The mean cross-entropy's gradient by the last bias is ``p̄ − counts / B``. Under wrong counts a fit
has to distort p̄. The prior and the other gradients resist. So ``B (g_b(x̂) − g_b*)`` stays positive
for classes with too few labels, and negative for classes with too many.
"""

import torch
from torch import Tensor


def label_moves(targets: Tensor, bias_residual: Tensor, most: int) -> list[Tensor]:
    """Return labels with one of them changed, in falling order of the residual that supports it.

    Args:
        targets: (B,) class indices.
        bias_residual: (K,) ``g_b(x̂) − g_b*`` of the fit under these labels.
        most: largest number of changes to return.

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
