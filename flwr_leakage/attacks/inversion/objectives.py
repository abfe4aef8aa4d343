"""Define distances of a candidate's gradient from the observed one, and penalties of images."""

from dataclasses import dataclass
from itertools import combinations
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.distance import relative_squared_distance, squared_distance
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.records import InputSpec


@runtime_checkable
class Objective(Protocol):
    """A distance of a candidate's gradient from the observed one."""

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of two gradients, a differentiable scalar, least if they agree.

        Args:
            candidate: the candidate's gradient g, by parameter name.
            observed: the observed gradient g*, by the same names.
        """
        ...


def inner_product(left: Params, right: Params) -> Tensor:
    """Return the inner product ``Σ_l ⟨left_l, right_l⟩`` over all tensors l, a scalar."""
    terms = [(left[k] * right[k]).sum() for k in right]
    return sum(terms[1:], start=terms[0])


@dataclass(frozen=True)
class Cosine:
    """The cosine distance ``1 − ⟨g, g*⟩ / (‖g‖ ‖g*‖)`` of gradients, in [0, 2].

    This is the objective of Inverting Gradients (Geiping et al. 2020, eq. 4). It ignores the
    gradient's length.
    """

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        inner = inner_product(candidate, observed)
        norms = inner_product(candidate, candidate) * inner_product(observed, observed)
        tiny = 1e-30 if norms.element_size() < 8 else 1e-300
        return 1 - inner / norms.clamp_min(tiny).sqrt()


@dataclass(frozen=True)
class Euclidean:
    """The objective ``scale · ‖g − g*‖² / ‖g*‖²`` of DLG and iDLG, made free of scale.

    The papers' own objective is not divided by the observed norm. The division changes no minimum,
    and makes tolerances and the weights of priors comparable over models.

    Attributes:
        scale: factor of the objective, > 0.
        relative: whether to divide by ‖g*‖².
    """

    scale: float = 1.0
    relative: bool = True

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        distance = relative_squared_distance if self.relative else squared_distance
        return self.scale * distance(candidate, observed)


@dataclass(frozen=True)
class Masked:
    """The distance ``objective(1[g* ≠ 0] ∘ g, g*)``, for an attacker who knows of pruning.

    Pruning sets entries of an update to exactly zero, so that such an entry only shows that the
    sample's own gradient is small there. The objective leaves out all zero entries, also those of
    units that no sample activates.

    Attributes:
        objective: the distance that compares the masked gradients.
    """

    objective: Objective

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        kept = {name: candidate[name] * (value != 0) for name, value in observed.items()}
        return self.objective(kept, observed)


@dataclass(frozen=True)
class PriorContext:
    """The attacker's knowledge about a candidate batch.

    Attributes:
        gradient_map: the model, for priors on its features.
        spec: the public facts about the data.
        params: the parameters θ_t.
        buffers: the BatchNorm statistics by which the attacker normalises in running mode.
        statistics: BatchNorm statistics that the threat model grants, or empty.
        first_step: (b, C, H, W) the candidate's inputs of the first local step, whose statistics
            are compared with ``statistics``; ``None`` for all inputs.
    """

    gradient_map: GradientMap
    spec: InputSpec
    params: Params
    buffers: Params
    statistics: Params
    first_step: Tensor | None = None


@runtime_checkable
class Prior(Protocol):
    """A penalty of candidate inputs, which is added to the objective."""

    def __call__(self, inputs: Tensor, context: PriorContext) -> Tensor:
        """Return the penalty of inputs (B, C, H, W) in model space, a scalar."""
        ...


def total_variation(images: Float[Tensor, "B C H W"]) -> Tensor:
    """Return the mean absolute difference of vertical neighbours plus that of horizontal ones.

    This is the anisotropic total variation of Rudin, Osher and Fatemi (1992), with the mean of
    Geiping et al.'s code, so that its weight does not depend on the image's size.

    Example:
        >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
        tensor(1.)
    """
    vertical = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    horizontal = (images[..., :, 1:] - images[..., :, :-1]).abs().mean()
    return vertical + horizontal


def colour_differences(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D H W"]:
    """Return the C channels of images, and the differences of every two of them (D in all).

    These are the double opponents of Åström and Schnörr (2016). Edges of natural images show in all
    channels at once, so that differences of channels vary less than the channels.
    """
    pairs = [images[:, i] - images[:, j] for i, j in combinations(range(images.shape[1]), 2)]
    return torch.cat([images, *(pair[:, None] for pair in pairs)], dim=1)


@dataclass(frozen=True)
class TotalVariation:
    """The penalty ``weight · total_variation(x)`` of candidate inputs x.

    Attributes:
        weight: weight relative to the objective, ≥ 0.
        absolute: whether |x| is penalised instead of x, for InstaHide's images, whose signs are
            flipped at random (Huang et al. 2021's published code).
        colour: whether the differences of channels are penalised as well.
    """

    weight: float
    absolute: bool = False
    colour: bool = False

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight must be ≥ 0, got {self.weight}.")

    def __call__(self, inputs: Float[Tensor, "B C H W"], context: PriorContext) -> Tensor:
        """Return the penalty of a candidate batch in model space, a scalar."""
        images = inputs.abs() if self.absolute else inputs
        return self.weight * total_variation(colour_differences(images) if self.colour else images)


def statistics_distance(
    candidate: Params, known: Params, relative: bool = False
) -> Float[Tensor, ""]:
    """Return ``Σ_l ‖μ_l(x) − μ_l‖₂ + ‖σ²_l(x) − σ²_l‖₂`` over the BatchNorm layers l.

    This is eq. 10 of Yin et al. 2021, with norms and not their squares, as in Yin et al. 2020's
    published code. The norms grow with a layer's width and with its weights. The relative distance
    has the root mean squares of ``(μ_l(x) − μ_l) / σ_l`` and ``(σ²_l(x) − σ²_l) / σ²_l`` over the
    channels instead.

    Args:
        candidate: the mean and variance of every BatchNorm layer's input, under the names of the
            layer's buffers.
        known: the known means and variances under the same names. Layers without an entry here do
            not count.
        relative: whether distances are in units of the known standard deviations and variances.
    """
    names = [name for name in candidate if name in known]
    total = next(iter(candidate.values())).new_zeros(())
    for name in names:
        layer, _, kind = name.rpartition(".")
        squares = (candidate[name] - known[name]).square()
        if relative:
            variance = known[f"{layer}.running_var" if layer else "running_var"]
            scale = variance.clamp_min(1e-5) ** (1 if kind == "running_mean" else 2)
            squares = squares / scale / squares.numel()
        # A small number is added, as a root has no derivative at zero, the value of an exact match.
        gap = (squares.sum() + 1e-12).sqrt()
        total = total + gap
    return total


@dataclass(frozen=True)
class BatchNormStatistics:
    """A penalty: weight times the distance of the candidate's BatchNorm statistics from known ones.

    The threat model states the known statistics (``exact``, ``derived`` or ``running``). If it
    grants none, there is no penalty, and the statistics are inferred with the images. Statistics
    are compared at θ_t, for the samples of the first local step. ``derived`` statistics of several
    steps are means over the steps.

    Attributes:
        weight: weight relative to the objective, ≥ 0.
        known: source of the statistics: ``granted`` by the threat model, or ``running`` for the
            server's own buffers.
        relative: whether distances are in units of the known standard deviations, so that one
            weight suits all widths and stages of training.
    """

    weight: float
    known: Literal["granted", "running"] = "granted"
    relative: bool = False

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight must be ≥ 0, got {self.weight}.")
        if self.known not in ("granted", "running"):
            raise ValueError(f"known must be 'granted' or 'running', got {self.known!r}.")

    def __call__(self, inputs: Float[Tensor, "B C H W"], context: PriorContext) -> Tensor:
        """Return the penalty of a candidate batch in model space, a scalar."""
        known = context.statistics if self.known == "granted" else context.buffers
        if not known:
            return inputs.new_zeros(())
        first = inputs if context.first_step is None else context.first_step
        found = context.gradient_map.statistics(context.params, first, context.buffers)
        if not found:
            return inputs.new_zeros(())
        return self.weight * statistics_distance(found, known, self.relative)
