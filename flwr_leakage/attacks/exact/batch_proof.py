"""What is proven of a batch's samples, without the truth.

Where all b samples of a layer's gradient are found, the network behind predicts their errors S from
their inputs H, and ``[∂L/∂W, ∂L/∂c] = S [H, 1]`` must hold to the gradient's noise: m (n + 1)
equations for b n unknowns, with S of full column rank, so that no other H fits the same S. The last
column, which must be 1 for every sample, and the gradients of all layers behind were not used to
find anything. Where some samples are missing, one is proven by its errors, which lie in the span of
the gradient, and by what pins its own input: zeros that outnumber the unknowns, or outputs that the
next layer's gradient spans.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.batch_layer import BatchLayer, Candidate
from flwr_leakage.attacks.exact.sparse_columns import null_vector, zero_entries
from flwr_leakage.attacks.input_order import InputOrder
from flwr_leakage.params import Params

Verdict = Literal["proven", "plausible", "not"]

ROUNDING = 1e-5
"""Relative error that a float32 pass and its gradient may have against float64."""

SINGLE = 2.0**-21
"""How far rounding moves the outputs of a float32 pass, relative to their size."""

NOISE = 10.0
"""So many standard deviations of the gradient's noise are noise."""

SURPLUS = 20
"""Equations that must be left over beyond the unknowns."""

REACH, CHANGE, CHANGED = 10.0, 3.0, 0.02
"""How far inputs are moved, how much of the change a replay may miss, and at most of its size."""

UNCERTAIN = 3e-4
"""A sample is proven up to this standard deviation, so that the error itself is below 1e-3 by three
of them: of features relative to their size, of images relative to the range of pixels (60 dB)."""

SHARPENINGS = 3
"""Times that zeros and the dual that they demand are computed from each other."""

POLISHES = 8
"""Times that errors and inputs are computed from each other."""


@dataclass(frozen=True)
class BatchInputs:
    """A layer's inputs of the samples of a batch, as far as they were found.

    Attributes:
        layer: the name of the layer.
        order: how the inputs are the network's own, or ``None`` where they are features.
        inputs: (f, n).
        labels: (f,).
        errors: (f, m) ∂L/∂z of each sample.
        verdicts: one a sample.
        relative_errors: (f,) of each input through the gradient's noise, as far as it is known.
        rank: of the gradient: how many samples it shows.
        residual: ‖G − S [H, 1]‖ / ‖G‖ of the layer's gradient, where all were found, else NaN.
        refusals: of other layers, in words.
        stats: proposals and acceptances of each source.
    """

    layer: str
    order: InputOrder | None
    inputs: Tensor
    labels: Tensor
    errors: Tensor
    verdicts: tuple[Verdict, ...]
    relative_errors: Tensor
    rank: int
    residual: float
    refusals: tuple[str, ...] = ()
    stats: Mapping[str, object] | None = None

    @property
    def proven(self) -> int:
        """How many samples are proven."""
        return sum(verdict == "proven" for verdict in self.verdicts)


def conclude(
    layer: BatchLayer,
    following: BatchLayer | None,
    found: list[Candidate],
    generator: torch.Generator,
) -> BatchInputs:
    """Refine the samples found, and say what is proven of each."""
    found = [_sharpened(layer, sample) for sample in found]
    if len(found) == layer.factor.rank:
        return _whole(layer, found, generator)
    inputs = torch.stack([sample.dual for sample in found]) @ layer.factor.right
    checked = [layer.check(sample.dual, sample.label) or sample for sample in found]
    checked = [c if c.is_exact else layer.repaired(c, generator) for c in checked]
    relative = torch.tensor([_uncertainty(layer, following, sample) for sample in checked])
    verdicts: tuple[Verdict, ...] = tuple(
        "proven" if _explains(layer, c) and float(error) <= UNCERTAIN else "plausible"
        for c, error in zip(checked, relative * layer.in_units(inputs), strict=True)
    )
    return BatchInputs(
        layer.name,
        layer.order,
        inputs,
        torch.tensor([sample.label for sample in checked]),
        torch.stack([sample.errors for sample in checked]),
        verdicts,
        relative,
        layer.factor.rank,
        torch.nan,
    )


def _explains(layer: BatchLayer, sample: Candidate) -> bool:
    """Whether a sample's errors lie in the gradient's span, and there are equations enough."""
    return layer.surplus >= SURPLUS and sample.is_exact


