"""Give the equations of one image, after reading its features from a linear layer's gradient.

A linear layer's gradient of one sample is the outer product ``e [h, 1]ᵀ``. Its features h are the
layer's inputs, and its *error* e is the derivative of the loss by the layer's outputs. Each entry
has noise, or is known to lie below a threshold of pruning. The fit of e and h shows which units of
the ReLU before the layer are on, before any search for an image. With these, the rest of the update
becomes the equations of :class:`KnownErrors`. Of several linear layers in a row, the one nearest to
the images is used, so that the search for the image passes through none of the ReLUs between these
layers.

If a client takes T plain steps, the last layer's update determines the features h_t and the error
e_t of every step t (:mod:`~flwr_leakage.attacks.whole_batch.step_errors`). The features' own errors
are ``δ_t = W_tᵀ e_t`` with the layer's weight W_t. With these given, the update of the parameters θ
before the layer, at the learning rate η, is

    −Δθ / η = Σ_t ∂/∂θ ⟨δ_t ∘ 1[h_t > 0], c(x; θ_t)⟩,    θ_{t+1} = θ_t − η ∂/∂θ ⟨…⟩,

where c(x; θ) are the features of image x before their ReLU. There is no softmax in it. The
parameters θ_t are those of training on the candidate image. A step of Gauss–Newton takes them as
constants (deferred correction). It also takes a later term of the sum as a constant if the features
of that local step stay near those of the first, so that a product with the Jacobian costs one pass
in place of T. If a local step moved the features far, its term is differentiated, too. The truth
solves the equations in either case.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.exact.known import Known, Mask, above_noise, outer_product
from flwr_leakage.attacks.inversion.annealing import Annealing
from flwr_leakage.attacks.inversion.chain import ChainLinearization, Top
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.inversion.settling import Settling
from flwr_leakage.attacks.network.blur import blurring
from flwr_leakage.attacks.network.linear import find_last_layer, traced
from flwr_leakage.attacks.network.trace import LinearUse
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_NOISE, NOISE_DEVIATIONS
from flwr_leakage.attacks.solve.linearization import Linearized
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors, Passed
from flwr_leakage.attacks.whole_batch.step_errors import StepErrors, separate_steps
from flwr_leakage.params import Params
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.values import require


@dataclass(frozen=True, kw_only=True)
class LocalSteps(KnownErrors):
    """The gradients of all local steps before a linear layer, and the first step's features.

    They are equations of the image. T local steps were taken on one sample (B = 1). The n features
    are the inputs of the linear layer.

    Attributes:
        later: (t, B, n) the derivatives δ of the loss by the features in the t ≤ T − 1 steps after
            the first that have a visible error, zero where the ReLU is off.
        sloped: for each of these steps, whether its gradient counts as a function of the image. If
            not, it counts as a constant when the equations are differentiated.
    """

    later: Tensor
    sloped: Sequence[bool]

    @property
    def passes(self) -> int:
        """The number of backward passes that one product with the equations' Jacobian takes."""
        return 1 + sum(self.sloped)

    def parts(self, inputs: Tensor, blur: float, precise: bool = False) -> list[Tensor]:
        """Return a list of one tensor (P,): the numbers that an image (1, C, H, W) predicts.

        The equations set these numbers equal to the observed ones. The numbers are the gradients of
        all parameters before a linear layer, summed over the local steps, and then the first step's
        features, the inputs of that layer. If the image requires a gradient, the numbers have the
        derivative of the first step's term and of the later terms that are not taken as constants.
        ReLUs and max poolings are averaged over noise of ``blur`` times the spread of their inputs;
        0 for none. If ``precise``, the pass is in double precision.
        """
        total = last = first = torch.cat(super().parts(inputs, blur, precise))
        run = self.features if precise else self.passed.narrow
        params: Params = run.problem.params
        for errors, is_sloped in zip(self.later.to(total), self.sloped, strict=True):
            follows = is_sloped and first.requires_grad
            params = self._moved(params, last)
            leaves = {name: params[name].requires_grad_() for name in self.passed.names}
            with torch.enable_grad(), blurring(self.passed.deviations, blur):
                outputs = run(params, (inputs if follows else inputs.detach()).to(total.dtype))
                found = torch.autograd.grad(
                    (errors * outputs).sum(), list(leaves.values()), create_graph=follows
                )
            last = F.pad(torch.cat([each.flatten() for each in found]), (0, self.errors.numel()))
            total = total + last
        return [total]

    def linearize(self, inputs: Tensor, blur: float) -> Linearized:
        """Return the numbers that an image predicts for the equations, with their Jacobian.

        The numbers are those of :meth:`parts`: gradients, and then features. The image has the
        shape (1, C, H, W), and the Jacobian is given by its products with vectors. ReLUs and max
        poolings are averaged over noise of ``blur`` times the spread of their inputs; 0 for none.
        """
        chain = self.passed.chain
        if chain is None:
            return super().linearize(inputs, blur)
        parts: list[Linearized] = [super().linearize(inputs, blur)]
        widths = [blur * each for each in self.passed.deviations] if blur else []
        params: Params = self.passed.narrow.problem.params
        total = last = parts[0].value
        for errors, is_sloped in zip(self.later.to(total), self.sloped, strict=True):
            params = self._moved(params, last)
            part = ChainLinearization(chain, params, widths, partial(_untold, errors.T), inputs)
            total, last = total + part.value, part.value
            if is_sloped:
                parts.append(part)
        return Linearized(
            total,
            lambda direction: torch.stack([part.push(direction) for part in parts]).sum(0),
            lambda dual: torch.stack([part.pull(dual) for part in parts]).sum(0),
        )

    def _moved(self, params: Params, gradients: Tensor) -> Params:
        """Return the parameters after one local step of gradient descent.

        ``gradients`` (P,) are those of the parameters before the last layer, and then that layer's
        inputs, which are not used.
        """
        rate, moved, start = self.problem.schedule.learning_rate, dict(params), 0
        for name in self.passed.names:
            value = params[name].detach()
            step = gradients.detach()[start : start + value.numel()]
            moved[name] = value - rate * step.reshape(value.shape)
            start += value.numel()
        return moved


