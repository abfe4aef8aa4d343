"""Reconstruct one sample's pass through linear layers with ReLUs from pruned gradients.

The gradient ``[∂L/∂W, ∂L/∂c]`` of a linear layer ``u = W h + c`` is ``e [h, 1]ᵀ`` for one sample,
where e = ∂L/∂u is called the *error* of its outputs. Pruned gradients give these facts:

* A kept entry is exact, or its noise shows in its distance from the product ``e [h, 1]ᵀ``. Kept
  entries of ∂L/∂c are errors. Known errors and kept entries of their rows of ∂L/∂W give inputs.
  Known inputs and kept entries of their columns give errors of further rows.
* A zero entry has ``|e_i h_j| ≤ τ``, where τ is the smallest magnitude that pruning kept in the
  tensor.
* A unit is on if its error is known, or if its output, an input of the next layer, is known.
* The next layer's errors give the error that each unit would have if it were on. If pruning would
  have kept that error, but the unit's gradient is zero, the unit is off.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.clipped import without_clipped
from flwr_leakage.attacks.exact.known import Known, Mask, outer_product
from flwr_leakage.attacks.network.linear import InputOrder, traced
from flwr_leakage.attacks.network.trace import LinearUse
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_NOISE, NOISE_DEVIATIONS
from flwr_leakage.records import InputSpec
from flwr_leakage.spectral.image_prior import ImagePrior


@dataclass(frozen=True)
class PrunedLayer:
    """A linear layer, with the errors and inputs of one sample that its pruned gradient gives.

    The layer computes ``u = W h + c``, and its error is e = ∂L/∂u.

    Attributes:
        matrix: W (m, n).
        offset: c (m,).
        errors: e (m,), zero if unknown.
        has_error: booleans (m,), true for the known errors.
        inputs: h (n,), zero if unknown.
        seen: booleans (n,), true for the known inputs.
        deviations: standard deviations (n,) of the known inputs, which the gradient's noise causes;
            zero for unknown inputs.
        noise: standard deviation of the noise of the gradient's entries.
        threshold: τ, the smallest magnitude that pruning kept; infinite if pruning removed larger
            entries than it kept.
    """

    matrix: Float[Tensor, "m n"]
    offset: Float[Tensor, " m"]
    errors: Float[Tensor, " m"]
    has_error: Bool[Tensor, " m"]
    inputs: Float[Tensor, " n"]
    seen: Bool[Tensor, " n"]
    deviations: Float[Tensor, " n"]
    noise: float
    threshold: float

    @classmethod
    def of(
        cls,
        matrix: Float[Tensor, "m n"],
        offset: Float[Tensor, " m"],
        weight: Float[Tensor, "m n"],
        bias: Float[Tensor, " m"],
    ) -> "PrunedLayer":
        """Return the layer with the errors and inputs that the kept entries of its gradient give.

        The layer computes ``W h + c``. ``matrix`` is W and ``offset`` is c; ``weight`` is ∂L/∂W and
        ``bias`` is ∂L/∂c, both zero where pruned.

        Raises:
            ValueError: no entry of the bias or of the weight is kept, or the entries are not those
                of one sample.
        """
        if not bool(bias.any()) or not bool(weight.any()):
            raise ValueError("nothing is kept of the layer's weight or of its bias.")
        both = torch.cat([weight, bias[:, None]], 1)
        kept = (both != 0).to(both)
        errors, inputs, unit = outer_product(both, kept)
        row = torch.cat([inputs, inputs.new_ones(1)])
        known = torch.cat([unit.isfinite(), torch.ones_like(bias[:1], dtype=torch.bool)])
        has_error = kept @ known.to(kept) > 0
        product = errors[:, None] * row
        left = kept * (product - both)
        # A gradient that is farther from an outer product than noise explains belongs to several
        # samples. (The limit of 0.1 was chosen on development draws; no results are kept.)
        if not float(left.norm()) <= 0.1 * float(both.norm()):
            raise ValueError("the kept entries do not fit one sample's gradient.")
        surplus = float(kept.sum()) - float(has_error.sum() + known.sum())
        noise = float(left.norm()) / max(surplus, 1.0) ** 0.5
        deviations = (noise * unit).clamp_min(FLOAT32_NOISE * float(inputs.abs().max()))
        threshold = float(weight[weight != 0].abs().min())
        pruned = product[:, :-1][weight == 0]
        if (
            len(pruned)
            and float(pruned.abs().max())
            > threshold * (1 + FLOAT32_NOISE) + NOISE_DEVIATIONS * noise
        ):
            threshold = math.inf  # the pruning was not by magnitude
        return cls(
            matrix,
            offset,
            errors,
            has_error,
            inputs,
            known[:-1],
            torch.where(known[:-1], deviations, 0.0),
            noise,
            threshold,
        )

    @property
    def bound(self) -> float:
        """The largest magnitude that an unknown input of the layer may have.

        A larger input would have an entry of the gradient that pruning keeps, and so would be
        known.
        """
        return (self.threshold + NOISE_DEVIATIONS * self.noise) / float(self.errors.abs().max())

    @property
    def error_bound(self) -> float:
        """The largest magnitude that an unknown error ∂L/∂u of an output u of the layer may have.

        A larger error would have an entry of the gradient that pruning keeps, and so would be
        known.
        """
        return (self.threshold + NOISE_DEVIATIONS * self.noise) / float(self.inputs.abs().max())

    def doubt(self, of_others: Tensor | float) -> Tensor:
        """Return bounds (m,) on how far the layer's true errors e_i = ∂L/∂u_i are from ``errors``.

        Known errors are bounded by a multiple of the noise, and others by ``of_others``.
        """
        own = NOISE_DEVIATIONS * self.noise / float(self.inputs.abs().max())
        others = torch.as_tensor(of_others).to(self.errors).expand_as(self.errors)
        return others.masked_fill(self.has_error, own)


@dataclass(frozen=True)
class PrunedPass:
    """Successive linear layers of one sample's pass, with only ReLUs between them.

    Attributes:
        layers: the layers in the order of the pass, at least one.
    """

    layers: Sequence[PrunedLayer]

    @classmethod
    def of(cls, problem: Problem, first: LinearUse, generator: torch.Generator) -> "PrunedPass":
        """Return the linear layers from a given one on, as far as only ReLUs stand between them.

        ``first`` is the call of the first of these layers. ``problem`` holds the pruned gradient.
        ``generator`` draws the inputs of a pass that shows which layers follow each other.

        Raises:
            ValueError: the first layer's gradient gives no input; see :meth:`PrunedLayer.of`.
        """
        like = problem.params[first.weight]
        probes = torch.randn(8, *problem.spec.shape, generator=generator, dtype=torch.float64)
        uses = traced(problem, probes.to(like)).linear
        place = [use.weight for use in uses].index(first.weight)
        layers = [_read(problem, uses[place])]
        for use, following in zip(uses[place:], uses[place + 1 :], strict=False):
            rectified = use.outputs.clamp_min(0)
            if rectified.shape != following.inputs.shape or following.bias is None:
                break
            if not torch.equal(rectified, following.inputs):
                break
            if not {following.weight, following.bias} <= problem.gradient.keys():
                break
            try:
                layers.append(_read(problem, following))
            except ValueError:
                break  # the layers before this one are valid without it
        return cls(layers)

    @cached_property
    def features(self) -> list[Known]:
        """The known facts about the ReLUs between successive layers, in the order of the pass.

        Entry k concerns the m units of layer k. It holds their outputs (m,) behind the ReLU as far
        as they are known, bounds of the unknown outputs, and which units are on, off or of unknown
        state.
        """
        last = self.layers[-1]
        errors = last.errors
        doubt = last.doubt(last.error_bound)
        found = []
        for layer, following in reversed(list(pairwise(self.layers))):
            own = following.matrix.T @ errors
            own_doubt = following.matrix.abs().T @ doubt
            on = layer.has_error | following.seen
            off = ~on & (own.abs() - own_doubt > (1 + FLOAT32_NOISE) * layer.error_bound)
            bounds = torch.full_like(own, following.bound).masked_fill(following.seen | off, 0.0)
            found.append(Known(following.inputs, bounds, Mask(on, off)))
            errors = torch.where(layer.has_error, layer.errors, torch.where(on, own, 0.0))
            unsure = torch.where(on, own_doubt, own.abs() + own_doubt)
            doubt = layer.doubt(unsure.clamp_max(layer.error_bound)).masked_fill(off, 0.0)
        return found[::-1]


def _read(problem: Problem, use: LinearUse) -> PrunedLayer:
    assert use.bias is not None
    params, gradient = problem.params, without_clipped(problem.gradient)
    return PrunedLayer.of(
        params[use.weight], params[use.bias], gradient[use.weight], gradient[use.bias]
    )


LEAST_SPREAD = 1e-8
"""Standard deviation, in normalised pixels or features, below which a bounded value counts as
known. The normal density that stands for its bounds is then no longer changed. A variance is a
difference of squares, which float64 rounds to 2⁻⁵³; 1e-8 is the root of that."""

MOST_ENTRIES = 40_000_000
"""Largest number of entries of the prior's matrix for :func:`fill_unseen`, which has a row for each
unseen pixel and a column for each pixel. They take 320 MB in float64."""


@dataclass(frozen=True)
class Filled:
    """An image whose pixels that pruning hides, the *unseen* ones, are filled in.

    Attributes:
        inputs: the whole flattened image (n,), normalised.
        deviation: root mean square of the unseen pixels' posterior standard deviations.
        stopped: whether the budget was spent before the posterior's mean settled.
        settled: whether the posterior's mean settled within the allowed rounds.
    """

    inputs: Tensor
    deviation: float
    stopped: bool
    settled: bool


@dataclass(frozen=True)
class Bounds:
    """Bounds on k linear combinations of u unseen pixels, with normal densities in their place.

    A bound multiplies the pixels' density by 1 where the combination keeps the bound, and by 0
    elsewhere. This factor is replaced by a normal density of the combination (expectation
    propagation, Minka 2001).

    Attributes:
        forms: (k, u) the coefficients, one combination in each row.
        low: (k,) lower bounds; −∞ for none.
        high: (k,) upper bounds; ∞ for none.
        precision: (k,) inverse variances of the normal densities, ≥ 0.
        shift: (k,) inverse variance times mean of the normal densities.
    """

    forms: Tensor
    low: Tensor
    high: Tensor
    precision: Tensor
    shift: Tensor

    @classmethod
    def of(cls, forms: Tensor, low: Tensor, high: Tensor) -> "Bounds":
        """Return bounds on combinations of pixels, each with a first normal approximation.

        Row i of ``forms`` (k, u) holds the coefficients of combination i of u pixels, with the
        bounds ``low`` and ``high`` (k,), ∓∞ for none. A combination with two bounds gets the
        moments of the uniform law between them, and any other gets an inverse variance of zero.
        """
        width, middle = high - low, (high + low) / 2
        precision = torch.where(width.isfinite(), 12 / width.square(), 0.0)
        shift = torch.where(width.isfinite(), precision * middle, 0.0)
        return cls(forms, low, high, precision, shift)

    def renewed(self, mean: Tensor, covariance: Tensor) -> "Bounds":
        """Return the bounds after one round of expectation propagation for all combinations.

        The round moves the normal density that stands for each bound. ``mean`` (u,) and
        ``covariance`` (u, u) are those of the pixels' present normal law. A combination's own
        density is divided out of this law. What remains, truncated to the bounds, has a mean and a
        variance. The goal is the density whose product with the remaining law has these moments.
        The new density is halfway between the old density and the goal, in ``precision`` and in
        ``shift``.
        """
        means = self.forms @ mean
        variances = ((self.forms @ covariance) * self.forms).sum(1).clamp_min(0)
        rest = 1 / variances.clamp_min(LEAST_SPREAD**2) - self.precision
        # If one density determines its combination of pixels almost alone, the pixels' law without
        # this density is lost in rounding. So this density stays as it is.
        is_told = (variances > LEAST_SPREAD**2) & (rest * variances > 1e-3)
        rest = rest.where(is_told, torch.ones_like(rest))
        centre = (means / variances.clamp_min(LEAST_SPREAD**2) - self.shift) / rest
        own_mean, own_variance = truncated(centre, rest.rsqrt(), self.low, self.high)
        precision = (1 / own_variance - rest).clamp_min(0)
        shift = own_mean / own_variance - centre * rest
        return replace(
            self,
            precision=torch.where(is_told, self.precision.lerp(precision, 0.5), self.precision),
            shift=torch.where(is_told, self.shift.lerp(shift, 0.5), self.shift),
        )


def fill_unseen(
    spec: InputSpec, order: InputOrder, found: PrunedPass, budget: Budget = UNLIMITED
) -> Filled | None:
    """Return an image whose unseen pixels are posterior means, or None if too many are unseen.

    Unseen are the pixels that pruning hides. The posterior combines a normal prior of images, the
    bounds that pruned entries give, and the known inputs of the layers behind the first one. Each
    of at most 60 rounds takes u³ operations for u unseen pixels, and the prior of n pixels takes u
    n memory; the result is ``None`` if the prior's matrix would exceed :data:`MOST_ENTRIES`. No
    round begins once the budget is spent.

    ``order`` is the order in which the first layer takes the pixels. ``found`` holds the linear
    layers with their known errors and inputs.
    """
    first = found.layers[0]
    unseen = order.moved(~first.seen)
    if int(unseen.sum()) * len(unseen) > MOST_ENTRIES:
        return None
    base = torch.where(unseen, 0.0, order.pixels(first.inputs))
    precision, shift, spread = _given_seen(spec, base, unseen)
    lead = replace(
        first,
        matrix=order.moved(first.matrix * order.scale),
        offset=first.offset + first.matrix @ order.offset,
    )
    layers = [lead, *found.layers[1:]]
    blur = order.moved(first.deviations / order.scale.abs())
    bounds = _bounds(spec, order, layers, found.features, base, unseen)
    mean, covariance = _posterior(precision, shift, bounds, None)
    stopped = settled = False
    for _ in range(60):
        stopped = budget.is_spent
        if stopped:
            break
        equations = _linearised(layers, found.features, base, blur, unseen, mean, covariance)
        before = mean
        mean, covariance = _posterior(precision, shift, bounds, equations)
        settled = float((mean - before).abs().max()) <= 1e-6 * spread
        if settled:
            break
        bounds = bounds.renewed(mean, covariance)
    inputs = base.clone()
    inputs[unseen] = mean
    deviation = float(covariance.diagonal().clamp_min(0).mean().sqrt())
    return Filled(inputs, deviation, stopped, settled)


def _given_seen(spec: InputSpec, base: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the normal law of the u unseen pixels given the seen ones under the prior of images.

    The prior's scale maximises the likelihood of the k seen pixels: its square is ``‖L⁻¹ z‖² / k``.
    L is a root of the prior's covariance, and z the offset from grey of the most likely image with
    the seen pixels. ``base`` (n,) is the flattened image, zero where ``unseen`` (n,) is true.

    Returns:
        The law's inverse covariance (u, u), this matrix times the law's mean (u,), and the root
        mean square of z.
    """
    prior = ImagePrior.natural(spec)
    inverse = replace(prior, deviations=1 / prior.deviations, scale=1 / prior.scale)
    grey = prior.grey.flatten()
    basis = torch.eye(len(base), dtype=base.dtype)[unseen].reshape(-1, *spec.shape)
    rows = inverse.pull(basis).flatten(1)
    offset = torch.where(unseen, 0.0, base - grey)
    known = inverse.pull(offset.reshape(spec.shape)).flatten()
    precision, wanted = rows @ rows.T, -rows @ known
    likely = torch.cholesky_solve(wanted[:, None], torch.linalg.cholesky(precision))[:, 0]
    variance = (known + likely @ rows).square().sum() / (~unseen).sum()
    variance = variance.clamp_min(FLOAT32_NOISE**2)
    offset[unseen] = likely
    shift = (wanted + precision @ grey[unseen]) / variance
    return precision / variance, shift, float(offset.square().mean().sqrt())