def _zeros(layer: BatchLayer, sample: Candidate) -> Tensor | None:
    """(b, z) what the sample's zeros demand, ``Eᵀ t = 0``, or ``None`` where they are too few."""
    if not (layer.takes_input or layer.sparse_inputs):
        return None
    right = layer.right
    zeros = zero_entries(sample.dual @ right, layer.factor.rank + SURPLUS)
    return None if zeros is None else right[:, zeros]


def _sharpened(layer: BatchLayer, sample: Candidate) -> Candidate:
    """The sample at the dual that its zeros demand.

    A column of errors that is right to ε gives the dual to ε times the condition of all errors,
    zeros give it to the gradient's own noise.
    """
    for _ in range(SHARPENINGS):
        zeros = _zeros(layer, sample)
        if zeros is None or layer.factor.rank == 1:
            break
        checked = layer.check(null_vector(zeros.T)[0], sample.label)
        if checked is None or not checked.is_exact:
            break
        sample = checked
    return sample


def _uncertainty(layer: BatchLayer, following: BatchLayer | None, sample: Candidate) -> float:
    """The relative error that a sample's own equations leave in its input; ∞ where there are none.

    Zeros of the input z, at which ``R_z t`` is noise of the gradient, or outputs on the sample's
    mask, which are the next layer's inputs up to the residual of that equation. The error of least
    squares is ``σ² (EᵀE)⁻¹`` in t, and ``R`` carries it to the input. R has noise itself, of which
    the input ``t R`` has ``‖t‖ σ`` an entry at the true t, too; what is left at the zeros shows it.
    And β has, by which the input's length is told.
    """
    rank = layer.factor.rank
    size = float(sample.inputs.norm())
    lengths = layer.factor.right @ layer.factor.right.T
    noise = layer.factor.noise * float(sample.dual.norm())
    scale = layer.scale_noise * float(sample.dual.norm())
    entries = sample.inputs.numel() ** 0.5 / size
    if rank == 1:
        return math.hypot(noise * entries, scale)
    best = torch.inf
    zeros = _zeros(layer, sample)
    if zeros is not None:
        _, singular, basis = torch.linalg.svd(zeros.T, full_matrices=False)
        spread = basis[:-1] / singular[:-1, None].clamp_min(1e-300)
        rest = float((sample.dual @ zeros).norm()) / (zeros.shape[1] - rank) ** 0.5
        noise = max(noise, rest)
        best = noise * float((spread @ lengths * spread).sum()) ** 0.5 / size
    if following is not None and following.factor.rank == rank:
        mask = sample.outputs > 0
        features = following.factor.right.T
        if int(mask.sum()) >= rank + SURPLUS and int((~mask).sum()) >= rank:
            outputs = features @ null_vector(features[~mask])[0]
            share = layer.projected.norm() / outputs.norm()
            equations = torch.cat([layer.projected[mask], -share * outputs[mask, None]], 1)
            solved = torch.linalg.lstsq(equations, -layer.offset[mask, None]).solution
            rest = equations @ solved + layer.offset[mask, None]
            variance = float(rest.square().sum()) / (int(mask.sum()) - rank - 1)
            spread = torch.linalg.inv(equations.T @ equations)[:-1, :-1]
            error = (variance * float((spread * lengths).sum())) ** 0.5 / size
            moved = (solved[:-1, 0] - sample.dual) @ layer.factor.right
            best = min(best, max(error, float(moved.norm()) / size))
    return math.hypot(best, noise * entries, scale)


