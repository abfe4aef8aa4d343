"""The equations of one image in several local steps, once each step's features and error are known.

If a client takes T plain steps on one sample, the last layer's update determines the features and
the error of every step (:mod:`~flwr_leakage.attacks.whole_batch.step_errors`). With the errors
δ_t = W_tᵀ e_t given, the update of the parameters before the layer is

    −Δθ / η = Σ_t ∂/∂θ ⟨δ_t ∘ 1[h_t > 0], c(x; θ_t)⟩,    θ_{t+1} = θ_t − η ∂/∂θ ⟨…⟩,

without a softmax. The parameters θ_t are those of training on the candidate. A step of Gauss–Newton
takes them as constants (deferred correction). It also takes a later term as a constant if the
features of its step stay near the first step's, so that a product costs one pass in place of T. If
a step moved the features far, its term has a slope, too. The truth solves the equations either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flwr_leakage.attacks.exact.known import Known, Mask
from flwr_leakage.attacks.inversion.chain import ChainLinearization, Top
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.labels.last_layer import LastLayer
from flwr_leakage.attacks.network.blur import blurring
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_NOISE, NOISE_DEVIATIONS
from flwr_leakage.attacks.solve.linearization import Linearized, Products
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors, Passed
from flwr_leakage.attacks.whole_batch.step_errors import StepErrors, separate_steps
from flwr_leakage.params import Params
from flwr_leakage.spectral.image_prior import ImagePrior


@dataclass(frozen=True, kw_only=True)
class LocalSteps(KnownErrors):
    """Gradients of all steps before a linear layer, and the first step's features.

    Attributes:
        later: (T − 1, B, n) δ of the steps after the first that have any error, zero where the
            ReLU is off.
        sloped: (T − 1,) whether the term of each of these steps has a slope.
    """

    later: Tensor
    sloped: Sequence[bool]

    @property
    def passes(self) -> int:
        """Number of gradients in one product."""
        return 1 + sum(self.sloped)

    def gradient(self, inputs: Tensor, blur: float, precise: bool = False) -> Tensor:
        """Return the gradients of all names, summed over steps, then features (P,).

        Its derivative is that of the first step's term and of the later terms with a slope.
        """
        total = last = first = super().gradient(inputs, blur, precise)
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
        return total

    def linearize(self, inputs: Tensor, blur: float) -> Linearized:
        """Return the equations, with products with their Jacobian."""
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
        return Products.sum_of(parts, total)

    def _moved(self, params: Params, gradients: Tensor) -> Params:
        """Return the parameters a step later, for gradients of the names, then features (P,)."""
        rate, moved, start = self.problem.schedule.learning_rate, dict(params), 0
        for name in self.passed.names:
            value = params[name].detach()
            step = gradients.detach()[start : start + value.numel()]
            moved[name] = value - rate * step.reshape(value.shape)
            start += value.numel()
        return moved


def _untold(errors: Tensor, outputs: Tensor) -> Top:
    """Return the functional of outputs (n, B) at a step whose features are not observed."""
    nothing = torch.zeros_like(outputs)
    return Top(nothing, nothing, errors.to(outputs), nothing)


def local_steps(
    problem: Problem, likelihood: Likelihood, layer: LastLayer, generator: torch.Generator
) -> tuple[LocalSteps, Likelihood]:
    """Return the equations and their observed values.

    Args:
        problem: the problem of one sample, in double precision.
        likelihood: the value, noise and bound of every entry of the update.
        layer: the last layer, with a bias, not frozen.
        generator: draws the probes.

    Raises:
        ValueError: the steps are not plain, or use their batch's statistics, entries of the last
            layer were pruned, its update is not that of steps on one sample, its features are not
            those of a ReLU, or no parameter stands before it.
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
        # In every step, only the label's error is negative.
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
    )
    passed = Passed.of(problem, weight, generator, ImagePrior.natural(problem.spec))
    if passed.narrow.left_out < 0:
        raise ValueError("the last layer's features are no ReLU's outputs or their maxima.")
    # A wide limit is needed, as an error of the mixture affects all features alike.
    limits = NOISE_DEVIATIONS * steps.deviations
    on = steps.features > limits
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
    """Return whether the term of each later step needs a slope.

    It does if its features are more than 0.5 from the first step's, relative to these, and its
    error is at least 0.1 of the first step's. Both were chosen on development draws; no table.
    """
    first, *features = steps.features
    away = [float((each - first).norm() / first.norm()) for each in features]
    sizes = steps.errors.norm(dim=1) / steps.errors[0].norm()
    return [far > 0.5 and size >= 0.1 for far, size in zip(away, sizes[1:].tolist(), strict=True)]


def _last_layer(problem: Problem, likelihood: Likelihood, weight: str) -> tuple[float, float]:
    """Return σ of the weight's entries, and the largest bound of a zero in its nonzero columns."""
    place = list(problem.gradient).index(weight)
    observed = problem.gradient[weight]
    bounds = likelihood.bounds[likelihood.tensors == place].reshape(observed.shape)
    return float(likelihood.noise[place]), float(bounds[:, (observed != 0).any(0)].max())
