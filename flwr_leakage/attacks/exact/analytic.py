"""Recover the image of one sample exactly from the gradient of a first linear layer."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.clipped import without_clipped
from flwr_leakage.attacks.exact.pruned_layers import PrunedPass, fill_unseen
from flwr_leakage.attacks.labels.assumed import (
    AutomaticLabels,
    NearestGradient,
    answer,
    assume_targets,
)
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.network.linear import InputOrder, input_orders, told_of_computed_weights
from flwr_leakage.attacks.network.trace import LinearUse
from flwr_leakage.attacks.one_by_one import (
    Applicability,
    ExactAttack,
    in_box,
)
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR
from flwr_leakage.records import Batch, InputSpec, Reconstruction
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior

POSTERIOR = "posterior_deviation"
"""Key in the ``stats`` of a reconstruction in which a posterior's mean fills the pixels that
pruning hides. Its value is an upper bound of the root-mean-square error that the posterior expects
of these pixels, for pixel values in [0, 1]."""


@dataclass(frozen=True)
class Analytic(ExactAttack):
    """Solve ``∂L/∂W = δ xᵀ`` and ``∂L/∂b = δ`` for x (Phong et al. 2017, section 3).

    The loss is L, x is the flattened input of the network, and W and b are the weight and the bias
    of its first layer. The vector δ is the loss's gradient with respect to that layer's outputs. If
    ∂L/∂W and δ are exact, so is the least-squares solution ``x = (∂L/∂W)ᵀ δ / ‖δ‖²``.

    A client may prune or clip its gradient. The entries of ∂L/∂W that pruning keeps are exact, and
    so are those below a clip; clipped entries are left out (:mod:`flwr_leakage.attacks.clipped`).
    If pruning keeps no entry of pixel j, the pixel is only known up to ``|x_j| ≤ τ / max_i |δ_i|``,
    where τ is the smallest magnitude kept. :mod:`~flwr_leakage.attacks.exact.pruned_layers`
    estimates such pixels from the gradients of later linear layers and a Gaussian prior of images.
    The reconstruction's ``stats["posterior_deviation"]`` is the expected error of these pixels.

    x is proven if ``∂L/∂W`` and δ xᵀ differ only by rounding, in the rows of several units. Then no
    other sample has this gradient, whatever follows the layer, even dropout with masks that only
    the client knows. Pixels follow from the input x by the assumed normalisation, and count as
    proven if they lie in their range; see :func:`flwr_leakage.attacks.one_by_one.in_box`.

    The attack takes an update of one sample. The update may come from several steps t of gradient
    descent, with momentum or not: that of W is then ``(Σ_t w_t δ_t) xᵀ``, and that of the bias is
    ``Σ_t w_t δ_t``, with the same unknown factors w_t. Weight decay of several steps, which adds
    weights that moved, is refused. If several steps were pruned, pixels without a kept entry stay
    at zero. The model's first layer must be linear with a bias, and its weight and bias must be
    trained.
    """

    purpose: ClassVar[str] = "analytic"

    def check(self, problem: Problem, generator: torch.Generator) -> Applicability:
        """Return a statement that the attack applies, with the name of the first linear layer.

        Args:
            problem: the network and the observed update of one sample.
            generator: a random stream, which this attack does not use.

        Raises:
            ValueError: the update has several samples or clients, or several steps with weight
                decay, or no trained linear layer with bias takes the network's input.
        """
        use, _ = _first_layer(problem)
        return Applicability(True, f"{use.name!r} is linear on the input, with bias: x is exact.")

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the one sample that explains a problem's update, as one image with its label.

        Args:
            problem: the network and the observed update of one sample, in float64.
            generator: the random stream for estimates under pruning and for the label.
            restart: number of the restart, which changes nothing, as no start is needed.
            budget: the CPU time for the estimate of pixels that pruning hides.

        Raises:
            ValueError: :meth:`check` refuses the update or the network, or the layer's bias has a
                zero gradient.
        """
        use, order = _first_layer(problem)
        assert use.bias is not None
        gradient = without_clipped(problem.gradient)
        errors, weight = gradient[use.bias], gradient[use.weight]
        if not bool(errors.any()):
            raise ValueError(
                "the first layer's bias has a zero gradient: no unit was active or all was pruned."
            )
        kept = (weight != 0).to(weight)
        seen = kept.T @ errors.square() > 0
        taken, stage = mean_feature(weight, errors), "all pixels"
        bound = 0.0  # the largest magnitude that an unseen pixel may have
        # Without pruning, an entry of ∂L/∂W is zero only if its pixel or its unit's entry of ∂L/∂b
        # is zero. So any other zero, or a nonzero entry beside a zero of ∂L/∂b, shows that the
        # gradient was pruned.
        is_pruned = not bool(kept[errors != 0][:, seen].all()) or bool(weight[errors == 0].any())
        found: PrunedPass | None = None
        more: dict[str, Any] = {}
        if is_pruned and problem.schedule.num_steps > 1:
            # Over several steps, later layers' inputs change, so that their gradients determine no
            # pixel. Each pixel is then solved by least squares over the nonzero entries of its
            # column of ∂L/∂W alone, with the denominators ``sizes``. Rounding may make an entry
            # zero, too.
            sizes = (kept.T @ errors.square()).clamp_min(torch.finfo(weight.dtype).tiny)
            taken, stage = weight.T @ errors / sizes, f"{int(seen.sum())} of {len(seen)} pixels"
        elif is_pruned:
            found = PrunedPass.of(problem, use, generator)
            first = found.layers[0]
            errors, taken, seen, bound = first.errors, first.inputs, first.seen, first.bound
        elif not bool(seen.all()):
            bound = float(weight[weight != 0].abs().min() / errors.abs().max())
        misfit = (kept * torch.outer(errors, taken) - weight).square().sum()
        misfit = misfit / weight.square().sum()
        inputs = order.pixels(taken)
        if found is not None and not bool(seen.all()):
            inputs, told, more = _filled(problem.spec, order, found, budget)
            stage = f"{int(seen.sum())} of {len(seen)} pixels, {told}"
        images = inputs.reshape(1, *problem.spec.shape)
        stats: dict[str, Any] = {"stage": stage, **more}
        # A zero column of ∂L/∂W belongs to a pixel that is zero, or so small that its entries were
        # pruned. ``off`` bounds the error of such a pixel, and a proof allows 1e-3 of the pixels'
        # range.
        off = 0.0 if bool(seen.all()) else bound * max(problem.spec.std)
        is_proof = not is_pruned and int((errors != 0).sum()) > 1 and off <= 1e-3
        if is_proof and float(misfit) <= FLOAT32_RELATIVE_ERROR**2:
            # The root of the misfit overestimates the error of x, as least squares over several
            # units average out part of the gradient's noise.
            stats |= {"verdicts": ("proven",), "relative_errors": [float(misfit) ** 0.5]}
        return one_image(problem, images, float(misfit), stats, generator)


