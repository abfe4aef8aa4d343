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
        """Return the distance of two gradients by parameter name, a differentiable scalar.

        It is least if the candidate's gradient agrees with the observed one.
        """
        ...


def inner_product(left: Params, right: Params) -> Tensor:
    """Return the inner product ``Σ_l ⟨left_l, right_l⟩`` over the parameter tensors l, a scalar."""
    terms = [(left[k] * right[k]).sum() for k in right]
    return sum(terms[1:], start=terms[0])


@dataclass(frozen=True)
class Cosine:
    """The cosine distance ``1 − ⟨g, g*⟩ / (‖g‖ ‖g*‖)`` of gradients, in [0, 2].

    g is the candidate's gradient, and g* the observed one. This is the objective of Inverting
    Gradients (Geiping et al. 2020, eq. 4). It ignores the length of both gradients.
    """

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return ``1 − ⟨g, g*⟩ / (‖g‖ ‖g*‖)``, a scalar in [0, 2].

        Args:
            candidate: the candidate's gradient g, by name.
            observed: the observed gradient g*, by name.
        """
        inner = inner_product(candidate, observed)
        norms = inner_product(candidate, candidate) * inner_product(observed, observed)
        tiny = 1e-30 if norms.element_size() < 8 else 1e-300
        return 1 - inner / norms.clamp_min(tiny).sqrt()


@dataclass(frozen=True)
class Euclidean:
    """The relative squared distance ``scale · ‖g − g*‖² / ‖g*‖²`` of gradients, as in DLG and iDLG.

    g is the candidate's gradient, and g* the observed one. The papers' own objective is not divided
    by ``‖g*‖²``. The division changes no minimum, and makes tolerances and the weights of priors
    comparable over models.

    Attributes:
        scale: factor of the objective, > 0.
        relative: whether to divide by ``‖g*‖²``.
    """

    scale: float = 1.0
    relative: bool = True

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return ``scale · ‖g − g*‖² / ‖g*‖²``, or ``scale · ‖g − g*‖²`` if not ``relative``.

        Args:
            candidate: the candidate's gradient g, by parameter name.
            observed: the observed gradient g*, by the same names.
        """
        distance = relative_squared_distance if self.relative else squared_distance
        return self.scale * distance(candidate, observed)


@dataclass(frozen=True)
class Masked:
    """The distance ``objective(1[g* ≠ 0] ∘ g, g*)``, for an attacker who knows of pruning.

    g is the candidate's gradient, and g* the observed one. Pruning sets entries of an update to
    exactly zero, so that such an entry only shows that the private gradient is small there. All
    entries at which g* is zero are left out, also those of units that no sample activates.

    Attributes:
        objective: the distance that compares the masked gradients.
    """

    objective: Objective

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of two gradients without the entries at which g* is zero.

        ``candidate`` is the candidate's gradient g, by parameter name. ``observed`` is the observed
        gradient g*, by the same names.
        """
        kept = {name: candidate[name] * (value != 0) for name, value in observed.items()}
        return self.objective(kept, observed)


@dataclass(frozen=True)
class PriorContext:
    """The facts that a prior may use besides the candidate's inputs.

    Attributes:
        gradient_map: the model, for priors that compare the inputs of its layers.
        spec: the public facts about the data.
        params: the parameters θ_t.
        buffers: the model's buffers, with the server's running BatchNorm statistics.
        statistics: BatchNorm statistics that the threat model grants, or empty.
        first_step: (b, C, H, W) those of the candidate's inputs that the first local step uses.
            Their BatchNorm statistics are compared with the known ones. ``None`` for all inputs.
    """

    gradient_map: GradientMap
    spec: InputSpec
    params: Params
    buffers: Params
    statistics: Params
    first_step: Tensor | None = None


@runtime_checkable
class Prior(Protocol):
    """A penalty of a candidate's inputs, which is added to the distance of gradients."""

    def __call__(self, inputs: Tensor, context: PriorContext) -> Tensor:
        """Return the penalty of normalised inputs (B, C, H, W), a differentiable scalar.

        ``context`` is the attacker's further knowledge.
        """
        ...


