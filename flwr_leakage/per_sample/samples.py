"""Separate a batch into samples that keep the statistics and the weights of the whole batch.

Convention. The released pseudo-gradient is, to first order in the learning rate,
Σᵢ wᵢ gᵢ + δ with gᵢ the gradient of sample i alone at θ_t and wᵢ its weight in the schedule: 1/B
for one step over B samples. A sample on its own has no batch statistics, so where the client
normalises with them, BatchNorm keeps those of the whole batch, as constants.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, vmap

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import Meter, SampleJacobian, sample_gradients
from flwr_leakage.params import Params
from flwr_leakage.per_sample.cross_entropy import StableCrossEntropy, stable
from flwr_leakage.per_sample.loss_factors import slope_by_autograd
from flwr_leakage.records import Batch

LOGIT_UNITS = 4
"""Units in the last place of the largest logit by which rounding moves the logits, roughly."""


@dataclass(frozen=True)
class Samples:
    """S samples, each of which can be differentiated without the others; see ``separate``.

    Attributes:
        gradient_map: the gradient map of the client's model and loss; it uses no statistics of a
            batch.
        params: θ_t.
        buffers: those that the map normalises with.
        batch: the samples.
        weights: (S,) wᵢ, the factor of each sample's gradient in the pseudo-gradient; zero for
            one that no step of the local training uses.
    """

    gradient_map: GradientMap
    params: Params
    buffers: Params
    batch: Batch
    weights: Float[Tensor, " S"]

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, index: slice | Tensor | list[int]) -> "Samples":
        return replace(self, batch=self.batch[index], weights=self.weights[index])

    @property
    def inputs(self) -> Float[Tensor, "S N"]:
        """Return the samples' x, flat."""
        return self.batch.inputs.flatten(1)

    def with_inputs(self, inputs: Float[Tensor, "S N"]) -> "Samples":
        """Return the same targets and weights at other inputs."""
        shaped = inputs.reshape(self.batch.inputs.shape)
        return replace(self, batch=Batch(shaped, self.batch.targets))

    def to(self, dtype: torch.dtype) -> "Samples":
        """Return the same samples, parameters and statistics in another type."""
        params, batch = _converted(self.params, self.batch, dtype)
        return replace(self, params=params, batch=batch)

    def gradients(self, names: Collection[str] | None = None) -> Float[Tensor, "S P"]:
        """Return ∇_θL of each sample, flat, of all parameters or of those in ``names``."""
        return sample_gradients(self.gradient_map, self.params, self.batch, self.buffers, names)

    def jacobian(
        self, meter: Meter | None = None, rounding: Float[Tensor, " S"] | None = None
    ) -> SampleJacobian:
        """Return the unweighted Jᵀ = ∂ₓ∂_θL of each sample; ``rounding`` may be known already."""
        rounding = self.rounding()[0] if rounding is None else rounding
        return SampleJacobian(
            self.gradient_map, self.params, self.batch, self.buffers, meter, rounding
        )

    def rounding(self) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
        """Return the rounding error of a product with J, relative to ‖J‖, and ‖∂L/∂z‖, in float64.

        Logits z are off by some units in the last place of the largest. As this is the relative
        error of a small probability, J inherits it. A loss other than ``StableCrossEntropy``
        may subtract numbers of the size of one to get ∂L/∂z, so that its error is of that size.
        The factors were found on trained and untrained networks; it is an estimate, no bound.
        """
        logits = self.gradient_map.logits(self.params, self.batch.inputs, self.buffers)
        loss = self.gradient_map.loss

        def alone(z: Tensor, y: Tensor) -> Tensor:
            return loss(z[None], y[None])

        if isinstance(loss, StableCrossEntropy) and loss.weight is None:
            every = _slopes(replace(loss, reduction="sum"), logits, self.batch.targets)
        elif self.gradient_map.one_by_one:  # torch.func may not support the loss
            rows = zip(logits, self.batch.targets, strict=True)
            every = torch.stack([slope_by_autograd(alone, z, y) for z, y in rows])
        else:
            every = vmap(grad(alone))(logits, self.batch.targets)
        slopes = every.double().flatten(1).norm(dim=1)
        unit = torch.finfo(logits.dtype).eps
        relative = LOGIT_UNITS * unit * (1 + logits.double().abs().flatten(1).amax(1))
        if not isinstance(loss, StableCrossEntropy):
            relative = relative * (1 + 1 / slopes.clamp_min(torch.finfo(torch.float64).tiny))
        # Logits that are NaN are reported elsewhere.
        return relative.nan_to_num(0.0, posinf=torch.inf), slopes


def separate(
    gradient_map: GradientMap,
    params: Params,
    buffers: Params,
    batch: Batch,
    weights: Float[Tensor, " B"],
    dtype: torch.dtype | None = None,
) -> Samples:
    """Look at the samples of a batch one by one; take a part of them only after this.

    Torch's cross-entropy is replaced by ``StableCrossEntropy``, the same function, which keeps the
    digits of confident samples. Other losses stay as they are.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        params: θ_t.
        buffers: those received.
        batch: all samples of the round, as its batch statistics are those of all.
        weights: wᵢ of each, see ``LocalSchedule.sample_weights``.
        dtype: the dtype of all computations; that of the arguments by default.
    """
    if dtype is not None:
        params, batch = _converted(params, batch, dtype)
    if gradient_map.uses_batch_statistics:
        buffers = {**buffers, **gradient_map.statistics(params, batch.inputs, buffers)}
        gradient_map = gradient_map.with_batch_norm("running")
    loss = stable(gradient_map.loss)
    if loss is not None:
        if loss.ignore_index not in batch.targets.flatten().tolist():
            loss = replace(loss, ignore_index=None)
        gradient_map = gradient_map.with_loss(loss)
    return Samples(gradient_map, params, buffers, batch, weights)


def _slopes(loss: StableCrossEntropy, logits: Tensor, targets: Tensor) -> Tensor:
    """Return ∂L/∂z of each row of a sum over rows."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        (found,) = torch.autograd.grad(loss(leaf, targets), leaf)
    return found


def _converted(params: Params, batch: Batch, dtype: torch.dtype) -> tuple[Params, Batch]:
    soft = batch.targets.is_floating_point()
    targets = batch.targets.to(dtype) if soft else batch.targets
    converted = {name: value.to(dtype) for name, value in params.items()}
    return converted, Batch(batch.inputs.to(dtype), targets)