def one_image(
    problem: Problem,
    images: Float[Tensor, "1 C H W"],
    misfit: float,
    stats: dict[str, Any],
    generator: torch.Generator,
) -> Reconstruction:
    """Return the result of an exact attack that found one image, with the image's likeliest label.

    ``misfit`` becomes the objective of the result, and ``stats`` becomes its stats. The label is
    read from the update, or else is the class whose gradient is nearest to the observed one.

    Raises:
        ValueError: the labels that are read from the update are not those of one sample.
    """
    labels = AutomaticLabels(otherwise=NearestGradient(problem.spec.clamp(images)))
    targets = assume_targets(problem, labels, generator).values
    boxed = in_box(problem.spec, Reconstruction(Batch(images, targets), misfit, stats))
    assert boxed.batch is not None
    return replace(boxed, batch=answer(boxed.batch.inputs, targets))


def _filled(
    spec: InputSpec, order: InputOrder, found: PrunedPass, budget: Budget
) -> tuple[Tensor, str, dict[str, Any]]:
    """Return the image with estimates of the pixels that pruning hides.

    ``order`` is the order in which the first linear layer takes the pixels. ``found`` holds the
    linear layers of the pruned gradient, the first one first. The estimate ends early once the
    ``budget`` is spent.

    Returns:
        The flattened image (n,); the method of the estimate in words; and further entries for the
        reconstruction's stats, such as the expected error of the estimated pixels.
    """
    first = found.layers[0]
    is_bounded = math.isfinite(first.bound)
    within = f"the others, {f'within {first.bound:.1g} of zero, ' if is_bounded else ''}"
    why = "there are too many for matrices of them"
    try:
        filled = fill_unseen(spec, order, found, budget)
    except torch.linalg.LinAlgError:
        filled, why = None, "matrices of what they tell are not positive definite"
    if filled is not None:
        behind = f"{len(found.layers) - 1} layers behind and " if len(found.layers) > 1 else ""
        deviation = filled.deviation * max(spec.std)
        told = f"{within}by {behind}the prior, ± {deviation:.1g}"
        if filled.stopped:
            return filled.inputs, told, stop_mark(True)
        if not filled.settled:
            return filled.inputs, f"{told}, which has not settled", {}
        return filled.inputs, told, {POSTERIOR: deviation}
    inputs = order.pixels(first.inputs)
    dark, near = (order.pixels(torch.full_like(inputs, x)) for x in (0.0, min(first.bound, 1e6)))
    bounds = (near - dark).abs()
    inputs = fill_in(spec, inputs, order.moved(first.seen), dark, bounds)
    return inputs, f"{within}by the prior alone: {why}", {}