def total_variation(images: Float[Tensor, "B C H W"]) -> Tensor:
    """Return the mean absolute difference of vertical neighbours plus that of horizontal ones.

    This is the anisotropic total variation of Rudin, Osher and Fatemi (1992). It is a mean over all
    pixels, channels and images, as in Geiping et al.'s code, so that its weight does not depend on
    the image's size.

    Example:
        >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
        tensor(1.)
    """
    vertical = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    horizontal = (images[..., :, 1:] - images[..., :, :-1]).abs().mean()
    return vertical + horizontal


def colour_differences(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D H W"]:
    """Return the C channels of images, followed by the differences of every two channels.

    The result has D = C + C (C − 1) / 2 channels. The differences are the double opponents of
    Åström and Schnörr (2016). Edges of natural images show in all channels at once, so that
    differences of channels vary less than the channels.
    """
    pairs = [images[:, i] - images[:, j] for i, j in combinations(range(images.shape[1]), 2)]
    return torch.cat([images, *(pair[:, None] for pair in pairs)], dim=1)


@dataclass(frozen=True)
class TotalVariation:
    """The penalty ``weight · total_variation(x)`` of a candidate's inputs x.

    Attributes:
        weight: factor of the penalty, which is added to the distance of gradients, ≥ 0.
        absolute: whether |x| is penalised instead of x, for InstaHide's images, whose signs are
            flipped at random (as in the published code of Huang et al. 2021).
        colour: whether the differences of channels are penalised as well.
    """

    weight: float
    absolute: bool = False
    colour: bool = False

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight must be ≥ 0, got {self.weight}.")

    def __call__(self, inputs: Float[Tensor, "B C H W"], context: PriorContext) -> Tensor:
        """Return the penalty of normalised inputs, a scalar; ``context`` is not used."""
        images = inputs.abs() if self.absolute else inputs
        return self.weight * total_variation(colour_differences(images) if self.colour else images)


def statistics_distance(
    candidate: Params, known: Params, relative: bool = False
) -> Float[Tensor, ""]:
    """Return ``Σ_l ‖μ_l(x) − μ_l‖₂ + ‖σ²_l(x) − σ²_l‖₂`` over the BatchNorm layers l, a scalar.

    μ_l(x) and σ²_l(x) hold the mean and the variance of each channel of layer l's input for a
    candidate x, and μ_l and σ²_l the known ones. Both mappings have the names of the layers'
    buffers; layers without a known entry do not count. This is eq. 10 of Yin et al. 2021, with
    norms and not their squares, as in the published code of Yin et al. 2020. The norms grow with a
    layer's width and with its weights. So the ``relative`` distance has the root mean squares of
    ``(μ_l(x) − μ_l) / σ_l`` and ``(σ²_l(x) − σ²_l) / σ²_l`` over the channels instead.
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
    """A penalty of the difference between a candidate's BatchNorm statistics and known ones.

    It is ``weight`` times :func:`statistics_distance`. The threat model may grant statistics of the
    private batch (``exact``), those that follow from the buffers that the client sent
    (``derived``), or the server's (``running``). If none are known, or the model has no BatchNorm,
    the penalty is zero. Statistics are compared at the parameters before training, for the samples
    of the first local step. ``derived`` statistics of several steps are means over the steps.

    Attributes:
        weight: factor of the penalty, which is added to the distance of gradients, ≥ 0.
        known: source of the statistics: ``granted`` for those that the threat model grants, or
            ``running`` for the server's own buffers.
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
        """Return the penalty of normalised inputs, a scalar; 0 if no statistics are known.

        ``context`` holds the model, its parameters, and the known statistics.
        """
        known = context.statistics if self.known == "granted" else context.buffers
        if not known:
            return inputs.new_zeros(())
        first = inputs if context.first_step is None else context.first_step
        found = context.gradient_map.statistics(context.params, first, context.buffers)
        if not found:
            return inputs.new_zeros(())
        return self.weight * statistics_distance(found, known, self.relative)