def _untold(errors: Tensor, outputs: Tensor) -> Top:
    """Return the derivatives of a local step's functional ``⟨δ, c⟩`` by the features c.

    The features c (n, B), ``outputs``, are the inputs of a linear layer, and δ (n, B), ``errors``,
    the derivatives of the loss by them. The features themselves are not observed in this step.
    """
    nothing = torch.zeros_like(outputs)
    return Top(nothing, nothing, errors.to(outputs), nothing)


def local_steps(
    problem: Problem,
    likelihood: Likelihood,
    layer: LinearUse,
    generator: torch.Generator,
    budget: Budget,
) -> tuple[LocalSteps, Likelihood]:
    """Return the equations of the image behind several local steps, and their observed values.

    ``likelihood`` is the noise and the pruning bounds of the update's entries, and ``budget`` the
    CPU time of the search for the steps' errors.

    Raises:
        ValueError: the steps are not plain, or use their batch's statistics; entries of the last
            layer were pruned; its update is not that of steps on one sample; its features are not
            those of a ReLU; or no parameter stands before it.
    """
    schedule, weight = problem.schedule, layer.weight
    assert layer.bias is not None
    if schedule.momentum or schedule.weight_decay or problem.members or problem.earlier:
        raise ValueError(
            "the local steps have momentum or weight decay, or are several clients' or rounds'."
        )
    if problem.gradient_map.uses_batch_statistics:
        raise ValueError("the local steps follow their batch's statistics.")
    slope = problem.gradient[layer.bias]
    if not problem.gradient[weight].any():
        raise ValueError("the last layer's weight did not move.")
    noise, bound = _last_layer(problem, likelihood, weight)
    if bound > NOISE_DEVIATIONS * noise:
        raise ValueError("entries of the last layer were pruned, which hides its local steps.")
    targets = problem.known_targets
    if targets is None:
        # The errors of every step have one negative entry, that of the label.
        targets = slope.argmin()[None]
    if not targets.is_floating_point():
        targets = F.one_hot(targets, len(slope))
    steps = separate_steps(
        torch.cat([problem.gradient[weight], slope[:, None]], 1),
        problem.params[weight],
        problem.params[layer.bias],
        targets[0].to(slope),
        schedule.learning_rate,
        schedule.num_steps,
        noise,
        budget,
    )
    passed = Passed.of(problem, weight, generator, ImagePrior.natural(problem.spec), True)
    # A feature counts as on only above ten of its deviations, as an error in the separation of the
    # steps affects all features alike.
    on = above_noise(steps.features, steps.deviations)
    moved, errors = problem.params[weight], []
    for error, features, live in zip(steps.errors, steps.features, on, strict=True):
        errors.append(torch.where(live, error @ moved, 0.0))
        moved = moved - schedule.learning_rate * error[:, None] * features
    values = torch.where(on[0], steps.features[0], 0.0)[None]
    noise_std = (
        steps.deviations[0][on[0]].median().clamp_min(FLOAT32_NOISE * values.square().mean().sqrt())
    )
    model = LocalSteps(
        problem=problem,
        passed=passed,
        known=Known(values, torch.zeros_like(values), Mask.of(on[:1])),
        errors=errors[0][None],
        noise_std=noise_std,
        later=torch.stack(errors)[1:, None],
        sloped=_sloped(steps),
    )
    return model, model.likelihood(float(likelihood.noise.min()))


