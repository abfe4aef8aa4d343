"""The equations of one image whose features and error follow from a linear layer's gradient.

A linear layer's gradient of one sample is the outer product ``e [h, 1]ᵀ`` of its error and its
features, each entry with noise, or known to lie below a threshold of pruning. The fit of e and h
shows which units of the ReLU before the layer are on, before any search for an image. Given these,
the rest of the update is :class:`KnownErrors`, with fewer ReLUs. Of several linear layers in a row,
the one nearest to the images leaves no ReLU between them to the search. Several local steps are
separated first, by the last layer (:mod:`~flwr_leakage.attacks.whole_batch.local_steps`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.known import Known, Mask, outer_product
from flwr_leakage.attacks.inversion.annealing import Annealing
from flwr_leakage.attacks.inversion.likelihood import Likelihood
from flwr_leakage.attacks.inversion.settling import Settling
from flwr_leakage.attacks.labels.last_layer import LastLayer, find_last_layer
from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_NOISE
from flwr_leakage.attacks.settings import require
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors, Passed
from flwr_leakage.attacks.whole_batch.local_steps import local_steps
from flwr_leakage.spectral.image_prior import ImagePrior

SIGNIFICANT_DEVIATIONS = 4.0
"""A feature is on above this many of its standard deviations, and a residual shows another model
above this many. The value was chosen on development draws; no table."""


@dataclass(frozen=True)
class OneSample:
    """Read features and error of a single sample from a linear layer, and fit the rest.

    It takes plain steps of one client on one sample. The network must have a linear layer with a
    bias, which gives the scale, and with a ReLU's outputs, or their maxima, as inputs. Layers are
    tried in the order of a pass.

    Attributes:
        annealings: settings of the runs from grey, at least one.
        products: approximate largest number of products of a run; see
            :class:`~flwr_leakage.attacks.GaussNewton`.
        settling: the end of the best runs; see :class:`~flwr_leakage.attacks.GaussNewton`.
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
        """Return the equations and their observed values.

        Raises:
            ValueError: no layer before the last one can be used, and the update is of several
                samples or rounds, the last layer has no bias or is frozen, its gradient is no outer
                product, its features are not those of a ReLU or none is on, no parameter stands
                before it, or local steps cannot be separated (see
                :func:`~.local_steps.local_steps`).
        """
        if problem.num_samples != 1 or problem.earlier:
            raise ValueError("the update is not of one sample in one round.")
        last = find_last_layer(problem)
        if problem.is_single_gradient:
            for layer in _layers_before(problem, last):
                try:
                    return _behind(problem, likelihood, layer, generator)
                except ValueError:
                    continue  # the features of a later layer may be found
        if last.bias is None or not {last.weight, last.bias} <= problem.gradient.keys():
            raise ValueError("the last layer has no bias or is frozen.")
        if not problem.is_single_gradient:
            return local_steps(problem, likelihood, last, generator)
        return _behind(problem, likelihood, last, generator)


def _layers_before(problem: Problem, last: LastLayer) -> list[LastLayer]:
    """Return the trained linear layers with a bias before the last, in the order of a pass."""
    uses = traced(problem).linear
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
    """Return the equations from one layer's features and error, and their observed values.

    Raises:
        ValueError: its gradient is no outer product, or its features are not those of a ReLU.
    """
    assert layer.bias is not None
    seen, variances, bounds = _layer_gradient(problem, likelihood, layer.weight, layer.bias)
    error, features, deviations = outer_product(seen, 1 / variances)
    with_one = torch.cat([features, features.new_ones(1)])
    left = ((seen - error[:, None] * with_one).abs() - bounds).clamp_min(0)
    noise = float(variances[bounds == 0].sum().sqrt())
    # A relative residual of up to 1e-3 may be rounding on the client's side.
    if not float(left.norm()) <= max(1e-3 * float(seen.norm()), SIGNIFICANT_DEVIATIONS * noise):
        raise ValueError(f"the gradient of {layer.weight} is not that of one sample.")
    passed = Passed.of(problem, layer.weight, generator, ImagePrior.natural(problem.spec))
    if passed.narrow.left_out < 0:
        raise ValueError(f"the features at {layer.weight} are no ReLU's outputs or their maxima.")
    # If pruning kept nothing of a column, the row of the largest error bounds its feature best.
    largest = int(error.abs().argmax())
    below = torch.where(
        (bounds[:, :-1] > 0).all(0), bounds[largest, :-1] / error[largest].abs(), 0.0
    )
    limits = torch.where(below > 0, below, SIGNIFICANT_DEVIATIONS * deviations)
    on = features > limits
    if not bool(on.any()):
        raise ValueError(f"no feature at {layer.weight} stands out.")
    # About as many active units lie below the limit as between one and two times the limit.
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
    """Return the layer's gradient [∂L/∂W, ∂L/∂b], and the variances and bounds of its entries."""
    sizes = [value.numel() for value in problem.gradient.values()]
    places = dict(zip(problem.gradient, range(len(sizes)), strict=True))
    variances = likelihood.variances(torch.zeros_like(likelihood.observed), 0.0)

    def both(entries: Tensor) -> Tensor:
        pieces = entries.split(sizes)
        wide, narrow = pieces[places[weight]], pieces[places[bias]]
        return torch.cat([wide.reshape(len(narrow), -1), narrow[:, None]], 1)

    return both(likelihood.observed), both(variances), both(likelihood.bounds)
