"""The equations of one image whose features and error the last layer's gradient tells.

The last linear layer's gradient of one sample is the outer product ``e [h, 1]ᵀ`` of its error and
its features, each entry with noise, or known to lie below a threshold of pruning. Fitted to it, e
and h tell which units of the last ReLU are on before any image is searched. With them given, the
rest of the update is :class:`KnownErrors`, which has one ReLU less to go through. Several local
steps are told apart first (:mod:`~flwr_leakage.attacks.whole_batch.local_steps`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.inversion.annealing import Annealing
from flwr_leakage.attacks.inversion.likelihood import FLOOR, Likelihood
from flwr_leakage.attacks.inversion.settling import Settling
from flwr_leakage.attacks.labels.last_layer import find_last_layer
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors, Passed
from flwr_leakage.attacks.whole_batch.local_steps import local_steps
from flwr_leakage.spectral.image_prior import ImagePrior

SURE = 4.0
"""A feature is on from so many of its standard deviations."""

TURNS = 50
"""In which e is fitted for given h, and h for given e."""

FITS = 1e-3
"""Relative residual of the outer product that is rounding of the client's, and no other model."""


@dataclass(frozen=True)
class OneSample:
    """Take features and error of a single sample from the last layer, and fit what is left.

    It takes plain steps of one client on one sample, through a network whose last layer has a
    bias, which tells the scale.

    Attributes:
        annealings: one run from grey each, ≥ 1 of them.
        products: of a run, as of :class:`~flwr_leakage.attacks.GaussNewton`.
        settling: likewise.
        most_on: share of the features that are not zero, at most, in (0, 1]. Which are on is worth
            most where they are few, as in trained networks.
    """

    purpose: ClassVar[str] = "features and error of the one sample"

    annealings: Sequence[Annealing] = (Annealing(),)
    products: int = 1300
    settling: Settling = field(default_factory=Settling)
    most_on: float = 0.3

    def __post_init__(self) -> None:
        if not self.annealings:
            raise ValueError("annealings must hold at least one run, got none.")
        if self.products < 1:
            raise ValueError(f"products must be at least 1, got {self.products}.")
        if not 0 < self.most_on <= 1:
            raise ValueError(f"most_on must lie in (0, 1], got {self.most_on}.")

    def __call__(
        self, problem: Problem, likelihood: Likelihood, generator: torch.Generator
    ) -> tuple[KnownErrors, Likelihood]:
        """The equations, and what was observed of them.

        Raises:
            ValueError: the update is of several samples or rounds, the last layer has no bias or
                is frozen, its gradient is no outer product, its features are not those of a ReLU
                or too many of them are on, no equation stands before it, or local steps can not
                be told apart (see :func:`~.local_steps.local_steps`).
        """
        if problem.num_samples != 1 or problem.earlier:
            raise ValueError("the update is not of one sample in one round.")
        layer = find_last_layer(problem)
        if layer.bias is None or not {layer.weight, layer.bias} <= problem.gradient.keys():
            raise ValueError("the last layer has no bias or is frozen.")
        if not problem.is_single_gradient:
            steps, known_of_steps = local_steps(problem, likelihood, layer, generator)
            self._check_share(steps.known > 0)
            return steps, known_of_steps
        seen, variances, bounds = _last_layer(problem, likelihood, layer.weight, layer.bias)
        error, features, deviations = outer_product(seen, 1 / variances)
        with_one = torch.cat([features, features.new_ones(1)])
        left = ((seen - error[:, None] * with_one).abs() - bounds).clamp_min(0)
        expected = max(FITS * float(seen.norm()), SURE * float(variances[bounds == 0].sum().sqrt()))
        if not float(left.norm()) <= expected:
            raise ValueError("the last layer's gradient is not that of one sample.")
        passed = Passed.of(problem, layer.weight, generator, ImagePrior.natural(problem.spec))
        if passed.narrow.left_out < 0:
            raise ValueError("the last layer's features are no ReLU's outputs or their maxima.")
        # The row of the largest error says most of a column of which nothing was kept.
        largest = int(error.abs().argmax())
        below = torch.where(
            (bounds[:, :-1] > 0).all(0), bounds[largest, :-1] / error[largest].abs(), 0.0
        )
        limits = torch.where(below > 0, below, SURE * deviations)
        on = features > limits
        self._check_share(on)
        # About as many units that are on lie below the limit as up to twice it.
        near = bool((on & (features < 2 * limits.max())).any())
        doubtful = ~on if near else torch.zeros_like(on)
        known = torch.where(on | (doubtful & (below == 0)), features, 0.0)
        errors = torch.where(on | doubtful, error @ problem.params[layer.weight], 0.0)
        below = torch.where(doubtful, below, 0.0)
        noise_std = deviations[on].median().clamp_min(FLOOR * known.square().mean().sqrt())
        model = KnownErrors(
            problem, passed, known[None], errors[None], noise_std, below[None], doubtful[None]
        )
        return model, model.likelihood(float(likelihood.noise.min()))

    def _check_share(self, on: Tensor) -> None:
        """Knowing which features are on is worth most where they are few."""
        if not 0 < int(on.sum()) <= self.most_on * on.numel():
            raise ValueError(
                f"{int(on.sum())} of {on.numel()} features stand out, where knowing them is worth "
                f"most if at least one does, and at most {self.most_on:.0%}."
            )


def outer_product(observed: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fit ``e [h, 1]ᵀ`` to a matrix, by alternating weighted least squares.

    Args:
        observed: (K, n + 1).
        weights: of every entry's square, > 0, of the same shape.

    Returns:
        e (K,), h (n,) and the standard deviation of each h_f for the given e (n,).

    Raises:
        ValueError: nothing is left of the last column, or a column has no weight.

    Example:
        >>> observed = torch.tensor([[2.0, -1.0], [-4.0, 2.0]])
        >>> outer_product(observed, torch.ones(2, 2))[:2]
        (tensor([-1.,  2.]), tensor([-2.]))
    """
    error = observed[:, -1]
    for _ in range(TURNS):
        scales = (weights * error[:, None].square()).sum(0)
        row = (weights * observed * error[:, None]).sum(0) / scales
        if not (math.isfinite(float(row.sum())) and float(row[-1]) > 0):
            raise ValueError("the last bias's gradient does not tell the scale of the features.")
        row = row / row[-1]
        error = (weights * observed * row).sum(1) / (weights * row.square()).sum(1)
    deviations = (weights * error[:, None].square()).sum(0).rsqrt()
    return error, row[:-1], deviations[:-1]


def _last_layer(
    problem: Problem, likelihood: Likelihood, weight: str, bias: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's gradient [∂L/∂W, ∂L/∂b], variances and thresholds of its entries."""
    sizes = [value.numel() for value in problem.gradient.values()]
    places = dict(zip(problem.gradient, range(len(sizes)), strict=True))
    variances = likelihood.variances(torch.zeros_like(likelihood.observed), 0.0)

    def both(entries: Tensor) -> Tensor:
        pieces = entries.split(sizes)
        wide, narrow = pieces[places[weight]], pieces[places[bias]]
        return torch.cat([wide.reshape(len(narrow), -1), narrow[:, None]], 1)

    return both(likelihood.observed), both(variances), both(likelihood.bounds)
