"""Fit the input of a stem: a convolution and max pooling over windows that may overlap.

In the stem of a ResNet, 3×3 windows of stride 2 keep 16,384 numbers of a 64×64 image, which has
12,288 values itself. Let x be the image, W the convolution's weight and t the offset of its
outputs, which are called *entries* here. If the place of each window's maximum is given, the
windows' values ``v = (W ∗ x + t)[maximum]`` are linear in x. Neighbouring windows share maxima, so
that only some 9,300 of these equations are distinct. They alone determine the image to about 40 dB.
The gradient ``∂L/∂W = Σ_k δ[k] x[patch k]`` of the convolution is linear in x, too. The sum is over
the places k of maxima, and δ[k] is the known derivative of the loss by the value there. Windows'
values and gradient together determine x.

Two facts restrict the place of each window's maximum:

- The values bound the entries: an entry is at most the least value of the windows that hold it.
- Two windows with equal values share their maximum, unless their patches are equal. So windows fall
  into *groups*. All windows of a group hold its one maximum. On an untrained ResNet-18 at 64×64
  pixels, a fifth of the groups is left with one candidate place, and the median group with four.

The rest is found by alternation, as in expectation maximisation. The weights p of a group's
candidate places k first come from the present image's entries y, with normal errors of width τ,

    p_k ∝ φ((v − y_k) / τ) / Φ((v − y_k) / τ),

where v is the group's value, and φ and Φ are the normal density and distribution. The denominator
accounts for the other entries, which lie below v. Weighted least squares with a prior of natural
images gives the next image, while τ falls. From some τ on, the gradient of the convolution is used.
A wrong choice j in place of k changes the gradient of its channel by
``δ (x[patch k] − x[patch j])``, which the channel's 147 equations show. So before the weights are
computed again, choices are changed (*turned*) one after another: in each channel, the one that
raises the likelihood the most. Equations with a large misfit get less weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.exact.feature_fit import Fit, feature_distance
from flwr_leakage.attacks.exact.recover_features import Features
from flwr_leakage.attacks.exact.relu_walk import ReluWalk
from flwr_leakage.attacks.network.calls import Geometry, Pair
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior

WIDTH, FALL, COARSE = 2.0, 0.72, 13
"""The search for an image and for the places of its maxima in pooling windows assumes a normal
error of the values before pooling. The constants are its standard deviation τ in the first step, in
units of the standard deviation of the windows' values; the ratio of τ from step to step; and the
number of steps before the maxima's places are corrected by the gradient. All constants of this
module were chosen on one development draw of a ResNet-18 at 64×64 pixels, and held on four more; no
results are kept."""

JOINS = 0.12
"""The gradient of the convolution takes part in the fit once the standard deviation τ of the error
of the values before pooling is below this. The unit is the standard deviation of the pooling
windows' values. With a large τ, most places of maxima are still wrong, and so is the gradient's
equation."""

BELIEF, BELIEF_FALL = 0.033, 0.8
"""Standard deviation of the error of the values before pooling, by which candidate places of the
maxima are weighed in the first step that corrects them by the gradient. It is in units of the
standard deviation of the windows' values. The second number is its ratio from step to step.
:data:`WIDTH` says how both were chosen."""

TRUST, TRUST_FALL, FINE = 0.025, 0.7, 26
"""Standard deviation that the least-squares fit of the image assumes for the errors of its
equations in the first step that corrects the maxima's places, in units of the standard deviation of
the windows' values; its ratio from step to step; and the largest number of these steps.
:data:`WIDTH` says how they were chosen."""

SETTLED, BALANCE, LEAST = 14, 5.0, 4e-6
"""Number of steps with corrected places of maxima after which the assumed standard deviation of the
equations' errors is a multiple of the residual that the gradient leaves; this multiple; and the
standard deviation at which the search ends. If it kept falling by a fixed ratio instead, conjugate
gradients did not reach the directions that only the gradient determines, and an image stayed at 63
dB in place of more than 90."""

KEPT, DOUBT = 0.1, 0.03
"""Least variance of the noise of a channel's gradient, as a share of the mean squared residual that
this gradient has before a step corrects the places of the channel's maxima. The second number is
the factor d by which an equation with misfit m, in units of its assumed error, loses weight: its
weight is divided by 1 + d m². :data:`WIDTH` says how both were chosen."""

TURNS, GAIN = 40, 0.5
"""Largest number of changes of maxima's places in a channel in one step of the search, and the gain
in log-likelihood that each change must exceed. :data:`WIDTH` says how both were chosen."""

EQUAL = 50
"""Difference, in units of their noise, up to which the values of two pooling windows count as
equal, so that the windows share their maximum. At 10, four of the 9,300 groups of such windows of
one image were torn apart, and the image was found with 51 dB in place of more than 100."""

ITERATIONS, TOLERANCE = 60, 1e-3
"""Largest number of iterations of conjugate gradients in a step, and the relative residual at which
they end. :data:`WIDTH` says how both were chosen."""


@dataclass(frozen=True)
class Stem:
    """The convolution of a network's stem, which maps an input x to the values that are pooled.

    Attributes:
        weight: W (C, c, k, k), with the scale of BatchNorm in it.
        offset: t (C,), the shift of each channel, so that the values before pooling are W ∗ x + t.
        geometry: kernel, padding and stride of the convolution.
        shape: the shape (1, C, H, W) of the values before pooling.
        size: the shape (1, c, height, width) of the input.
    """

    weight: Tensor
    offset: Tensor
    geometry: Geometry
    shape: torch.Size
    size: torch.Size

    @classmethod
    def of(cls, problem: Problem, number: int) -> tuple["Stem", Tensor, str] | None:
        """Return the stem before a ReLU: the network's first convolution, with its shift.

        ``number`` is the place of the ReLU in the order of calls, from 0.

        Returns:
            The stem; the factors (C,) by which BatchNorm scales the model's weight; and this
            weight's name. The result is ``None`` if the inputs of the ReLU are not one convolution
            of the network's input, scaled and shifted channel by channel.
        """
        noise = torch.randn(1, *problem.spec.shape, generator=torch.Generator().manual_seed(0))
        noise = noise.to(problem.gradient[next(iter(problem.gradient))])
        with torch.no_grad():
            zero, drawn = (ReluWalk(problem, x, last=number) for x in (0 * noise, noise))
        use = drawn.uses[0]
        weight = problem.params[use.name].detach()
        entries, offset = drawn.preactivations[number], zero.preactivations[number]
        if number or use.source >= 0 or use.outputs.shape != entries.shape:
            return None
        plain = F.conv2d(noise, weight, None, use.geometry.stride, use.geometry.padding,
                         use.geometry.dilation)  # fmt: skip
        change = entries - offset
        scale = (change * plain).sum((0, 2, 3)) / plain.square().sum((0, 2, 3))
        wide = scale[:, None, None]
        if float((change - wide * plain).norm()) > 1e-3 * float(change.norm()):
            return None
        stem = cls(wide[..., None] * weight, offset[0, :, 0, 0], use.geometry, entries.shape,
                   noise.shape)  # fmt: skip
        return stem, scale, use.name

    @property
    def _settings(self) -> tuple[Pair, Pair, Pair]:
        return self.geometry.stride, self.geometry.padding, self.geometry.dilation

    def push(self, inputs: Tensor) -> Tensor:
        """Return the convolution W ∗ x, without offset, of inputs x (1, c, H, W)."""
        stride, padding, dilation = self._settings
        return F.conv2d(inputs, self.weight, None, stride, padding, dilation)

    def pull(self, errors: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the derivative (1, c, H, W) of the loss by the convolution's input.

        ``errors`` (1, C, H, W) are the derivatives of the loss by the convolution's outputs.
        ``weight`` stands in for the stem's own weight if it is given.
        """
        weight = self.weight if weight is None else weight
        return conv2d_input(self.size, weight, errors, *self._settings)

    def correlate(self, inputs: Tensor, errors: Tensor) -> Tensor:
        """Return the gradient ``Σ_p δ[p] x[patch p]`` (C, c, k, k) of the convolution's weight.

        x (1, c, H, W), ``inputs``, is the convolution's input, and δ (1, C, H, W), ``errors``, the
        derivative of the loss by its outputs, whose places are p.
        """
        return conv2d_weight(inputs, self.weight.shape, errors, *self._settings)


