"""The equations of one image in several local steps, each step's features and error known.

Of a client that takes T plain steps on one sample, the last layer tells what every step had there
(:mod:`~flwr_leakage.attacks.whole_batch.step_errors`). With the errors δ_t = W_tᵀ e_t given, the
update of the parameters before the layer is

    −Δθ / η = Σ_t ∂/∂θ ⟨δ_t ∘ 1[h_t > 0], c(x; θ_t)⟩,    θ_{t+1} = θ_t − η ∂/∂θ ⟨…⟩,

without a softmax. A step overshoots easily, and the first has most of the error then. So only the
first step's term is differentiated, at θ_0, and the others are replayed as constants of the
candidate (deferred correction): a product costs one pass in place of T, and the truth solves the
equations all the same.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flwr_leakage.attacks.inversion.blur import Blurred
from flwr_leakage.attacks.inversion.likelihood import FLOOR, Likelihood
from flwr_leakage.attacks.inversion.linearization import Linearized
from flwr_leakage.attacks.labels.last_layer import LastLayer
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors, Passed
from flwr_leakage.attacks.whole_batch.step_errors import separate_steps
from flwr_leakage.spectral.image_prior import ImagePrior

CERTAIN = 10.0
"""A feature is on from so many deviations: errors of a mixture are alike in all of them."""


@dataclass(frozen=True, kw_only=True)
class LocalSteps(KnownErrors):
    """Gradients of all steps before a linear layer, and the first step's features.

    Attributes:
        later: δ of the steps after the first that have any error (T − 1, B, n), zero where the ReLU
            is off.
    """

    later: Tensor

    def gradient(self, inputs: Tensor, blur: float, precise: bool = False) -> Tensor:
        """Gradients of all names, summed over steps, then features (P,).

        Its slope is that of the first step's.
        """
        first = super().gradient(inputs, blur, precise)
        return first + self._later(first.detach(), inputs, blur, precise)

    def linearize(self, inputs: Tensor, blur: float) -> Linearized:
        """The equations, and products with the slope of the first step's."""
        here = super().linearize(inputs, blur)
        if self.passed.chain is not None:
            here.value = here.value + self._later(here.value, inputs, blur, precise=False)
        return here

    def _later(self, first: Tensor, inputs: Tensor, blur: float, precise: bool) -> Tensor:
        """Gradients of the steps after the first, summed, and zero for its features (P,)."""
        run = self.features if precise else self.passed.narrow
        params, rate = run.problem.params, self.problem.schedule.learning_rate
        point = {name: params[name].detach() for name in self.passed.names}
        sizes = [value.numel() for value in point.values()]
        last = first[: sum(sizes)]
        total = torch.zeros_like(first)
        for errors in self.later.to(first):
            steps = zip(point.items(), last.split(sizes), strict=True)
            point = {
                name: (value - rate * step.reshape(value.shape)).requires_grad_()
                for (name, value), step in steps
            }
            with torch.enable_grad(), Blurred(self.passed.deviations, blur):
                outputs = run({**params, **point}, inputs.detach().to(first.dtype))
                found = torch.autograd.grad((errors * outputs).sum(), list(point.values()))
            point = {name: value.detach() for name, value in point.items()}
            last = torch.cat([each.flatten() for each in found])
            total[: len(last)] += last
        return total


def local_steps(
    problem: Problem, likelihood: Likelihood, layer: LastLayer, generator: torch.Generator
) -> tuple[LocalSteps, Likelihood]:
    """The equations, and what was observed of them.

    Args:
        problem: of one sample, in double precision.
        likelihood: what is known of every entry of the update.
        layer: with a bias, not frozen.
        generator: of probes.

    Raises:
        ValueError: the steps are not plain, or follow their batch's statistics, entries of the
            last layer were pruned, its update is not that of steps on one sample, its features are
            not those of a ReLU, or no equation stands before it.
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
    if bound > CERTAIN * noise:
        raise ValueError("entries of the last layer were pruned, which hides its local steps.")
    targets = problem.known_targets
    if targets is None:
        # Only the label's error is negative, in every step.
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
    limits = CERTAIN * steps.deviations
    on = steps.features > limits
    moved, errors = problem.params[weight], []
    for error, features, live in zip(steps.errors, steps.features, on, strict=True):
        errors.append(torch.where(live, error @ moved, 0.0))
        moved = moved - schedule.learning_rate * error[:, None] * features
    known = torch.where(on[0], steps.features[0], 0.0)
    nothing = torch.zeros_like(known)[None]
    noise_std = steps.deviations[0][on[0]].median().clamp_min(FLOOR * known.square().mean().sqrt())
    model = LocalSteps(
        problem=problem,
        passed=passed,
        known=known[None],
        errors=errors[0][None],
        noise_std=noise_std,
        bounds=nothing,
        doubtful=nothing > 0,
        later=torch.stack(errors)[1:, None],
    )
    return model, model.likelihood(float(likelihood.noise.min()))


def _last_layer(problem: Problem, likelihood: Likelihood, weight: str) -> tuple[float, float]:
    """σ of the weight's entries, and what a zero among its other classes' is at most."""
    place = list(problem.gradient).index(weight)
    observed = problem.gradient[weight]
    bounds = likelihood.bounds[likelihood.tensors == place].reshape(observed.shape)
    return float(likelihood.noise[place]), float(bounds[:, (observed != 0).any(0)].max())