def _bounds(
    spec: InputSpec,
    order: InputOrder,
    layers: Sequence[PrunedLayer],
    features: Sequence[Known],
    base: Tensor,
    unseen: Tensor,
) -> Bounds:
    """Return bounds on the unseen pixels, and on the first layer's outputs as functions of them.

    ``order`` is the order in which the first of the linear layers takes the pixels; the columns of
    this layer's ``matrix`` are already in the order of the image. ``features`` are the known
    outputs of the ReLU behind each layer but the last one. ``base`` (n,) is the flattened image,
    zero where ``unseen`` (n,) is true.
    """
    first = layers[0]
    dark, bright = (bound.flatten() for bound in spec.bounds(base))
    ends = torch.stack([order.pixels(torch.full_like(base, x * first.bound)) for x in (-1.0, 1.0)])
    low = torch.maximum(ends.amin(0), dark)[unseen]
    high = torch.minimum(ends.amax(0), bright)[unseen]
    high = torch.maximum(high, low + LEAST_SPREAD)  # rounding may exchange the two bounds
    forms = torch.eye(len(low), dtype=base.dtype)
    if len(layers) > 1:
        rows = ~features[0].valued
        rest = (first.offset + first.matrix @ base)[rows]
        forms = torch.cat([forms, first.matrix[rows][:, unseen]])
        most = features[0].bounds[rows]
        least = torch.full_like(rest, -math.inf).masked_fill(features[0].mask.on[rows], 0.0)
        low, high = torch.cat([low, least - rest]), torch.cat([high, most - rest])
    return Bounds.of(forms, low, high)


