"""Prove, without the truth, that recovered samples of a batch are right.

Let a linear layer ``z = W h + c`` have m units and n inputs, and its gradient rank b for the b
samples of a batch. If all samples are found, the network behind the layer predicts their errors S =
∂L/∂Z (m, b) from their inputs H (b, n). Then ``[∂L/∂W, ∂L/∂c] = S [H, 1]`` must hold up to the
gradient's noise. These are m (n + 1) equations for b n unknowns. S has full column rank, so that no
other H fits the same S. Two facts serve as checks, as the search does not use them: the last column
of [H, 1] must be 1 for every sample, and the samples must give the observed gradients of all layers
behind.

If some samples are missing, two facts prove a single sample. Its errors lie in the span of the
gradient's columns, and further equations determine its input. These equations are zeros of the
input that outnumber the unknowns, or outputs in the span of the next layer's gradient.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.batch_layer import BatchLayer, BatchSample
from flwr_leakage.attacks.exact.batch_masks import null_vector, zero_entries
from flwr_leakage.attacks.network.linear import InputOrder
from flwr_leakage.attacks.one_by_one import Verdict
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR, NOISE_DEVIATIONS, SPARE_EQUATIONS
from flwr_leakage.params import Params

PROVEN_DEVIATION = 3e-4
"""Largest standard deviation of the error of a proven sample's input, relative to the size of
features, or to the range of pixels of images. Three standard deviations stay below 1e-3, which is
60 dB for images."""


@dataclass(frozen=True)
class BatchInputs:
    """The inputs of a linear layer for the f samples of a batch that were found.

    Attributes:
        layer: the name of the layer ``z = W h + c``.
        order: the order in which the layer takes the pixels of the input; ``None`` if it takes
            features.
        inputs: (f, n) inputs h of the layer.
        labels: (f,) classes of the samples.
        errors: (f, m) ∂L/∂z of each sample.
        verdicts: one verdict for each sample: ``proven``, ``plausible`` or ``not`` (neither).
        relative_errors: (f,) standard deviations of the inputs' errors that the gradient's noise
            causes, relative to the inputs' size; ∞ where they are not known.
        rank: the rank of the gradient, which is the number of samples that it shows.
        residual: ‖G − S [H, 1]‖ / ‖G‖ if all samples were found, else NaN. G is the layer's
            gradient, S its samples' errors and H their inputs.
        refusals: the reasons why other layers were not used.
        scale: the factor by which the client scaled its update; see :class:`Problem`.
        stats: under ``proposals`` and ``accepted``, how many samples each source of the search, by
            its name, proposed, and how many of these were accepted; ``None`` if the client took
            several steps.
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
    scale: float = 1.0
    stats: Mapping[str, object] | None = None

    @property
    def proven(self) -> int:
        """Number of the batch's samples whose inputs are proven to be right."""
        return sum(verdict == "proven" for verdict in self.verdicts)


