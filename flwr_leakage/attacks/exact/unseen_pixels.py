"""The pixels of which a pruned update keeps nothing: what is likely of them, given all the rest.

The kept entries of the first layer tell the other pixels exactly
(:mod:`~flwr_leakage.attacks.exact.pruned_layers`). Of those that are unseen it is known that

* they are small, and in the range of images;
* the first layer's outputs are the features that the next layer's gradient shows, where these were
  kept; small where they were not; at most zero where a unit is off, at least zero where it is on;
* the layers behind, of which more is kept than of the first, tell sums of the features that are
  not seen;
* images are smooth (:class:`flwr_leakage.spectral.image_prior.ImagePrior`).

With ReLUs taken as on, off, or for the moment as the line that fits them best under what is known
of their input (statistical linearisation, as in the iterated posterior linearisation filter of
García-Fernández, Svensson, Morelande and Särkkä 2015), equations are linear, and the posterior is
normal but for bounds. These are met by expectation propagation (Minka 2001): each by a normal
factor that leaves mean and variance of the truncated law. The mean is the estimate of the least
expected squared error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.exact.pruned_layers import FLOAT, PrunedLayer, PrunedPass
from flwr_leakage.attacks.input_order import InputOrder
from flwr_leakage.records import InputSpec
from flwr_leakage.spectral.image_prior import ImagePrior

TURNS = 60
"""Most linearisations."""

SETTLED = 1e-6
"""Change of the mean, in units of what images deviate by, at which they end."""

DAMPING = 0.5
"""Share of the way to a bound's new factor: all of them are renewed at the same time."""

LEAST_SPREAD = 1e-8
"""Deviation below which a bounded value is as good as known, and its factor stays."""

MOST_ENTRIES = 40_000_000
"""Of the prior's matrix: unseen pixels times all of them."""


@dataclass(frozen=True)
class Filled:
    """The unseen pixels.

    Attributes:
        inputs: the whole image (n,), normalised.
        deviation: of the unseen pixels, root mean square, as the posterior has it.
        stopped: whether the budget was spent before the mean settled.
        settled: whether it did.
    """

    inputs: Tensor
    deviation: float
    stopped: bool
    settled: bool


@dataclass(frozen=True)
class Bounds:
    """Bounds of linear forms of the unseen pixels, and the normal factors in their place.

    Attributes:
        forms: (k, u), one in each row.
        low: (k,), −∞ for none.
        high: (k,), ∞ for none.
        precision: of the factors (k,), ≥ 0.
        shift: precision times mean of the factors (k,).
    """

    forms: Tensor
    low: Tensor
    high: Tensor
    precision: Tensor
    shift: Tensor

    @classmethod
    def of(cls, forms: Tensor, low: Tensor, high: Tensor) -> "Bounds":
        """Factors of nothing yet, but where both bounds are given: of the uniform law's moments."""
        width, middle = high - low, (high + low) / 2
        precision = torch.where(width.isfinite(), 12 / width.square(), 0.0)
        shift = torch.where(width.isfinite(), precision * middle, 0.0)
        return cls(forms, low, high, precision, shift)

    def renewed(self, mean: Tensor, covariance: Tensor) -> "Bounds":
        """With factors that give the truncated law's moments, part of the way.

        Args:
            mean: of the unseen pixels (u,).
            covariance: of the same (u, u).
        """
        means = self.forms @ mean
        variances = ((self.forms @ covariance) * self.forms).sum(1).clamp_min(0)
        rest = 1 / variances.clamp_min(LEAST_SPREAD**2) - self.precision
        # Where the factor itself tells nearly all, the rest of the law has no variance to speak of.
        is_told = (variances > LEAST_SPREAD**2) & (rest * variances > 1e-3)
        rest = rest.where(is_told, torch.ones_like(rest))
        centre = (means / variances.clamp_min(LEAST_SPREAD**2) - self.shift) / rest
        own_mean, own_variance = truncated(centre, rest.rsqrt(), self.low, self.high)
        precision = (1 / own_variance - rest).clamp_min(0)
        shift = own_mean / own_variance - centre * rest
        return replace(
            self,
            precision=torch.where(is_told, self.precision.lerp(precision, DAMPING), self.precision),
            shift=torch.where(is_told, self.shift.lerp(shift, DAMPING), self.shift),
        )


