"""Hold samples with their own Jacobians, gradients and perturbations, ready to be scored."""

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
"""Largest relative tolerance of λmax, the largest eigenvalue of JJᵀ, at which Lanczos starts from
the top eigenvector of the last layer's part of JJᵀ. J is the Jacobian of a sample's gradient. This
start costs products of its own. So with a larger tolerance, which takes fewer steps, Lanczos starts
from Jg for the gradient g; see ``SampleProblem.start``."""


@dataclass(frozen=True)
class SampleProblem:
    """Some samples of a client's round with their gradients and Jacobians, ready to be scored.

    Let δ be the defense's perturbation of the pseudo-gradient, wᵢ the weight of sample i in it, and
    Jᵢ = ∇ₓ∇_θL the Jacobian of the sample's own gradient. An attacker who knows everything but
    sample i makes an error Δxᵢ with wᵢ Jᵢᵀ Δxᵢ = δ. So the perturbation of the sample's own
    gradient is **δᵢ = δ/wᵢ**: B·δ for one step over B samples.

    Properties that are computed on demand depend on these fields only, and a row only on its
    sample.

    Attributes:
        samples: the S samples; one whose gradient is not finite is replaced by zeros, as all
            samples share a batched eigendecomposition.
        indices: the index of each sample among those of the round.
        gradients: (S, P) the gradient g of each sample.
        deltas: (S, P) the perturbation δᵢ of each sample's gradient; all zero if the update was not
            changed.
        notes: the reason why each sample cannot be scored; empty if it can.
        rounding: (S,) the relative rounding error of g and of products with J, see
            ``Samples.rounding``.
        seed: the seed of the random start vectors of Krylov methods.
        meter: the meter that counts the products of all operators of the problem.
        derivable: a function of the problem, called before a score's first product, that returns
            why second derivatives need plain autograd, or an empty text, and raises ``ValueError``
            if they are wrong.
        single_step: whether the client took one step, so that gradients and weights give the whole
            update; else they give it to first order in the learning rate.
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
        """Return the samples' inputs x as flat rows (S, N)."""
        return self.samples.inputs

    @property
    def undefended(self) -> Bool[Tensor, " S"]:
        """Return booleans (S,), true for samples whose gradient no defense perturbed."""
        return (self.deltas == 0).all(1)

    def oracle(self, inputs: Float[Tensor, "S N"]) -> Float[Tensor, "S P"]:
        """Return each sample's gradient (S, P) at other inputs (S, N) and the same targets."""
        return self.samples.with_inputs(inputs).gradients()

    @cached_property
    def operator(self) -> SampleJacobian:
        """Return the operator of each sample's Jᵀ, J = ∇ₓ∇_θL, after a check that J is right."""
        if self.differentiable is self.samples:
            return self.unchecked_operator
        return self.differentiable.jacobian(self.meter, self.rounding)

    @cached_property
    def unchecked_operator(self) -> SampleJacobian:
        """Return the operator of each sample's Jᵀ, J = ∇ₓ∇_θL, without a check that J is right."""
        return self.samples.jacobian(self.meter, self.rounding)

    @cached_property
    def differentiable(self) -> Samples:
        """Return the samples, differentiated by plain autograd if the second derivatives of
        ``torch.func`` are wrong.
        """
        reason = self.derivable(self)
        gradient_map = self.samples.gradient_map
        if not reason or gradient_map.one_by_one:
            return self.samples
        return replace(self.samples, gradient_map=gradient_map.differentiated_by_autograd(reason))

    def jacobian_of(self, function: Callable[[Samples], Tensor]) -> FunctionJacobian:
        """Return the operator of the Jacobian by the inputs of a function of the samples.

        Args:
            function: a function from samples to (S, P), whose row s depends on sample s alone.
        """
        samples = self.differentiable
        return FunctionJacobian(
            lambda x: function(samples.with_inputs(x)),
            self.inputs,
            self.meter,
            plain=bool(samples.gradient_map.one_by_one),
        )

    def generators(self, seed: int) -> list[torch.Generator]:
        """Return a random generator for each sample, of the seed and the sample's index."""
        return [make_generator(seed, purpose=f"sample {index}") for index in self.indices]

    def start(self, tolerance: float) -> Float[Tensor, "S N"]:
        """Return a start vector for each sample (S, N), for Krylov methods that seek λmax of JJᵀ.

        J (N, P) is the Jacobian of a sample's gradient g (P,) by its N input entries. The vector is
        Jg for a relative tolerance above 1 % (``WELL_KNOWN``), else the top eigenvector of the last
        layer's part of JJᵀ, which costs products of its own.
        """
        return self._rough_product[0] if tolerance > WELL_KNOWN else self._good_start

    def largest(self, tolerance: float, max_steps: int) -> TopPairs:
        """Return λmax of each sample's JJᵀ and its eigenvector, by Lanczos from ``start``, with J
        the Jacobian of the sample's gradient. A later call continues where an earlier one stopped,
        with the same result as a first one.

        Args:
            tolerance: the relative error to which λmax is computed.
            max_steps: the largest number of products with JJᵀ.
        """
        process = self._rough_process if tolerance > WELL_KNOWN else self._good_process
        return process(tolerance, max_steps)

    @cached_property
    def unchecked_product(self) -> tuple[Float[Tensor, "S N"], Float[Tensor, "S P"]]:
        """Return a start vector for Krylov methods (S, N) and its product with Jᵀ (S, P), the
        Jacobian of the sample's gradient, for each sample. Second derivatives are not checked
        before this product, which serves to check them.
        """
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