def _linearised(
    layers: Sequence[PrunedLayer],
    features: Sequence[Known],
    base: Tensor,
    blur: Tensor,
    unseen: Tensor,
    mean: Tensor,
    covariance: Tensor,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return equations ``H x = y`` that known features give about the u unseen pixels x, or None.

    Features are the outputs of ReLUs. ReLUs are linearised under the present normal law of x, with
    ``mean`` (u,) and ``covariance`` (u, u). So the features f of a layer are ``v + H (x − mean)``
    plus normal errors, where v is their value for ``x = mean``, and y is ``f − v + H mean``.

    The columns of the first layer's ``matrix`` are in the order of the image's pixels. ``features``
    are the known outputs of the ReLU behind each layer but the last one. ``base`` (n,) is the
    flattened image, zero where ``unseen`` (n,) is true, and ``blur`` (n,) are standard deviations
    of the seen pixels.

    Returns:
        H (k, u), y (k,), and the positive definite covariance (k, k) of the equations' errors; or
        ``None`` if there is no layer behind the first.
    """
    value = base.clone()
    value[unseen] = mean
    slopes = torch.eye(len(base), dtype=base.dtype)[:, unseen]
    noise = blur.diag()[:, blur > 0]
    forms, values, noises, deviations = [], [], [], []
    for layer, following, known in zip(layers, layers[1:], features, strict=False):
        outputs = layer.offset + layer.matrix @ value
        slopes, noise = layer.matrix @ slopes, layer.matrix @ noise
        seen, mask = known.valued, known.mask
        forms.append(slopes[seen])
        values.append(known.values[seen] - outputs[seen] + slopes[seen] @ mean)
        noises.append(noise[seen])
        deviations.append(following.deviations[seen])
        variance = ((slopes @ covariance) * slopes).sum(1) + noise.square().sum(1)
        slope, own, left = _rectified(outputs, variance.clamp_min(LEAST_SPREAD**2).sqrt())
        left = mask.gate(0.0, left)
        value = torch.where(seen, known.values, mask.gate(outputs, own))
        slope = torch.where(seen, 0.0, mask.gate(1.0, slope))
        slopes, noise = slope[:, None] * slopes, slope[:, None] * noise
        noise = torch.cat([noise, torch.where(seen, 0.0, left.sqrt()).diag()], 1)
    if not forms:
        return None
    width = noises[-1].shape[1]
    noise = torch.cat(
        [torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in noises]
    )
    errors = noise @ noise.T + torch.cat(deviations).square().diag()
    return torch.cat(forms), torch.cat(values), errors


def _posterior(
    precision: Tensor,
    shift: Tensor,
    bounds: Bounds,
    equations: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return the mean (u,) and covariance (u, u) of the unseen pixels' normal posterior.

    ``precision`` (u, u) is the prior's inverse covariance, and ``shift`` (u,) this matrix times the
    prior's mean. ``bounds`` holds normal densities that stand for bounds on combinations of the
    pixels. ``equations`` about the pixels x are H (k, u), y (k,) and the covariance (k, k) of the
    errors of ``H x = y``; ``None`` if there are none.
    """
    total = precision + bounds.forms.T @ (bounds.precision[:, None] * bounds.forms)
    wanted = shift + bounds.forms.T @ bounds.shift
    if equations is not None:
        forms, values, errors = equations
        root = torch.linalg.cholesky(errors)
        both = torch.cat([forms, values[:, None]], 1)
        whitened = torch.linalg.solve_triangular(root, both, upper=False)
        total = total + whitened[:, :-1].T @ whitened[:, :-1]
        wanted = wanted + whitened[:, :-1].T @ whitened[:, -1]
    root = torch.linalg.cholesky(total)
    return torch.cholesky_solve(wanted[:, None], root)[:, 0], torch.cholesky_inverse(root)


def _rectified(mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each ReLU the line of least mean squared error under a normal law of its input.

    Each ReLU has a law of its own, with its ``mean`` and standard ``deviation`` > 0. The three
    tensors are the slopes, the lines' values at the means, and the variances of the ReLUs' outputs
    around the lines.
    """
    ratio = mean / deviation
    above = torch.special.ndtr(ratio)
    density = (-ratio.square() / 2).exp() / math.sqrt(2 * math.pi)
    value = mean * above + deviation * density
    square = (mean.square() + deviation.square()) * above + mean * deviation * density
    left = square - value.square() - (above * deviation).square()
    return above, value, left.clamp_min(0)


def truncated(mean: Tensor, deviation: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances of many normal laws, each truncated to [low, high].

    ``mean`` and ``deviation`` > 0 are those of the laws without bounds. A bound of ∓∞ is none.

    Example:
        >>> zero, one = torch.zeros(1).double(), torch.ones(1).double()
        >>> truncated(zero, one, zero, one / 0)
        (tensor([0.7979], dtype=torch.float64), tensor([0.3634], dtype=torch.float64))
    """
    below, above = (low - mean) / deviation, (high - mean) / deviation
    # If both bounds lie above the mean, they are mirrored to below it, where log_ndtr is accurate
    # for small shares.
    is_flipped = below > 0
    below, above = torch.where(is_flipped, -above, below), torch.where(is_flipped, -below, above)
    outer, inner = torch.special.log_ndtr(below), torch.special.log_ndtr(above)
    share = inner + torch.log1p(-(outer - inner).clamp_max(-1e-12).exp())

    def density(places: Tensor) -> Tensor:
        return (-places.square() / 2 - share).exp() / math.sqrt(2 * math.pi)

    first, second = density(below), density(above)
    shift = first - second
    moments = below.nan_to_num(0, 0, 0) * first - above.nan_to_num(0, 0, 0) * second
    variance = deviation.square() * (1 + moments - shift.square())
    found = mean + deviation * torch.where(is_flipped, -shift, shift)
    # Between close bounds the law is uniform, and the formula above loses its variance to rounding.
    width = high - low
    variance = torch.minimum(variance, width.square() / 12)
    least = torch.minimum(deviation, width).square() * 1e-6
    return found.clamp(low, high), torch.maximum(variance, least)