@dataclass(frozen=True)
class Equations:
    """Linear equations ``H x = y`` of the unseen pixels, with normal errors.

    Attributes:
        forms: H (k, u).
        values: y (k,).
        covariance: of the errors (k, k), positive definite.
    """

    forms: Tensor
    values: Tensor
    covariance: Tensor


def fill_unseen(
    spec: InputSpec, order: InputOrder, found: PrunedPass, budget: Budget = UNLIMITED
) -> Filled | None:
    """The posterior mean of an image's unseen pixels.

    Each turn solves for u unseen pixels: u³ operations, and u n memory of the prior of n pixels.

    Args:
        spec: of the image.
        order: how the first layer takes it.
        found: what the update tells, in double precision.
        budget: looked at before each turn.

    Returns:
        ``None`` where there are too many for matrices: see :data:`MOST_ENTRIES`.
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
    bounds = _bounds(spec, order, layers, found.states, base, unseen)
    mean, covariance = _posterior(precision, shift, bounds, None)
    stopped = settled = False
    for _ in range(TURNS):
        stopped = budget.is_spent
        if stopped:
            break
        equations = _linearised(layers, found.states, base, blur, unseen, mean, covariance)
        before = mean
        mean, covariance = _posterior(precision, shift, bounds, equations)
        settled = float((mean - before).abs().max()) <= SETTLED * spread
        if settled:
            break
        bounds = bounds.renewed(mean, covariance)
    inputs = base.clone()
    inputs[unseen] = mean
    deviation = float(covariance.diagonal().clamp_min(0).mean().sqrt())
    return Filled(inputs, deviation, stopped, settled)


def _given_seen(spec: InputSpec, base: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor, float]:
    """The prior of the unseen pixels, given the others: its precision and that times its mean.

    The prior's scale is that under which the seen pixels are most likely. With L the prior's
    root, z the offset from grey of the seen pixels and of what is then most likely of the others,
    and k seen pixels, it is ``‖L⁻¹ z‖² / k``.

    Returns:
        Both, and the deviation of a pixel of the most likely image from grey.
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
    variance = variance.clamp_min(FLOAT**2)
    offset[unseen] = likely
    shift = (wanted + precision @ grey[unseen]) / variance
    return precision / variance, shift, float(offset.square().mean().sqrt())


def _bounds(
    spec: InputSpec,
    order: InputOrder,
    layers: Sequence[PrunedLayer],
    states: Sequence[tuple[Tensor, Tensor]],
    base: Tensor,
    unseen: Tensor,
) -> Bounds:
    """Of the unseen pixels, and of the first layer's outputs."""
    first = layers[0]
    images = torch.tensor([0.0, 1.0], dtype=base.dtype)[:, None].expand(2, len(base))
    dark, bright = spec.normalize(images.reshape(2, *spec.shape)).flatten(1)
    ends = torch.stack([order.pixels(torch.full_like(base, x * first.bound)) for x in (-1.0, 1.0)])
    low = torch.maximum(ends.amin(0), dark)[unseen]
    high = torch.minimum(ends.amax(0), bright)[unseen]
    high = torch.maximum(high, low + LEAST_SPREAD)  # an image that lies beyond, by rounding
    forms = torch.eye(len(low), dtype=base.dtype)
    if len(layers) > 1:
        (on, off), following = states[0], layers[1]
        rows = ~following.seen
        rest = (first.offset + first.matrix @ base)[rows]
        forms = torch.cat([forms, first.matrix[rows][:, unseen]])
        most = torch.full_like(rest, following.bound).masked_fill(off[rows], 0.0)
        least = torch.full_like(rest, -math.inf).masked_fill(on[rows], 0.0)
        low, high = torch.cat([low, least - rest]), torch.cat([high, most - rest])
    return Bounds.of(forms, low, high)