def _whole(layer: BatchLayer, found: list[Candidate], generator: torch.Generator) -> BatchInputs:
    """All samples: columns and inputs from each other, and everything compared."""
    problem, factor = layer.problem, layer.factor
    own = [_uncertainty(layer, None, sample) for sample in found]
    for _ in range(POLISHES):
        duals = torch.linalg.pinv(torch.stack([sample.column for sample in found], 1))
        checked = [
            layer.check(dual, sample.label) for dual, sample in zip(duals, found, strict=True)
        ]
        better = [
            sample
            if other is None or error <= UNCERTAIN
            else _better(layer, sample, other, generator)
            for sample, other, error in zip(found, checked, own, strict=True)
        ]
        moved = max(
            float((new.column - old.column).norm() / old.column.norm())
            for new, old in zip(better, found, strict=True)
        )
        found = better
        if moved < 1e-9:
            break
    for index, error in enumerate(own):
        if error > UNCERTAIN:
            found[index] = _sharpened(layer, found[index])
            own[index] = _uncertainty(layer, None, found[index])
    labels = torch.tensor([sample.label for sample in found], device=factor.left.device)
    errors = torch.stack([sample.errors for sample in found])
    observed = torch.cat([problem.gradient[layer.weight], problem.gradient[layer.bias][:, None]], 1)
    solved = torch.linalg.lstsq(errors.T, observed).solution
    inputs = solved[:, :-1]
    size = float(observed.norm())
    residual = float((observed - errors.T @ solved).norm()) / size
    noise = factor.noise * observed.numel() ** 0.5 / size
    # The variance of least squares: (SᵀS)⁻¹ for each column of the gradient. Errors that are not
    # right to noise show in what is left over, of which only the units beyond the rank tell.
    rest = residual * size / (max(layer.surplus, 1) * observed.shape[1]) ** 0.5
    deviations = max(factor.noise, rest) * (
        torch.linalg.inv(errors @ errors.T).diagonal().abs().sqrt()
    )
    relative = deviations * inputs.shape[1] ** 0.5 / inputs.norm(dim=1)
    # Errors are those of inputs whose lengths the bias tells.
    scales = layer.scale_noise * torch.stack([sample.dual.norm() for sample in found])
    relative = torch.hypot(relative, scales)
    pins = relative.new_tensor(own)
    pinned = torch.stack([sample.inputs for sample in found])
    inputs = torch.where((pins < relative)[:, None], pinned, inputs)
    relative = torch.minimum(pins, relative)
    ones = (solved[:, -1] - 1).abs() <= NOISE * deviations + 1e-3
    # Few outputs are spanned by any samples: then each of them needs a proof of its own.
    units = layer.in_units(inputs)
    # Units near zero make gradients jump within the inputs' uncertainty, and the client's rounding
    # may put them on either side: one is right.
    spreads = relative.clamp_min(SINGLE) * inputs.norm(dim=1) / inputs.shape[1] ** 0.5
    points = torch.stack(
        [
            layer.explained(each, int(label), float(spread), generator)
            for each, label, spread in zip(inputs, labels, spreads, strict=True)
        ]
    )
    sound = (
        residual <= NOISE * noise + ROUNDING
        and (layer.surplus >= SURPLUS or bool((pins * units <= UNCERTAIN).all()))
        and replays(
            layer,
            lambda moved: layer.gradient_behind(moved, labels),
            points,
            relative,
            generator,
        )
    )
    verdicts: tuple[Verdict, ...] = tuple(
        "proven" if sound and bool(one) and float(error) <= UNCERTAIN else "plausible"
        for one, error in zip(ones, relative * units, strict=True)
    )
    return BatchInputs(
        layer.name,
        layer.order,
        inputs,
        labels,
        errors,
        verdicts,
        relative,
        factor.rank,
        residual,
    )


def _better(
    layer: BatchLayer, sample: Candidate, other: Candidate, generator: torch.Generator
) -> Candidate:
    """The other candidate, repaired, with the old column if that is the better one."""
    if not other.is_exact:
        other = layer.repaired(other, generator)
    if other.is_exact or other.misfit < sample.misfit:
        return other
    return replace(other, column=sample.column, errors=sample.errors, misfit=sample.misfit)


def replays(
    layer: BatchLayer,
    replay: Callable[[Tensor], Params],
    inputs: Tensor,
    relative: Tensor,
    generator: torch.Generator,
) -> bool:
    """Whether inputs give the gradients observed, of all parameters that a replay tells.

    They may differ by noise, and by some of what moving the inputs makes, ``REACH`` times as far as
    they are uncertain: units near zero change sides there, few and by chance.

    Args:
        layer: whose gradient's noise is known.
        replay: inputs (B, n) ↦ gradients; a parameter's that is all zero tells nothing.
        inputs: (B, n).
        relative: (B,) their uncertainty, relative to their size.
        generator: of the direction in which they are moved.
    """
    problem = layer.problem
    steps = torch.randn(inputs.shape, generator=generator, dtype=torch.float64).to(inputs)
    sizes = REACH * relative * inputs.norm(dim=1) / inputs.shape[1] ** 0.5
    replayed, nearby = replay(inputs), replay(inputs + sizes[:, None] * steps)
    own = problem.params[layer.weight].square().mean().sqrt()
    for name, value in replayed.items():
        if not bool(value.any()):
            continue
        # Noise of a wire that rounds parameters grows with them.
        share = max(float(problem.params[name].square().mean().sqrt() / own), 1.0)
        observed = problem.gradient[name]
        size = float(observed.norm())
        noise = NOISE * (layer.factor.noise * share * observed.numel() ** 0.5 + ROUNDING * size)
        change = min(CHANGE * float((value - nearby[name]).norm()), CHANGED * size)
        if float((value - observed).norm()) > noise + change:
            return False
    return True
