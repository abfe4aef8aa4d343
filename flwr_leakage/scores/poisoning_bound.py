"""Bound how much a small change of one sample raises the mean loss on a client's samples."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators import row_norms
from flwr_leakage.params import Params, ravel, subtract, unravel
from flwr_leakage.per_sample import ClientSamples, SampleProblem
from flwr_leakage.per_sample.samples import converted
from flwr_leakage.randomness import Draws
from flwr_leakage.records import Batch, Measurement, State
from flwr_leakage.scores.base import Column, SampleScore, numbers_of
from flwr_leakage.scores.nonlinear_bound import curvature


@dataclass(frozen=True)
class PoisoningBound(SampleScore):
    """A score: how much a small change of a sample can raise the mean loss on a client's samples.

    It follows Zhang et al. (2023, section 5.2). J ∈ R^{N×P} is the Jacobian of the sample's
    gradient g.

    A client takes one step θ′ = θ − η g(x + δ_x) on the sample alone, with the learning rate η and
    a change δ_x of the sample x. The quantities say by how much the mean loss on the client's
    samples grows for each unit of ‖δ_x‖ ≤ r:

    - ``poisoning_amplification``: η‖J E∇_θ′L‖, exact to first order in δ_x;
    - ``poisoning_bound``: η(‖J‖ + μ_J r)‖E∇_θ′L‖, an upper bound, as J changes with the input by at
      most μ_J r.

    E is the mean over all samples of the client, at θ′ without the change δ_x. The paper has η = 1.
    A sample with a large ‖J‖ both leaks and can do harm. μ_J is a maximum over a few random points
    at distance r, and lies below the true Lipschitz constant of J: with r > 0 the bound is an
    estimate.

    Attributes:
        radius: r as an RMS per input entry, in the units of the inputs; 0 for infinitely small
            changes.
        num_draws: the number of random points for μ_J, if ``radius`` > 0.
        learning_rate: η > 0; ``None`` for that of the client's schedule.
        tolerance: the relative error to which spectral norms are computed.
        max_steps: the largest number of steps of a Lanczos run.
    """

    radius: float = 0.0
    num_draws: int = 3
    learning_rate: float | None = None
    tolerance: float = 1e-2
    max_steps: int = 60

    def __post_init__(self) -> None:
        if not 0 <= self.radius < math.inf or self.num_draws < 1:
            raise ValueError(
                f"radius must be ≥ 0 and num_draws at least 1, got {self.radius}, {self.num_draws}."
            )
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}.")

    def __call__(self, client: ClientSamples, seed: int) -> list[Measurement]:
        """Return the measurements ``poisoning_amplification`` and ``poisoning_bound`` of each
        sample.
        """
        whole = client.exposure.whole
        rate = self.learning_rate or whole.raw.schedule.learning_rate
        return _Poisoning(
            self, whole.defended, rate,
            point=self.point, precision=self.precision, memory_bytes=self.memory_bytes,
        )(client, seed)  # fmt: skip

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the columns ``poisoning_amplification`` and ``poisoning_bound``, with the mean
        loss taken over the samples of ``problem``.
        """
        rate = 1.0 if self.learning_rate is None else self.learning_rate
        return _Poisoning(self, problem.samples.batch, rate).measure(problem, draws)


@dataclass(frozen=True)
class _Poisoning(SampleScore):
    """The poisoning score for the samples and the learning rate of one round.

    Attributes:
        settings: the score with the settings of the user.
        others: the client's samples over which the mean loss is taken.
        rate: the learning rate η.
    """

    settings: PoisoningBound
    others: Batch
    rate: float

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return the columns ``poisoning_amplification``, exact to first order in the change of a
        sample, and ``poisoning_bound``, an upper bound.
        """
        settings = self.settings
        found = problem.largest(settings.tolerance, settings.max_steps)
        top, notes, widths, states = numbers_of(found.estimate, "at least", "λmax")
        norm = top.sqrt()
        steep = self._gradients_after(problem)
        amplification = self.rate * row_norms(problem.operator.rmatvec(steep)).double()
        if settings.radius > 0:
            _, mu = curvature(
                problem, norm, draws,
                settings.radius, settings.num_draws, settings.tolerance, settings.max_steps,
            )  # fmt: skip
            norm = norm + mu * settings.radius * problem.operator.num_inputs**0.5
        bound = self.rate * norm * row_norms(steep).double()
        kinds: list[State] = [
            "upper bound" if state == "within tolerance" else "unresolved" for state in states
        ]
        bars = bound * widths / (2 * top.clamp_min(1e-300))
        unit = "loss per model input"
        return [
            Column("poisoning_amplification", amplification, unit, "larger leaks more"),
            Column("poisoning_bound", bound, unit, "larger leaks more", notes, bars, kinds),
        ]

    def _gradients_after(self, problem: SampleProblem) -> Float[Tensor, "S P"]:
        """Return for each sample i, as row i of (S, P), the gradient of the mean loss on ``others``
        at θ′ = θ − η g_i: after one step at the learning rate η on sample i alone, whose gradient
        is g_i.
        """
        samples, dtype = problem.samples, problem.gradients.dtype
        _, batch = converted({}, self.others, dtype)
        rows = []
        for gradient in problem.gradients:
            change = unravel(self.rate * gradient, samples.params)
            moved: Params = subtract(samples.params, change)
            rows.append(ravel(samples.gradient_map(moved, batch, samples.buffers)))
        return torch.stack(rows)