@dataclass(frozen=True)
class Groups:
    """G groups of pooling windows; the windows of a group share the place of their maximum.

    A channel has P positions, and an entry is the value of one of C channels at one position before
    pooling. A window holds K entries, the candidates for its maximum.

    Attributes:
        channels: (G,) channel of each group.
        entries: (G, K) indices of the candidates among all entries.
        allowed: (G, K) booleans, true for candidates that may be the maximum.
        values: (G, 1) value of each group's maximum.
        errors: (G,) derivative of the loss by the maximum, the sum over the group's windows.
        bounds: (C·P,) upper bound of each entry, the least value of the windows that hold it;
            infinite if there is none.
    """

    channels: Tensor
    entries: Tensor
    allowed: Tensor
    values: Tensor
    errors: Tensor
    bounds: Tensor

    @classmethod
    def of(
        cls, table: Tensor, values: Tensor, errors: Tensor, positions: int, tolerance: float
    ) -> "Groups":
        """Return the groups of windows that share the place of their maximum.

        ``table`` (K, N) lists the K positions of each of N windows, −1 beyond the map. A channel
        has ``positions`` positions before pooling. ``values`` (C, N) are the maxima of the windows,
        0 if they are not positive, and ``errors`` (C, N) the derivatives of the loss by these
        maxima. Two maxima count as equal if they differ by at most ``tolerance``.
        """
        channels, windows = values.shape
        first = positions * torch.arange(channels)[:, None, None]
        entries = (first + table.T.clamp_min(0)).flatten()  # entries of windows, (C·P·K,)
        shape = (channels, windows, len(table))
        is_inside = (table.T >= 0).expand(shape)
        spread = values[..., None].expand(shape)
        bounds = values.new_full((channels * positions,), torch.inf)
        outer = torch.where(is_inside, spread, torch.inf).flatten()
        bounds = bounds.scatter_reduce(0, entries, outer, "amin")
        near = spread - bounds[entries].reshape(shape) <= tolerance
        near = near & is_inside & (spread > 0)
        own = torch.arange(channels * windows).reshape(channels, windows)
        labels = own
        far = channels * windows
        for _ in range(3):
            told = torch.where(near, labels[..., None], far)
            least = torch.full_like(bounds, far, dtype=torch.long)
            least = least.scatter_reduce(0, entries, told.flatten(), "amin")
            told = torch.where(near, least[entries].reshape(shape), far)
            labels = torch.minimum(labels, told.amin(2))
        counts = torch.zeros_like(bounds).index_add(0, entries, near.flatten().to(bounds))
        sizes = torch.bincount(labels.flatten(), minlength=far).to(bounds)[labels]
        allowed = near & (counts[entries].reshape(shape) == sizes[..., None])
        # Equal patches, such as those of a white sky, have equal values at several positions. If no
        # position lies in all windows of a group, each of its windows becomes a group of its own.
        is_whole = allowed.any(2).flatten()[labels]
        labels = torch.where(is_whole, labels, own)
        allowed = torch.where(is_whole[..., None], allowed, near)
        chosen = (labels == own) & allowed.any(2)
        total = torch.zeros(far).to(errors).index_add(0, labels.flatten(), errors.flatten())
        return cls(
            torch.nonzero(chosen)[:, 0],
            entries.reshape(shape)[chosen],
            allowed[chosen],
            values[chosen][:, None],
            total.reshape(channels, windows)[chosen],
            bounds,
        )

    def at(self, weights: Tensor) -> Tensor:
        """Return for each value before pooling, (C·P,), the sum of its weights as a candidate.

        There are C channels of P positions. Each of G groups of pooling windows has K of these
        values as candidates for its maximum, with ``weights`` (G, K).
        """
        total = torch.zeros_like(self.bounds)
        return total.index_add(0, self.entries.flatten(), weights.flatten())

    def log_odds(self, entries: Tensor, width: float) -> Tensor:
        """Return the log probability (G, K), up to a constant, of the maxima's candidate places.

        G groups of pooling windows have K candidate places each for their common maximum.
        ``entries`` (1, C, H, W) are an image's values before pooling, and ``width`` is the standard
        deviation of their error. The log probability of a place that cannot hold the maximum is −∞.
        """
        misfit = (entries.flatten()[self.entries] - self.values) / width
        odds = -misfit.square() / 2 - torch.special.log_ndtr(-misfit)
        return torch.where(self.allowed, odds, -torch.inf)


