"""The Jacobian, the gradient and the share of δ of each sample by itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.operators import FunctionJacobian, Meter, SampleJacobian
from flwr_leakage.per_sample.samples import Samples
from flwr_leakage.randomness import Draws, make_generator
from flwr_leakage.spectral import (
    LargestEigenvalue,
    TopPairs,
    gradient_start,
    last_layer_start,
)

WELL_KNOWN = 1e-2
"""Largest tolerance of λmax for which Lanczos starts from the last layer's share of JJᵀ."""


@dataclass(frozen=True)
class SampleProblem:
    """Some samples of a client's round, ready to be scored.

    An attacker who knows everything but sample i solves wᵢ Jᵢᵀ Δxᵢ = δ, with wᵢ the sample's
    weight in the pseudo-gradient, so that the sample's own perturbation is **δᵢ = δ/wᵢ**: B·δ
    for one step over B samples.

    What is computed on demand depends on these fields only, and the row of a sample on that sample
    only. It depends neither on which score asks first, nor on the samples beside it.

    Attributes:
        samples: S of them; a sample whose gradient is not finite is replaced by zeros, as the
            samples share their eigendecompositions.
        indices: the place of each in the round.
        gradients: g of each sample, (S, P).
        deltas: δᵢ of each sample, (S, P); all zero where nothing was done to the update.
        notes: one for each sample: why it has no number, or empty where it is sound.
        rounding: how far it takes g and products with J, relative to their size, see
            ``Samples.rounding``.
        seed: seed of the random starts of Krylov methods.
        meter: counts the products of all operators of the problem.
        derivable: says of a problem why its second derivatives have to be taken by plain autograd,
            or nothing; raises ``ValueError`` where they are wrong. It is asked before the first
            product of a score.
        single_step: whether the client took one step, so that gradients at θ_t and wᵢ are the
            whole of its update; of several steps they are the first order in the learning rate.
    """

    samples: Samples
    indices: tuple[int, ...]
    gradients: Float[Tensor, "S P"]
    deltas: Float[Tensor, "S P"]
    notes: tuple[str, ...]
    rounding: Float[Tensor, " S"]
    seed: int
    meter: Meter
    derivable: Callable[["SampleProblem"], str]
    single_step: bool = True

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def inputs(self) -> Float[Tensor, "S N"]:
        """Return the samples' inputs x as flat rows."""
        return self.samples.inputs

    @property
    def undefended(self) -> Bool[Tensor, " S"]:
        """Return for which samples δᵢ = 0, as the update was not changed."""
        return (self.deltas == 0).all(1)

    def oracle(self, inputs: Float[Tensor, "S N"]) -> Float[Tensor, "S P"]:
        """Return a function that gives each sample's gradient at other inputs."""
        return self.samples.with_inputs(inputs).gradients()

    @cached_property
    def operator(self) -> SampleJacobian:
        """Return Jᵀ of each sample."""
        if self.differentiable is self.samples:
            return self.unchecked_operator
        return self.differentiable.jacobian(self.meter, self.rounding)

    @cached_property
    def unchecked_operator(self) -> SampleJacobian:
        """Return Jᵀ of each sample, whether or not its products are derivatives of the gradient."""
        return self.samples.jacobian(self.meter, self.rounding)

    @cached_property
    def differentiable(self) -> Samples:
        """Return the samples, with gradients that can be differentiated in the inputs."""
        reason = self.derivable(self)
        gradient_map = self.samples.gradient_map
        if not reason or gradient_map.one_by_one:
            return self.samples
        return replace(self.samples, gradient_map=gradient_map.differentiated_by_autograd(reason))

    def jacobian_of(self, function: Callable[[Samples], Tensor]) -> FunctionJacobian:
        """Return the Jacobian of any function of the samples, (S, N) ↦ (S, P), in their inputs."""
        samples = self.differentiable
        return FunctionJacobian(
            lambda x: function(samples.with_inputs(x)),
            self.inputs,
            self.meter,
            plain=bool(samples.gradient_map.one_by_one),
        )

    def generators(self, seed: int) -> list[torch.Generator]:
        """Return a generator for each sample, from the seed and the sample's place in the round."""
        return [make_generator(seed, purpose=f"sample {index}") for index in self.indices]

    def start(self, tolerance: float) -> Float[Tensor, "S N"]:
        """Return a start for Krylov methods that seek λmax to a relative tolerance.

        Jg where a rough value will do; the last layer's top eigenvector, which takes products
        of its own, where it must be known to ``WELL_KNOWN`` or better.
        """
        return self._rough_product[0] if tolerance > WELL_KNOWN else self._good_start

    def largest(self, tolerance: float, max_steps: int) -> TopPairs:
        """Return λmax of JJᵀ and its eigenvector, by Lanczos from ``start``.

        A later call continues where an earlier one stopped, and returns the same as if it were the
        first; see ``LargestEigenvalue``.
        """
        process = self._rough_process if tolerance > WELL_KNOWN else self._good_process
        return process(tolerance, max_steps)

    @cached_property
    def unchecked_product(self) -> tuple[Float[Tensor, "S N"], Float[Tensor, "S P"]]:
        """Return the rough start and its product, by which second derivatives can be checked."""
        return _first_product(self.unchecked_operator, self.generators(self.seed))

    @cached_property
    def _rough_product(self) -> tuple[Tensor, Tensor]:
        if self.operator is self.unchecked_operator:
            return self.unchecked_product
        return _first_product(self.operator, self.generators(self.seed))

    @cached_property
    def _good_start(self) -> Tensor:
        share = self.operator.last_layer()
        return last_layer_start(self.operator, share, self.generators(self.seed))

    @cached_property
    def _rough_process(self) -> LargestEigenvalue:
        return LargestEigenvalue(self.operator, *self._rough_product)

    @cached_property
    def _good_process(self) -> LargestEigenvalue:
        return LargestEigenvalue(self.operator, self._good_start)


def _first_product(operator: SampleJacobian, draws: Draws) -> tuple[Tensor, Tensor]:
    start = gradient_start(operator, draws)
    return start, operator.matvec(start)