def _sloped(steps: StepErrors) -> list[bool]:
    """Return for each local step after the first whether its term must be differentiated.

    The term is the step's gradient of the parameters before the last layer, whose inputs are the
    features. It must be differentiated if the step's features differ from the first step's by more
    than 0.5 of these, and the error of its logits is at least 0.1 of the first step's. Both limits
    were chosen on development draws; no table of results is kept.
    """
    first, *features = steps.features
    away = [float((each - first).norm() / first.norm()) for each in features]
    sizes = steps.errors.norm(dim=1) / steps.errors[0].norm()
    return [far > 0.5 and size >= 0.1 for far, size in zip(away, sizes[1:].tolist(), strict=True)]


def _last_layer(problem: Problem, likelihood: Likelihood, weight: str) -> tuple[float, float]:
    """Return the noise and the largest pruning bound of the last layer's weight gradient.

    The likelihood holds the noise and the bounds of the update's entries, and the weight is given
    by its name. The noise is the standard deviation of an entry. The bound is the largest magnitude
    that an entry with the observed value zero may have; columns in which all entries are zero do
    not count.
    """
    place = list(problem.gradient).index(weight)
    observed = problem.gradient[weight]
    bounds = likelihood.bounds.split(likelihood.counts.long().tolist())[place]
    bounds = bounds.reshape(observed.shape)
    return float(likelihood.noise[place]), float(bounds[:, (observed != 0).any(0)].max())


SIGNIFICANT_DEVIATIONS = 4.0
"""Number of standard deviations of its error above which a feature shows that its ReLU unit is on,
and above which a residual shows that the gradient is not that of one sample. Normal noise exceeds
it once in 30,000 features."""


@dataclass(frozen=True)
class OneSample:
    """Read one sample's features and error from a linear layer, and state the equations left.

    The features are the layer's inputs, and the error is the derivative of the loss by its outputs.
    The update must be of plain steps of one client on one sample. The layer must have a bias, which
    gives the scale, and take a ReLU's outputs, or their maxima. Layers are tried in the order of a
    pass.

    Attributes:
        annealings: settings of the runs from grey that solve the equations, at least one.
        products: approximate largest number of products with the Jacobian in a run; see
            :class:`~flwr_leakage.attacks.GaussNewton`.
        settling: settings of the steps that end the best runs; see
            :class:`~flwr_leakage.attacks.GaussNewton`.
    """

    purpose: ClassVar[str] = "features and error of the one sample"

    annealings: Sequence[Annealing] = (Annealing(),)
    products: int = 1300
    settling: Settling = field(default_factory=Settling)

    def __post_init__(self) -> None:
        if not self.annealings:
            raise ValueError("annealings must hold at least one run, got none.")
        require(self, "be at least 1", "products")

    def __call__(
        self,
        problem: Problem,
        likelihood: Likelihood,
        generator: torch.Generator,
        budget: Budget = UNLIMITED,
    ) -> tuple[KnownErrors, Likelihood]:
        """Return the equations of one sample's image, and their observed values.

        They follow from the first linear layer that can be used. It can be used if it has a bias
        and is trained, its gradient is an outer product, its inputs are the outputs of a ReLU of
        which some are on, and a parameter stands before it. For several local steps, only the last
        layer is tried, within the budget. The given likelihood holds the observed values, noise and
        bounds of the update's entries.

        Raises:
            ValueError: the update is of several samples or rounds, no linear layer can be used, or
                local steps cannot be separated (see :func:`local_steps`).
        """
        if problem.num_samples != 1 or problem.earlier:
            raise ValueError("the update is not of one sample in one round.")
        last = find_last_layer(problem)
        if problem.is_single_gradient:
            for layer in traced(problem).linear:
                own = {layer.weight, layer.bias}
                if layer.inputs.ndim != 2 or layer.weight == last.weight:
                    continue
                if layer.bias is None or not own <= problem.gradient.keys():
                    continue
                try:
                    return _behind(problem, likelihood, layer, generator)
                except ValueError:
                    continue  # features of another linear layer, farther back, may still be found
        if last.bias is None or not {last.weight, last.bias} <= problem.gradient.keys():
            raise ValueError("the last layer has no bias or is frozen.")
        if not problem.is_single_gradient:
            return local_steps(problem, likelihood, last, generator, budget)
        return _behind(problem, likelihood, last, generator)