def conclude(
    layer: BatchLayer,
    following: BatchLayer | None,
    found: list[BatchSample],
    generator: torch.Generator,
) -> BatchInputs:
    """Return the samples found in a layer's gradient, with improved inputs and a verdict for each.

    A verdict is ``proven``, ``plausible`` or ``not`` (neither). ``found`` are the samples that a
    search has found. ``following`` is the layer that takes the ReLU of the layer's outputs, or
    ``None``. ``generator`` draws inputs near those of the samples.
    """
    found = [_sharpened(layer, sample) for sample in found]
    if len(found) == layer.factor.rank:
        return _whole(layer, found, generator)
    inputs = torch.stack([sample.dual for sample in found]) @ layer.factor.right
    checked = [layer.check(sample.dual, sample.label) or sample for sample in found]
    checked = [c if c.is_exact else layer.repaired(c, generator) for c in checked]
    relative = torch.tensor([_uncertainty(layer, following, sample) for sample in checked])
    has_spare = layer.surplus >= SPARE_EQUATIONS
    verdicts: tuple[Verdict, ...] = tuple(
        "proven" if has_spare and c.is_exact and float(error) <= PROVEN_DEVIATION else "plausible"
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


def _zeros(layer: BatchLayer, sample: BatchSample) -> Tensor | None:
    """Return the equations that the zeros of a sample's input give, or None if there are too few.

    The sample's input is t R, where t (b,) is its dual, and the b rows of R (b, n') are mixtures of
    inputs that the layer's gradient shows. At the z entries where the input is zero, ``Eᵀ t = 0``.
    The result is E (b, z), the columns of R at these entries.
    """
    if not (layer.takes_input or layer.sparse_inputs):
        return None
    right = layer.right
    zeros = zero_entries(sample.dual @ right, layer.factor.rank + SPARE_EQUATIONS)
    return None if zeros is None else right[:, zeros]


def _sharpened(layer: BatchLayer, sample: BatchSample) -> BatchSample:
    """Return a sample, with a dual that the zeros of its input determine if there are enough.

    The input is t R, with the dual t and the mixtures R of inputs that the gradient shows. A dual
    that was computed from the errors ∂L/∂z of all samples is as inexact as these errors, times the
    condition number of their matrix. A dual from the zeros has the gradient's noise only. Zeros and
    dual are computed from each other, up to three times.
    """
    for _ in range(3):
        zeros = _zeros(layer, sample)
        if zeros is None or layer.factor.rank == 1:
            break
        checked = layer.check(null_vector(zeros.T)[0], sample.label)
        if checked is None or not checked.is_exact:
            break
        sample = checked
    return sample


def _uncertainty(layer: BatchLayer, following: BatchLayer | None, sample: BatchSample) -> float:
    """Return the relative error of a sample's input by the sample's own equations; ∞ without any.

    The input is t R, with the sample's dual t (b,) and the mixtures R (b, n) of inputs that the
    layer's gradient shows. Two kinds of equations determine t. At entries where the input is zero,
    the columns R_z of R give ``t R_z = 0`` up to noise. At units that the sample activates, the
    layer's outputs equal the inputs of ``following``, the next layer, up to a residual.

    Let E be the equations' matrix and σ their noise. The covariance of the least-squares dual is
    ``σ² (EᵀE)⁻¹``, and R maps it to the input. Noise of R itself adds ``‖t‖ σ`` to each entry of
    ``t R``, even at the true t; the entries of ``t R`` at the zeros show this noise. Noise in the
    bias's gradient, which gives the scale of t, adds a relative error of the whole input.
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
        if int(mask.sum()) >= rank + SPARE_EQUATIONS and int((~mask).sum()) >= rank:
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


def _whole(layer: BatchLayer, found: list[BatchSample], generator: torch.Generator) -> BatchInputs:
    """Return all b samples of a layer's gradient with improved inputs and a verdict for each.

    First, the samples' inputs and errors are computed from each other, up to eight times: the
    network predicts the errors ∂L/∂z from the inputs, and the gradient gives inputs for these
    errors. The verdicts depend on whether errors and inputs explain the layer's gradient, and on
    whether a replay gives the gradients of the layers behind.
    """
    problem, factor = layer.problem, layer.factor
    own = [_uncertainty(layer, None, sample) for sample in found]
    for _ in range(8):
        duals = torch.linalg.pinv(torch.stack([sample.column for sample in found], 1))
        checked = [
            layer.check(dual, sample.label) for dual, sample in zip(duals, found, strict=True)
        ]
        better = []
        for sample, other, error in zip(found, checked, own, strict=True):
            if other is None or error <= PROVEN_DEVIATION:
                better.append(sample)
                continue
            if not other.is_exact:
                other = layer.repaired(other, generator)
            # If the previous errors fit the gradient better than the new ones, they are kept, with
            # their coordinates in the gradient's span.
            if not (other.is_exact or other.misfit < sample.misfit):
                other = replace(
                    other, column=sample.column, errors=sample.errors, misfit=sample.misfit
                )
            better.append(other)
        moved = max(
            float((new.column - old.column).norm() / old.column.norm())
            for new, old in zip(better, found, strict=True)
        )
        found = better
        if moved < 1e-9:
            break
    for index, error in enumerate(own):
        if error > PROVEN_DEVIATION:
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
    # For each column of the gradient, the least-squares inputs have the covariance (SᵀS)⁻¹ σ² with
    # the errors S. Wrong errors enlarge the residual, from which σ is estimated, too. The residual
    # has one degree of freedom for each active unit beyond the rank.
    rest = residual * size / (max(layer.surplus, 1) * observed.shape[1]) ** 0.5
    deviations = max(factor.noise, rest) * (
        torch.linalg.inv(errors @ errors.T).diagonal().abs().sqrt()
    )
    relative = deviations * inputs.shape[1] ** 0.5 / inputs.norm(dim=1)
    # The bias's gradient sets the lengths of the inputs, so that its noise adds to their errors.
    scales = layer.scale_noise * torch.stack([sample.dual.norm() for sample in found])
    relative = torch.hypot(relative, scales)
    pins = relative.new_tensor(own)
    pinned = torch.stack([sample.inputs for sample in found])
    inputs = torch.where((pins < relative)[:, None], pinned, inputs)
    relative = torch.minimum(pins, relative)
    ones = (solved[:, -1] - 1).abs() <= NOISE_DEVIATIONS * deviations + 1e-3
    units = layer.in_units(inputs)
    # The state of a unit near zero, and so the gradient, may change within the inputs' errors, or
    # by the client's rounding of a float32 pass, 2⁻²¹ of the outputs. So inputs with either state
    # are tried.
    spreads = relative.clamp_min(2.0**-21) * inputs.norm(dim=1) / inputs.shape[1] ** 0.5
    points = torch.stack(
        [
            layer.explained(each, int(label), float(spread), generator)
            for each, label, spread in zip(inputs, labels, spreads, strict=True)
        ]
    )
    # If the layer has few outputs, errors of wrong samples span the gradient, too. Then each sample
    # needs a proof of its own.
    sound = (
        residual <= NOISE_DEVIATIONS * noise + FLOAT32_RELATIVE_ERROR
        and (layer.surplus >= SPARE_EQUATIONS or bool((pins * units <= PROVEN_DEVIATION).all()))
        and replays(
            layer, lambda moved: layer.gradient_behind(moved, labels), points, relative, generator
        )
    )
    verdicts: tuple[Verdict, ...] = tuple(
        "proven" if sound and bool(one) and float(error) <= PROVEN_DEVIATION else "plausible"
        for one, error in zip(ones, relative * units, strict=True)
    )
    return BatchInputs(
        layer.name, layer.order, inputs, labels, errors, verdicts, relative, factor.rank, residual
    )


def replays(
    layer: BatchLayer,
    replay: Callable[[Tensor], Params],
    inputs: Tensor,
    relative: Tensor,
    generator: torch.Generator,
) -> bool:
    """Return whether a replay of B inputs (B, n) gives the observed gradients of all parameters.

    ``replay`` maps inputs to gradients by parameter name; a gradient that is all zero is not
    compared. The gradients may differ by noise, whose size the gradient of ``layer`` shows, and by
    a multiple of the change that a small move of the inputs causes, as a few units near zero then
    change between on and off. ``relative`` (B,) holds the standard deviations of the inputs'
    errors, relative to the inputs' size. ``generator`` draws the move. The size of the move, the
    multiple and the largest share of a gradient that it may reach were chosen on development draws;
    no results are kept.
    """
    problem = layer.problem
    steps = torch.randn(inputs.shape, generator=generator, dtype=torch.float64).to(inputs)
    # The inputs move by ten standard deviations of their errors.
    sizes = 10.0 * relative * inputs.norm(dim=1) / inputs.shape[1] ** 0.5
    replayed, nearby = replay(inputs), replay(inputs + sizes[:, None] * steps)
    own = problem.params[layer.weight].square().mean().sqrt()
    for name, value in replayed.items():
        if not bool(value.any()):
            continue
        # If the client rounds parameters before sending, the noise, and so the allowed difference,
        # grows with a parameter's size.
        share = max(float(problem.params[name].square().mean().sqrt() / own), 1.0)
        observed = problem.gradient[name]
        size = float(observed.norm())
        noise = NOISE_DEVIATIONS * (
            layer.factor.noise * share * observed.numel() ** 0.5 + FLOAT32_RELATIVE_ERROR * size
        )
        change = min(3.0 * float((value - nearby[name]).norm()), 0.02 * size)
        if float((value - observed).norm()) > noise + change:
            return False
    return True
