"""Check a loss, which is a map from (logits, targets) to a scalar, before and in attacks."""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.losses import Loss, scalar
from flwr_leakage.per_sample.loss_factors import slope_by_autograd


def check_loss(
    loss: Loss,
    count: int,
    num_classes: int,
    granted: Tensor | None = None,
    device: torch.device | None = None,
    positions: Sequence[int] = (),
) -> None:
    """Raise ``ValueError`` for a loss that attacks cannot compute or differentiate in float64.

    The loss maps (logits, targets) to a scalar. It is tried on at most two of ``count`` samples.

    Args:
        loss: the loss.
        count: number of samples of a batch.
        num_classes: number of classes.
        granted: the targets that the attacker knows, if any. If they are probabilities, the loss
            must take probabilities, else class indices.
        device: device of the logits; the CPU by default.
        positions: (T,) if a sample has logits and a class index at each of T positions; else empty.
    """
    rows = min(count, 2)
    output_shape = (*positions, num_classes)
    each = (rows, *positions)
    targets = torch.arange(math.prod(each), device=device).reshape(each) % num_classes
    if granted is not None and granted.is_floating_point():
        targets = granted[:rows].to(targets.device)
    problem = _problem(loss, output_shape, targets, torch.float64)
    if problem and not _problem(loss, output_shape, targets, torch.float32):
        raise ValueError(
            f"the loss must work in float64, in which attacks compute, but {problem}; hand over "
            "the loss module itself, whose weights are cast, or cast them to the logits' dtype."
        )
    if problem and positions:
        raise ValueError(
            "the loss of a model of the next token must take logits (B, T, V) and token ids (B, T) "
            f"and return a scalar, but {problem}; flwr_leakage.losses.NextToken is such a loss."
        )
    if problem:
        raise ValueError(
            "the loss must take logits (B, K) and "
            f"{'probabilities (B, K)' if targets.is_floating_point() else 'class ids (B,)'} and "
            f"return a scalar, but {problem}. A loss of one-hot targets goes into a function: "
            f"lambda logits, ids: loss(logits, F.one_hot(ids, {num_classes}).to(logits))."
        )


def _problem(loss: Loss, output_shape: Sequence[int], targets: Tensor, dtype: torch.dtype) -> str:
    """Return a text on how a loss fails for logits of a given precision, or "" if it works.

    A loss maps (logits, targets) to a scalar. Each sample's logits have the shape ``output_shape``.
    ``targets`` are class indices or probabilities of the samples.
    """
    size = len(targets) * math.prod(output_shape)
    logits = torch.linspace(-1, 1, size, dtype=dtype, device=targets.device)
    logits = logits.reshape(-1, *output_shape).requires_grad_()
    if targets.is_floating_point():
        targets = targets.to(dtype)
    shapes = f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}"
    with warnings.catch_warnings(record=True) as told, torch.enable_grad():
        warnings.simplefilter("always")
        try:
            value = loss(logits, targets)
            if isinstance(value, Tensor) and value.ndim == 0:
                torch.autograd.grad(value, logits)
        except Exception as error:  # the user's loss may raise any error
            first = (str(error).strip().splitlines() or [""])[0]
            return f"of {shapes} in {dtype} it says {type(error).__name__}: {first}"
    # Torch's warning begins with these words if the loss broadcast logits and targets to one shape.
    if any(str(each.message).startswith("Using a target size") for each in told):
        return f"{shapes} are stretched to one shape"
    scalar(value)
    return ""


def is_plain_mean(loss: Loss, logits: Tensor) -> bool:
    """Return whether the loss of a batch is the mean of the losses of its samples alone.

    A loss with class weights is not, as torch then divides by the sum of the weights. The loss, a
    map from (logits, targets) to a scalar, is tried on logits (B, K) with one sample per class.
    """
    if loss is F.cross_entropy:
        return True
    ids = torch.arange(logits.shape[1], device=logits.device)
    rows = logits[ids % len(logits)]
    alone = torch.stack([loss(rows[i : i + 1], ids[i : i + 1]) for i in range(len(ids))])
    return torch.allclose(loss(rows, ids), alone.mean())


def class_weights(loss: Loss, logits: Tensor) -> Tensor | None:
    """Return the weights (K,) of the classes in the loss, or ``None`` if all are equal.

    Their mean is 1. A weighted mean over samples i of classes yᵢ has the gradient Σᵢ w(yᵢ) gᵢ / Σⱼ
    w(yⱼ), with the gradient gᵢ of sample i alone. A batch of one sample of each class shows the
    weights w, with gradients at the given logits (K,) of one sample. The loss maps
    (logits, targets) to a scalar.

    Raises:
        ValueError: a sample's gradient in the batch is no multiple of its gradient alone.
    """
    if loss is F.cross_entropy:
        return None
    ids = torch.arange(len(logits), device=logits.device)
    rows = torch.stack([logits.detach().roll(i) for i in range(len(ids))])
    together = slope_by_autograd(loss, rows, ids)
    alone = torch.cat(
        [slope_by_autograd(loss, rows[i : i + 1], ids[i : i + 1]) for i in range(len(ids))]
    )
    alone = alone.nan_to_num()  # the mean over a sample of class weight 0 is 0 / 0
    size = alone.square().sum(1).clamp_min(torch.finfo(alone.dtype).tiny)
    weights = (together * alone).sum(1) / size
    rest = (together - weights[:, None] * alone).norm()
    if not float(rest) <= 1e-3 * float(together.norm()):
        raise ValueError(
            "labels are counted for a loss that is a mean or a sum over samples, weighted by class "
            "or not, got one that couples them; hand the labels over (labels known)."
        )
    if not float(weights.mean()) > 0:
        return None  # no gradient shows a weight
    weights = weights / weights.mean()
    return None if float((weights - 1).abs().max()) < 1e-3 else weights


def lowers_one_logit(loss: Loss, num_classes: int) -> bool:
    """Return whether ∂L/∂z has its only negative entry at the true class, for a sample's logits z.

    This holds for the cross-entropy, with or without class weights, but not for smoothed labels.
    """
    if loss is F.cross_entropy:
        return True
    ids = torch.arange(num_classes)
    # With logits this far apart, most probabilities are smaller than the share that smoothing adds
    # to a target, so that smoothing gives other classes negative slopes, too.
    logits = 10 * torch.randn(num_classes, num_classes, generator=torch.Generator().manual_seed(0))
    slopes = slope_by_autograd(loss, logits.double(), ids)
    return bool(((slopes < 0) <= torch.eye(num_classes, dtype=torch.bool)).all())