def _linearised(
    layers: Sequence[PrunedLayer],
    states: Sequence[tuple[Tensor, Tensor]],
    base: Tensor,
    blur: Tensor,
    unseen: Tensor,
    mean: Tensor,
    covariance: Tensor,
) -> Equations | None:
    """What the features that are seen say of the unseen pixels, given what is known of these.

    Features of a layer are ``v + H (x − mean) + T ε``, with ε standard normal. The pixels that are
    seen have deviations ``blur``.
    """
    value = base.clone()
    value[unseen] = mean
    slopes = torch.eye(len(base), dtype=base.dtype)[:, unseen]
    noise = blur.diag()[:, blur > 0]
    forms, values, noises, deviations = [], [], [], []
    for layer, following, (on, off) in zip(layers, layers[1:], states, strict=False):
        outputs = layer.offset + layer.matrix @ value
        slopes, noise = layer.matrix @ slopes, layer.matrix @ noise
        seen = following.seen  # of these the ReLU is on
        known = following.inputs[seen]
        forms.append(slopes[seen])
        values.append(known - outputs[seen] + slopes[seen] @ mean)
        noises.append(noise[seen])
        deviations.append(following.deviations[seen])
        variance = ((slopes @ covariance) * slopes).sum(1) + noise.square().sum(1)
        slope, own, left = _rectified(outputs, variance.clamp_min(LEAST_SPREAD**2).sqrt())
        slope = torch.where(on, 1.0, torch.where(off, 0.0, slope))
        own = torch.where(on, outputs, torch.where(off, 0.0, own))
        left = torch.where(on | off, 0.0, left)
        value = torch.where(seen, following.inputs, own)
        slope = torch.where(seen, 0.0, slope)
        slopes, noise = slope[:, None] * slopes, slope[:, None] * noise
        noise = torch.cat([noise, torch.where(seen, 0.0, left.sqrt()).diag()], 1)
    if not forms:
        return None
    width = noises[-1].shape[1]
    noise = torch.cat(
        [torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in noises]
    )
    errors = noise @ noise.T + torch.cat(deviations).square().diag()
    return Equations(torch.cat(forms), torch.cat(values), errors)


def _posterior(
    precision: Tensor, shift: Tensor, bounds: Bounds, equations: Equations | None
) -> tuple[Tensor, Tensor]:
    """Mean and covariance, given the prior, the factors of bounds, and equations."""
    total = precision + bounds.forms.T @ (bounds.precision[:, None] * bounds.forms)
    wanted = shift + bounds.forms.T @ bounds.shift
    if equations is not None:
        root = torch.linalg.cholesky(equations.covariance)
        both = torch.cat([equations.forms, equations.values[:, None]], 1)
        whitened = torch.linalg.solve_triangular(root, both, upper=False)
        total = total + whitened[:, :-1].T @ whitened[:, :-1]
        wanted = wanted + whitened[:, :-1].T @ whitened[:, -1]
    root = torch.linalg.cholesky(total)
    return torch.cholesky_solve(wanted[:, None], root)[:, 0], torch.cholesky_inverse(root)


def _rectified(mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The line that fits a ReLU best under a normal law: slope, value at the mean, what varies."""
    ratio = mean / deviation
    above = torch.special.ndtr(ratio)
    density = (-ratio.square() / 2).exp() / math.sqrt(2 * math.pi)
    value = mean * above + deviation * density
    square = (mean.square() + deviation.square()) * above + mean * deviation * density
    left = square - value.square() - (above * deviation).square()
    return above, value, left.clamp_min(0)


def truncated(mean: Tensor, deviation: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a normal law on [low, high].

    Args:
        mean: of the law without bounds.
        deviation: of the same, > 0.
        low: −∞ for none.
        high: above ``low``, ∞ for none.

    Example:
        >>> zero, one = torch.zeros(1).double(), torch.ones(1).double()
        >>> truncated(zero, one, zero, one / 0)
        (tensor([0.7979], dtype=torch.float64), tensor([0.3634], dtype=torch.float64))
    """
    below, above = (low - mean) / deviation, (high - mean) / deviation
    # Both on the side below the mean, where the logarithm of the law tells small shares.
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
    # Between bounds that are close, the law is uniform, but for rounding.
    width = high - low
    variance = torch.minimum(variance, width.square() / 12)
    least = torch.minimum(deviation, width).square() * 1e-6
    return found.clamp(low, high), torch.maximum(variance, least)
