"""Separate a batch into samples that keep the statistics and the weights of the whole batch.

Convention: to first order in the learning rate, the released pseudo-gradient is Σᵢ wᵢ gᵢ + δ, with
gᵢ the gradient of sample i alone at the received parameters θ_t, wᵢ its weight by the schedule (1/B
for one step over B samples), and δ the defense's perturbation. A sample alone has no batch
statistics. So if the client normalises with them, BatchNorm keeps those of the whole batch, as
constants.
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
"""Approximate rounding error of each logit, in units in the last place of the sample's largest
logit. The value was found on trained and untrained networks; no results are kept."""


@dataclass(frozen=True)
class Samples:
    """S samples, each of which can be differentiated without the others; see ``separate``.

    Attributes:
        gradient_map: the gradient map of the client's model and loss, whose BatchNorm uses no batch
            statistics.
        params: the received parameters θ_t, by name.
        buffers: the buffers with whose statistics the map normalises.
        batch: the S samples.
        weights: (S,) the factor wᵢ of each sample's gradient in the pseudo-gradient; zero for a
            sample that no step of the local training uses.
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
        """Return the samples' inputs x as flat rows (S, N)."""
        return self.batch.inputs.flatten(1)

    def with_inputs(self, inputs: Float[Tensor, "S N"]) -> "Samples":
        """Return the samples with other inputs, given as flat rows; targets and weights stay."""
        shaped = inputs.reshape(self.batch.inputs.shape)
        return replace(self, batch=Batch(shaped, self.batch.targets))

    def to(self, dtype: torch.dtype) -> "Samples":
        """Return the same samples, parameters and buffers in another dtype."""
        params, batch = converted(self.params, self.batch, dtype)
        return replace(self, params=params, batch=batch)

    def gradients(self, names: Collection[str] | None = None) -> Float[Tensor, "S P"]:
        """Return each sample's gradient as a flat row, by all parameters or those in ``names``."""
        return sample_gradients(self.gradient_map, self.params, self.batch, self.buffers, names)

    def jacobian(
        self, meter: Meter | None = None, rounding: Float[Tensor, " S"] | None = None
    ) -> SampleJacobian:
        """Return the operator of each sample's Jᵀ = ∂ₓ∂_θL, without the sample's weight.

        Args:
            meter: the meter that counts products.
            rounding: (S,) the relative rounding error of products; computed if ``None``.
        """
        rounding = self.rounding()[0] if rounding is None else rounding
        return SampleJacobian(
            self.gradient_map, self.params, self.batch, self.buffers, meter, rounding
        )

    def rounding(self) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
        """Return, in float64 and for each of S samples, the rounding error (S,) of products with J,
        relative to ‖J‖, and the norm (S,) of ∂L/∂z.

        J is the Jacobian of a sample's gradient, z its logits and L its loss. Each logit is assumed
        to be wrong by ``LOGIT_UNITS`` units in the last place of the largest one. This is also the
        relative error of a small probability, and so of J. A loss other than ``StableCrossEntropy``
        may subtract numbers near one, so that ∂L/∂z has their rounding error. The result is an
        estimate and no bound.
        """
        logits = self.gradient_map.logits(self.params, self.batch.inputs, self.buffers)
        loss = self.gradient_map.loss

        def alone(z: Tensor, y: Tensor) -> Tensor:
            return loss(z[None], y[None])

        if isinstance(loss, StableCrossEntropy) and loss.weight is None:
            every = slope_by_autograd(replace(loss, reduction="sum"), logits, self.batch.targets)
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
        # The error of a sample whose logits are NaN is set to 0 here, as the sample is reported
        # later, by its gradient that is not finite.
        return relative.nan_to_num(0.0, posinf=torch.inf), slopes


def separate(
    gradient_map: GradientMap,
    params: Params,
    buffers: Params,
    batch: Batch,
    weights: Float[Tensor, " B"],
    dtype: torch.dtype | None = None,
) -> Samples:
    """Return the samples of a batch so that each can be differentiated without the others.

    A part of the samples may be selected from the result only, as the batch statistics are those of
    all samples. Torch's cross-entropy is replaced by ``StableCrossEntropy``, which is accurate for
    confident samples, too.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        params: the received parameters θ_t, by name.
        buffers: the received buffers, by name.
        batch: all B samples of the round.
        weights: (B,) the factor wᵢ of each sample's gradient in the pseudo-gradient, see
            ``LocalSchedule.sample_weights``.
        dtype: the dtype of all computations; that of the arguments by default.
    """
    if dtype is not None:
        params, batch = converted(params, batch, dtype)
    if gradient_map.uses_batch_statistics:
        buffers = {**buffers, **gradient_map.statistics(params, batch.inputs, buffers)}
        gradient_map = gradient_map.with_batch_norm("running")
    loss = stable(gradient_map.loss)
    if loss is not None:
        if loss.ignore_index not in batch.targets.flatten().tolist():
            loss = replace(loss, ignore_index=None)
        gradient_map = gradient_map.with_loss(loss)
    return Samples(gradient_map, params, buffers, batch, weights)


def converted(params: Params, batch: Batch, dtype: torch.dtype) -> tuple[Params, Batch]:
    """Return the parameters and the batch in another dtype; class indices stay integers."""
    soft = batch.targets.is_floating_point()
    targets = batch.targets.to(dtype) if soft else batch.targets
    converted = {name: value.to(dtype) for name, value in params.items()}
    return converted, Batch(batch.inputs.to(dtype), targets)
