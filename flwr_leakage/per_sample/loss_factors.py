"""Find how a loss weights the samples of a mini-batch: as a mean, as a sum, or by class."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.losses import Loss
from flwr_leakage.records import Batch, Exposure

SEPARABLE = 1e-3
"""Largest relative distance ‖g − c g′‖/‖g‖ at which a loss counts as one that treats samples one by
one. g is the derivative of the batch's loss by one sample's logits, and c g′ the nearest multiple
of the derivative g′ of that sample's own loss. The limit leaves room for the rounding of float32,
which couples no samples."""


def loss_weights(
    gradient_map: GradientMap, exposure: Exposure, batch: Batch
) -> Float[Tensor, " B"]:
    """Return the factor wᵢ (B,) of each sample's own gradient in the round's pseudo-gradient.

    It is the schedule's factor, which assumes the mean over a mini-batch, times the result of
    ``loss_factors``. ``exposure`` is the private data of the round, and ``batch`` are all of its B
    samples.

    Raises:
        ValueError: the loss couples the samples of a mini-batch, so that there is no such factor.
    """
    weights, loss = exposure.sample_weights(), gradient_map.loss
    if loss is F.cross_entropy:  # the cross-entropy's mean needs no logits
        return weights
    update = exposure.raw
    windows = {(w.start, w.stop) for w in update.schedule.slices(update.num_examples)}
    kept = [slice(*window) for window in sorted(windows) if window[0] < len(batch)]
    logits = gradient_map.logits(exposure.params, batch.inputs, exposure.buffers)
    return weights * loss_factors(loss, logits, batch.targets, kept)


def loss_factors(
    loss: Loss, logits: Tensor, targets: Tensor, windows: Sequence[slice]
) -> Float[Tensor, " B"]:
    """Return b·cᵢ (B,), with cᵢ the factor of sample i's gradient in its mini-batch of b samples.

    With logits z and targets y of the mini-batch, ∂L(z, y)/∂zᵢ = cᵢ ∂L(zᵢ, yᵢ)/∂zᵢ. So the result
    is 1 for a mean, b for a sum (``reduction="sum"``), and b wᵢ/Σⱼwⱼ for a mean with class weights
    w. It is computed from the loss's own derivatives. ``windows`` are the mini-batches, as slices
    of the B samples; a sample in none of them gets 1.

    Raises:
        ValueError: the loss couples the samples of a mini-batch, so that there is no such factor.
    """
    factors = torch.ones(len(logits), dtype=torch.float64)
    for window in windows:
        z, y = logits[window], targets[window]
        together = slope_by_autograd(loss, z, y).double().flatten(1)
        alone = torch.cat(
            [slope_by_autograd(loss, z[i : i + 1], y[i : i + 1]) for i in range(len(z))]
        )
        alone = alone.double().flatten(1)
        size = alone.square().sum(1)
        ratio = (together * alone).sum(1) / torch.where(size > 0, size, 1.0)
        rest = (together - ratio[:, None] * alone).norm(dim=1)
        if bool((rest > SEPARABLE * together.norm(dim=1)).any()):
            raise ValueError(
                "the loss must treat the samples of a mini-batch one by one (a mean or a sum over "
                "them, weighted or not), but it couples them: a sample's gradient alone is not its "
                "share of the update. BatchJacobian scores a batch as a whole."
            )
        known = size > 0
        # The factor of a sample without a gradient cannot be seen. The median of the others' is
        # taken, or that of a mean if no sample has a gradient.
        usual = ratio[known].median() if bool(known.any()) else ratio.new_tensor(1 / len(z))
        factors[window] = (len(z) * torch.where(known, ratio, usual)).cpu()
    return factors


def slope_by_autograd(loss: Loss, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the derivative ∂L/∂z of a loss L by its logits z, in the shape of the logits."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        value = loss(leaf, targets)
        return torch.autograd.grad(value, leaf, materialize_grads=True)[0]
