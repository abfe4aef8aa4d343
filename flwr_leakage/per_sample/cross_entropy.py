"""Compute the cross-entropy without cancellation, accurately for confident samples, too."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.losses import FollowingLoss, Loss


@dataclass(frozen=True)
class StableCrossEntropy:
    """The cross-entropy of torch, with derivatives of every order that have no cancellation.

    Let z be the logits, p their softmax and y the true class. In
    ``torch.nn.functional.cross_entropy`` the derivative by z_y is computed as p_y − 1. In float32
    nothing is left of it if p_y is within 1e-7 of one. Here it is −Σ_{k≠y}p_k, because the loss is
    written as

        −log p_y = log(1 + eˢ)   with   s = log Σ_{k≠y} exp(z_k − z_y).

    For class probabilities t, with a the most probable class and T = Σ_k t_k,

        −Σ_k t_k log p_k = −T log p_a + Σ_{k≠a} t_k(z_a − z_k).

    Attributes:
        weight: torch's ``weight``, one for each class; ``None`` for equal weights.
        ignore_index: torch's ``ignore_index``, for class indices only; ``None`` if no target is
            ignored.
        reduction: ``mean`` or ``sum``.
        label_smoothing: torch's ``label_smoothing``.
    """

    weight: Tensor | None = None
    ignore_index: int | None = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar, from logits (B, K) and class indices (B,) or
        probabilities (B, K).
        """
        if self.weight is None and not self.label_smoothing and not targets.is_floating_point():
            return self._of_classes(logits, targets)
        count = logits.shape[1]
        weight = logits.new_ones(count) if self.weight is None else self.weight.to(logits)
        if targets.is_floating_point():
            share, used = targets.to(logits), None
            total = logits.new_tensor(float(len(targets)))
        else:
            used = torch.ones_like(targets, dtype=torch.bool)
            if self.ignore_index is not None:
                used = targets != self.ignore_index
            known = torch.where(used, targets, 0)
            share = (known[:, None] == torch.arange(count, device=known.device)).to(logits)
            total = torch.where(used, share @ weight, 0.0).sum()
        smooth = self.label_smoothing
        losses = _losses(logits, weight * (share * (1 - smooth) + smooth / count), share)
        losses = losses if used is None else torch.where(used, losses, 0.0)
        return losses.sum() / total if self.reduction == "mean" else losses.sum()

    def _of_classes(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss for class indices (B,) from logits (B, K), without weights or smoothing.
        It takes few operations, so that products with the Jacobian are fast. In each row, the logit
        of the true class is subtracted from all logits, so that nothing cancels in the derivatives
        of log-softmax.
        """
        used = None if self.ignore_index is None else targets != self.ignore_index
        known = targets if used is None else torch.where(used, targets, 0)
        own = (known[:, None] == torch.arange(logits.shape[1], device=logits.device)).to(logits)
        above = (logits - (logits * own).sum(1, keepdim=True)) * (1 - own)
        losses = -(F.log_softmax(above, 1) * own).sum(1)
        if used is None:
            return losses.mean() if self.reduction == "mean" else losses.sum()
        total = torch.where(used, losses, 0.0).sum()
        return total / used.sum() if self.reduction == "mean" else total


def _losses(logits: Tensor, shares: Tensor, ranks: Tensor) -> Tensor:
    """Return the loss −Σ_k t_k log p_k = −T log p_a + Σ_{k≠a} t_k(z_a − z_k) of each sample. Each
    row of the arguments (B, K) is a sample. p is the softmax of its logits z, t ≥ 0 are its
    ``shares`` of the classes k, T = Σ_k t_k, and a is the class with the largest of ``ranks``.
    """
    top = ranks.argmax(1, keepdim=True)
    is_top = top == torch.arange(logits.shape[1], device=logits.device)
    below = logits - logits.gather(1, top)
    losses = -(F.log_softmax(below * ~is_top, 1) * is_top).sum(1)
    return shares.sum(1) * losses - torch.where(is_top, 0.0, shares * below).sum(1)


def stable(loss: Loss) -> StableCrossEntropy | None:
    """Return the :class:`StableCrossEntropy` that equals ``loss``, if that is torch's
    cross-entropy, else ``None``.
    """
    if isinstance(loss, FollowingLoss):
        loss = loss.loss
    if loss is F.cross_entropy:
        return StableCrossEntropy()
    if type(loss) is nn.CrossEntropyLoss and loss.reduction in ("mean", "sum"):
        return StableCrossEntropy(
            loss.weight, loss.ignore_index, loss.reduction, loss.label_smoothing
        )
    if isinstance(loss, partial) and loss.func is F.cross_entropy and not loss.args:
        options = dict(loss.keywords)
        if options.keys() <= set(StableCrossEntropy.__dataclass_fields__) and options.get(
            "reduction", "mean"
        ) in ("mean", "sum"):
            return StableCrossEntropy(**options)
    return loss if isinstance(loss, StableCrossEntropy) else None