@dataclass(frozen=True)
class _Search:
    """The alternating search for the places of the maxima in pooling windows, and for the image.

    Attributes:
        stem: the convolution before the max pooling.
        groups: the groups of pooling windows with their candidate places.
        prior: the prior of natural images.
        gradient: ∂L/∂W of the convolution, divided by its root mean square.
    """

    stem: Stem
    groups: Groups
    prior: ImagePrior
    gradient: Tensor

    def entries(self, inputs: Tensor) -> Tensor:
        return self.stem.push(inputs) + self.stem.offset[:, None, None]

    def solve(self, point: Tensor, odds: Tensor, width: float, doubt: float,
              noise: Tensor | None) -> Tensor:  # fmt: skip
        """Return the coordinates under the prior, (1, c, H, W), of the image that fits best.

        The image passes a convolution and max pooling. The fit is to the pooling windows' values at
        the candidate places of their maxima, by weight, to the upper bounds of all other values
        before pooling, and to the gradient of the convolution. The solver starts from ``point``
        (1, c, H, W), the coordinates of the previous image. The ``odds`` (G, K) are weights of the
        K candidate places of G groups of windows, which sum to one in a group. ``width`` is the
        standard deviation of the error of a value before pooling. The weight of an equation is
        divided by 1 + ``doubt`` · m², where m is its misfit at ``point`` in units of ``width``.
        ``noise`` (C,) is a variance of the gradient's noise that is added to the variance from
        undecided places; with ``None``, the gradient is ignored.
        """
        stem, groups, prior = self.stem, self.groups, self.prior
        inputs = prior.inputs(point)
        entries = self.entries(inputs)
        flat = entries.flatten()
        lengths = stem.weight.flatten(1).square().sum(1)
        counted = odds / (1 + doubt * ((flat[groups.entries] - groups.values) / width).square())
        weights = groups.at(counted)
        slope = groups.at(counted * groups.values) - weights * flat
        beyond = torch.where(flat > groups.bounds, (1 - weights).clamp_min(0), 0.0)
        slope = slope + beyond * torch.where(beyond > 0, groups.bounds - flat, 0.0)
        weights = ((weights + beyond) / width**2).reshape(stem.shape)
        right = stem.pull(slope.reshape(stem.shape) / width**2)
        curvature = float((weights * lengths[:, None, None]).sum())

        errors, scale = torch.zeros_like(weights), torch.zeros(1)
        if noise is not None:
            errors = groups.at(odds * groups.errors[:, None]).reshape(stem.shape)
            squares = errors.square().sum((0, 2, 3))
            noise = noise + self._spread(inputs, odds) + width**2 * squares / lengths + 1e-12
            scale = (1 / noise)[:, None, None, None]
            residual = self.gradient - stem.correlate(inputs, errors)
            right = right + stem.pull(errors, scale * residual)
            curvature += residual[0].numel() * float((squares / noise).sum())

        def product(image: Tensor) -> Tensor:
            told = stem.pull(weights * stem.push(image))
            if noise is None:
                return told
            return told + stem.pull(errors, scale * stem.correlate(image, errors))

        variance = (prior.deviations * prior.scale.square().mean().sqrt()).square()
        damping = 1 / (curvature / inputs.numel() * variance + 1)
        change, _ = conjugate_gradients(
            lambda v: prior.pull(product(prior.push(v.reshape(point.shape)))).flatten() + v,
            (prior.pull(right) - point).flatten(),
            TOLERANCE,
            ITERATIONS,
            lambda v: damping.flatten() * v,
        )
        return point + change.reshape(point.shape)

    def _patches(self, inputs: Tensor) -> Tensor:
        return self.stem.geometry.patches(inputs)[0].T.contiguous()

    def _spread(self, inputs: Tensor, odds: Tensor) -> Tensor:
        """Return the variance (C,) that undecided places of maxima cause in the gradient's entries.

        The gradient is that of the weight of a convolution with C output channels, before max
        pooling. ``inputs`` (1, c, H, W) is the present image. ``odds`` (G, K) are weights of the K
        places that may hold the maximum of each of G groups of pooling windows.
        """
        positions = self.stem.shape[2] * self.stem.shape[3]
        patches = self._patches(inputs)[self.groups.entries % positions]
        mean = (odds[..., None] * patches).sum(1, keepdim=True)
        each = (odds * (patches - mean).square().mean(2)).sum(1) * self.groups.errors.square()
        return each.new_zeros(self.stem.shape[1]).index_add(0, self.groups.channels, each)

    def turned(self, inputs: Tensor, odds: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights of the maxima's candidate places, corrected by the convolution's gradient.

        Each group first chooses its likeliest place. Then in each channel one choice after another
        is changed, each time the one that raises the likelihood most. ``inputs`` (1, c, H, W) is
        the present image. ``odds`` (G, K) holds logarithms of the weights that the image's values
        before pooling give the K candidate places of each of G groups of windows.

        Returns:
            The weights (G, K), which sum to one in a group; and for each channel the mean square
            (C,) of the gradient that its choices leave unexplained.
        """
        groups, channels = self.groups, self.groups.channels
        patches = self._patches(inputs)
        places = groups.entries % len(patches)
        rows, columns = torch.nonzero(groups.allowed, as_tuple=True)
        every, chance = patches[places[rows, columns]], odds[rows, columns]
        squares, error, channel = every.square().sum(1), groups.errors[rows], channels[rows]
        each, choice = torch.arange(len(odds)), odds.argmax(1)
        own = patches[places[each, choice]]
        residual = self.gradient.flatten(1)
        residual = residual.index_add(0, channels, -groups.errors[:, None] * own)
        least = KEPT * residual.square().mean(1) + 1e-14

        def gains() -> Tensor:
            noise = torch.maximum(residual.square().mean(1), least)[channel]
            change = (residual[channel] * every).sum(1) - (residual[channels] * own).sum(1)[rows]
            distance = squares - 2 * (every * own[rows]).sum(1) + own.square().sum(1)[rows]
            told = (2 * error * change - error.square() * distance) / (2 * noise)
            return told + chance - odds[each, choice][rows]

        gain = gains()
        for _ in range(TURNS):
            best = torch.full((len(residual),), GAIN).to(gain)
            best = best.scatter_reduce(0, channel, gain, "amax")
            turns = torch.nonzero((gain == best[channel]) & (gain > GAIN))[:, 0]
            if not len(turns):
                break
            group = rows[turns]
            change = groups.errors[group, None] * (every[turns] - own[group])
            residual = residual.index_add(0, channels[group], -change)
            choice[group], own[group] = columns[turns], every[turns]
            gain = gains()
        odds = torch.full_like(odds, -torch.inf)
        odds[rows, columns] = gain
        return odds.softmax(1), residual.square().mean(1)


def fit_stem(problem: Problem, features: Features, budget: Budget) -> Fit | None:
    """Return the input that fits a stem's pooled outputs and its gradient, or None.

    A stem is a convolution of the input with a ReLU and max pooling over windows that may overlap.
    ``features`` holds its known outputs and the derivatives of the loss by them. None is returned
    if the outputs are not those of one convolution of the input, if the convolution is frozen, or
    if the derivatives are unknown. The value of the fit is the :func:`feature_distance` of the
    outputs.
    """
    number = features.shallowest
    found = Stem.of(problem, number)
    if (
        found is None
        or features.error is None
        or features.table is None
        or found[2] not in problem.gradient_map.trained
    ):
        return None
    stem, scale, name = found
    known = features.outputs[number].float()
    gradient = problem.gradient[name].float()
    unit = gradient.square().mean().sqrt().clamp_min(1e-30)
    error = scale[:, None, None] * features.error.float()[0] / unit
    positions = stem.shape[2] * stem.shape[3]
    noise = max(features.noise.get(number, 0.0), 1e-7) * float(known.square().mean().sqrt())
    groups = Groups.of(
        features.table, known[0].flatten(1), error.flatten(1), positions, EQUAL * noise
    )
    prior = ImagePrior.natural(problem.spec).single()
    search = _Search(stem, groups, prior, gradient / unit)
    deviation = float(known.std())
    point = torch.zeros_like(prior.grey)
    steps = 0
    for step in range(COARSE):
        if budget.is_spent:
            break
        width = WIDTH * FALL**step * deviation
        odds = groups.log_odds(search.entries(prior.inputs(point)), width).softmax(1)
        joined = torch.zeros(stem.shape[1]) if width < JOINS * deviation else None
        point = search.solve(point, odds, width, 0.0, joined)
        steps += 1
    for step in range(FINE):
        if budget.is_spent:
            break
        inputs = prior.inputs(point)
        belief = BELIEF * BELIEF_FALL**step * deviation
        odds, left = search.turned(inputs, groups.log_odds(search.entries(inputs), belief))
        width = TRUST * TRUST_FALL**step
        if step >= SETTLED:
            # The residual of an image with many wrong places of maxima is large. Without the upper
            # limit of TRUST / 5, such an image fell from 43 to 23 dB.
            width = min(max(BALANCE * float(left.median().sqrt()), LEAST), TRUST / 5)
        point = search.solve(point, odds, width * deviation, DOUBT, left)
        steps += 1
        if width <= LEAST:
            break
    inputs = problem.spec.clamp(prior.inputs(point))
    with torch.no_grad():
        walk = ReluWalk(problem, inputs, last=number, pooled=features.windows)
    return Fit(inputs, float(feature_distance(walk.compared(number), known)), steps, steps)
