"""The equations of one image whose features and error a linear layer's gradient tells.

A linear layer's gradient of one sample is the outer product ``e [h, 1]ᵀ`` of its error and its
features, each entry with noise, or known to lie below a threshold of pruning. Fitted to it, e and h
tell which units of the ReLU before it are on before any image is searched. With them given, the
rest of the update is :class:`KnownErrors`, which has fewer ReLUs to go through: of several linear
layers in a row, that nearest to the images leaves none between them to be searched. Several local
steps are told apart first, by the last layer
(:mod:`~flwr_leakage.attacks.whole_batch.local_steps`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.inversion.annealing import Annealing
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.inversion.settling import Settling
from flwr_leakage.attacks.labels.last_layer import LastLayer, find_last_layer
from flwr_leakage.attacks.network.linear import find_linear_layers
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_NOISE
from flwr_leakage.attacks.settings import require
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
    """Take features and error of a single sample from a linear layer, and fit what is left.

    It takes plain steps of one client on one sample, through a network with a linear layer that has
    a bias, which tells the scale, and takes a ReLU's outputs, or their maxima. Layers are tried in
    the order of a pass.

    Attributes:
        annealings: one run from grey each, ≥ 1 of them.
        products: of a run, as of :class:`~flwr_leakage.attacks.GaussNewton`.
        settling: likewise.
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
        self, problem: Problem, likelihood: Likelihood, generator: torch.Generator
    ) -> tuple[KnownErrors, Likelihood]:
        """The equations, and what was observed of them.

        Raises:
            ValueError: the update is of several samples or rounds, the last layer has no bias or
                is frozen, its gradient is no outer product, its features are not those of a ReLU
                or none is on, no equation stands before it, or local steps can not be told apart
                (see :func:`~.local_steps.local_steps`); and no layer before it can be taken in its
                place.
        """
        if problem.num_samples != 1 or problem.earlier:
            raise ValueError("the update is not of one sample in one round.")
        last = find_last_layer(problem)
        if problem.is_single_gradient:
            for layer in _layers_before(problem, last):
                try:
                    return _behind(problem, likelihood, layer, generator)
                except ValueError:
                    continue  # a layer further behind may tell its features
        if last.bias is None or not {last.weight, last.bias} <= problem.gradient.keys():
            raise ValueError("the last layer has no bias or is frozen.")
        if not problem.is_single_gradient:
            return local_steps(problem, likelihood, last, generator)
        return _behind(problem, likelihood, last, generator)


def _layers_before(problem: Problem, last: LastLayer) -> list[LastLayer]:
    """Linear layers before the last that are trained and have a bias, in the order of a pass."""
    dummy = next(iter(problem.params.values())).new_zeros(1, *problem.spec.shape)
    with torch.no_grad():
        uses = find_linear_layers(problem, dummy)
    return [
        LastLayer(use.weight, use.bias)
        for use in uses
        if use.inputs.ndim == 2
        and use.bias is not None
        and {use.weight, use.bias} <= problem.gradient.keys()
        and use.weight != last.weight
    ]


def _behind(
    problem: Problem, likelihood: Likelihood, layer: LastLayer, generator: torch.Generator
) -> tuple[KnownErrors, Likelihood]:
    """The equations of one layer's features and error, and what was observed of them.

    Raises:
        ValueError: its gradient is no outer product, or its features are not those of a ReLU.
    """
    assert layer.bias is not None
    seen, variances, bounds = _layer_gradient(problem, likelihood, layer.weight, layer.bias)
    error, features, deviations = outer_product(seen, 1 / variances)
    with_one = torch.cat([features, features.new_ones(1)])
    left = ((seen - error[:, None] * with_one).abs() - bounds).clamp_min(0)
    expected = max(FITS * float(seen.norm()), SURE * float(variances[bounds == 0].sum().sqrt()))
    if not float(left.norm()) <= expected:
        raise ValueError(f"the gradient of {layer.weight} is not that of one sample.")
    passed = Passed.of(problem, layer.weight, generator, ImagePrior.natural(problem.spec))
    if passed.narrow.left_out < 0:
        raise ValueError(f"the features at {layer.weight} are no ReLU's outputs or their maxima.")
    # The row of the largest error says most of a column of which nothing was kept.
    largest = int(error.abs().argmax())
    below = torch.where(
        (bounds[:, :-1] > 0).all(0), bounds[largest, :-1] / error[largest].abs(), 0.0
    )
    limits = torch.where(below > 0, below, SURE * deviations)
    on = features > limits
    if not bool(on.any()):
        raise ValueError(f"no feature at {layer.weight} stands out.")
    # About as many units that are on lie below the limit as up to twice it.
    near = bool((on & (features < 2 * limits.max())).any())
    doubtful = ~on if near else torch.zeros_like(on)
    known = torch.where(on | (doubtful & (below == 0)), features, 0.0)
    errors = torch.where(on | doubtful, error @ problem.params[layer.weight], 0.0)
    below = torch.where(doubtful, below, 0.0)
    noise_std = deviations[on].median().clamp_min(FLOAT32_NOISE * known.square().mean().sqrt())
    model = KnownErrors(
        problem, passed, known[None], errors[None], noise_std, below[None], doubtful[None]
    )
    return model, model.likelihood(float(likelihood.noise.min()))


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


def _layer_gradient(
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
