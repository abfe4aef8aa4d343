"""Measure the norm of the loss's gradient with respect to each sample's input, in one pass."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, vjp, vmap

from flwr_leakage.per_sample import ClientSamples, Point, Samples
from flwr_leakage.per_sample.client import NOT_FINITE, NOT_USED
from flwr_leakage.records import Measurement
from flwr_leakage.scores.base import Column, first_notes, measured, notes_where


@dataclass(frozen=True)
class InputGradientNorm:
    """A score: ‖∂L/∂x‖ of each sample x, a cheap number by which a client's samples are ranked.

    With weights W₁ of the first layer and the loss's gradient δ₁ by that layer's outputs, the
    layer's weight gradient is δ₁xᵀ. So the Jacobian J = ∇ₓ∇_θL contains the block δ₁ᵀ ⊗ I: if δ₁ is
    large, a change of any pixel changes the update much. ∂L/∂x = W₁ᵀδ₁ measures δ₁ without a
    per-sample gradient. The score costs one forward and one backward pass of the samples in
    mini-batches, about as much as training on them once, and no Jacobian product.

    Attributes:
        point: ``defended`` to score the samples as they entered training; ``private`` to score them
            as they were before the defense encoded them.
        batch_size: the number of samples that are processed together, ≥ 1.
    """

    point: Point = "defended"
    batch_size: int = 32

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}.")

    def __call__(self, client: ClientSamples, seed: int) -> list[Measurement]:
        """Return the measurement ``input_gradient_norm``: ‖∂L/∂x‖ of each sample x."""
        samples = client.samples(self.point)
        windows = torch.arange(len(samples)).split(self.batch_size)
        norms = torch.cat([input_gradients(samples[window]).norm(dim=1) for window in windows])
        unused, lost = samples.weights <= 0, ~norms.isfinite()
        against = first_notes(notes_where(unused, NOT_USED), notes_where(lost, NOT_FINITE))
        return [measured(Column("input_gradient_norm", norms, "1", "larger leaks more"), against)]


def input_gradients(samples: Samples) -> Float[Tensor, "S N"]:
    """Return the gradient ∂L/∂x of each sample's own loss by its input, as flat rows (S, N)."""
    gradient_map = samples.gradient_map
    if gradient_map.one_by_one:
        return torch.stack(
            [_by_autograd(samples[place]) for place in torch.arange(len(samples)).split(1)]
        )

    def logits_of(inputs: Tensor) -> Tensor:
        return gradient_map.logits(samples.params, inputs, samples.buffers)

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return gradient_map.loss(logits[None], target[None])

    logits, pullback = vjp(logits_of, samples.batch.inputs)[:2]
    # Each sample's loss is differentiated by itself, as the loss of a batch need not be a mean over
    # samples.
    errors = vmap(grad(loss_of))(logits, samples.batch.targets)
    return pullback(errors)[0].flatten(1).detach()


def _by_autograd(sample: Samples) -> Float[Tensor, " N"]:
    """Return ∂L/∂x (N,) of one sample, for a model that ``torch.func`` cannot differentiate."""
    with torch.enable_grad():
        inputs = sample.batch.inputs.detach().requires_grad_(True)
        logits = sample.gradient_map.logits(sample.params, inputs, sample.buffers)
        loss = sample.gradient_map.loss(logits, sample.batch.targets)
        (found,) = torch.autograd.grad(loss, inputs)
    return found.flatten()