def _behind(
    problem: Problem, likelihood: Likelihood, layer: LinearUse, generator: torch.Generator
) -> tuple[KnownErrors, Likelihood]:
    """Return the equations of an image, once a linear layer's features and error are read.

    The second result holds their observed values. ``likelihood`` holds the observed values, noise
    and pruning bounds of the update's entries.

    Raises:
        ValueError: the layer's gradient is no outer product, its features are not those of a ReLU
            or none is on, or no parameter stands before it.
    """
    assert layer.bias is not None
    seen, variances, bounds = _layer_gradient(problem, likelihood, layer.weight, layer.bias)
    error, features, deviations = outer_product(seen, 1 / variances)
    with_one = torch.cat([features, features.new_ones(1)])
    left = ((seen - error[:, None] * with_one).abs() - bounds).clamp_min(0)
    noise = float(variances[bounds == 0].sum().sqrt())
    # The residual that an outer product leaves may be noise, or the client's rounding, up to 1e-3
    # of the gradient. A larger one shows that the gradient is not that of one sample.
    if not float(left.norm()) <= max(1e-3 * float(seen.norm()), SIGNIFICANT_DEVIATIONS * noise):
        raise ValueError(f"the gradient of {layer.weight} is not that of one sample.")
    passed = Passed.of(problem, layer.weight, generator, ImagePrior.natural(problem.spec), True)
    # If pruning removed a feature's whole column, each row bounds the feature by the pruning
    # threshold over its error. The row with the largest error gives the lowest bound.
    largest = int(error.abs().argmax())
    below = torch.where(
        (bounds[:, :-1] > 0).all(0), bounds[largest, :-1] / error[largest].abs(), 0.0
    )
    limits = torch.where(below > 0, below, SIGNIFICANT_DEVIATIONS * deviations)
    on = features > limits
    if not bool(on.any()):
        raise ValueError(f"no feature at {layer.weight} stands out.")
    # A feature above its limit counts as on. If features lie between the limit and its double,
    # about as many features of active units lie below the limit. Then no unit counts as off.
    near = bool((on & (features < 2 * limits.max())).any())
    off = torch.zeros_like(on) if near else ~on
    told = on | (~off & (below == 0))
    values = torch.where(told, features, 0.0)
    known = Known(values, torch.where(on | off, 0.0, below), Mask(on, off))
    errors = torch.where(off, 0.0, error @ problem.params[layer.weight])
    noise_std = deviations[on].median().clamp_min(FLOAT32_NOISE * values.square().mean().sqrt())
    model = KnownErrors(
        problem, passed, known.map(lambda each: each[None]), errors[None], noise_std
    )
    return model, model.likelihood(float(likelihood.noise.min()))


def _layer_gradient(
    problem: Problem, likelihood: Likelihood, weight: str, bias: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a linear layer's gradient, with the variance and the bound of each entry.

    The likelihood holds the observed values, noise and bounds of the update's entries. W and b are
    given by name.

    Returns:
        Three matrices (K, n + 1) in the order [∂L/∂W, ∂L/∂b]: the observed values; the variances of
        their errors; and the largest magnitudes of entries that pruning may have set to zero, 0 for
        all others.
    """
    places = {name: place for place, name in enumerate(problem.gradient)}
    sizes = likelihood.counts.long().tolist()
    bounds = likelihood.bounds.split(sizes)

    def both(entries: Callable[[str], Tensor]) -> Tensor:
        narrow = entries(bias)
        return torch.cat([entries(weight).reshape(len(narrow), -1), narrow[:, None]], 1)

    def variances(name: str) -> Tensor:
        noise = likelihood.noise[places[name]].square()
        return (bounds[places[name]].square() / 3).clamp_min(noise)

    observed = likelihood.observed.split(sizes)
    return (
        both(lambda name: observed[places[name]]),
        both(variances),
        both(lambda name: bounds[places[name]]),
    )