def fill_in(
    spec: InputSpec,
    inputs: Float[Tensor, " n"],
    seen: Bool[Tensor, " n"],
    centres: Float[Tensor, " n"],
    bounds: Float[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """Return the most likely image (n,), given its seen pixels and rough values of the unseen ones.

    Let Q be the inverse covariance and μ the mean of the Gaussian prior of images, u the unseen and
    s the seen pixels, m the rough values (``centres``) and c the largest distances of the pixels
    from them (``bounds``). The image solves

        (Q_uu + 3/c² I) x_u = Q_uu μ_u − Q_us (x_s − μ_s) + 3/c² m_u,

    where c²/3 is the variance of a uniform law on [m − c, m + c]. ``seen`` is true for the seen
    pixels. Of the flattened image ``inputs`` only these are used, and of m and c only the entries
    of unseen pixels.
    """
    prior = ImagePrior.of(spec)
    inverse = replace(prior, deviations=1 / prior.deviations, scale=1 / prior.scale)
    weights = (3 / bounds.square())[~seen]

    def precision(offset: Tensor) -> Tensor:
        """Return Q d at the unseen pixels only, for an offset d (n,) of the image from grey.

        Q is the inverse covariance of the prior of images.
        """
        image = prior.grey + offset.reshape(1, *spec.shape)
        return inverse.push(prior.coordinates(image)).flatten()[~seen]

    def product(values: Tensor) -> Tensor:
        offset = torch.zeros_like(inputs)
        offset[~seen] = values
        return precision(offset) + values * weights

    grey = prior.grey.flatten()
    known = torch.where(seen, inputs - grey, 0.0)
    right = -precision(known) + weights * (centres - grey)[~seen]
    found, _ = conjugate_gradients(product, right, 1e-6, 1000)
    filled = inputs.clone()
    filled[~seen] = grey[~seen] + found
    return filled


def _first_layer(problem: Problem) -> tuple[LinearUse, InputOrder]:
    """Return the trained linear layer that takes the network's input, and the order of its pixels.

    Raises:
        ValueError: the update has several samples or clients, or several steps with weight decay,
            or no linear layer with a trained weight and bias takes the whole input.
    """
    steps, decay = problem.schedule.num_steps, problem.schedule.weight_decay
    if problem.num_samples != 1 or problem.members or (steps > 1 and decay):
        raise ValueError(
            "the analytic attack takes 1 sample, and no weight decay in several steps, got "
            f"{problem.num_samples} samples in {steps} steps{' with weight decay' * bool(decay)}."
        )
    trained = problem.gradient_map.trained
    frozen = []
    for use, order in input_orders(problem):
        if use.bias is not None:
            own = [name for name in (use.weight, use.bias) if name not in trained]
            if not own:
                return use, order
            frozen += own
    if frozen:
        raise ValueError(
            "the weight and the bias of the linear layer that takes the network's input must be "
            f"trained, got {' and '.join(map(repr, frozen))} frozen."
        )
    told = told_of_computed_weights(problem)
    raise ValueError(f"no linear layer with bias takes the network's input{told}.")
