"""Find the layers whose updates can show members, and compute the inputs that records give them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flwr_leakage.attacks.network.calls import Affine, Normalise
from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.network.trace import Step
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.members.row_space import RowSpace, noise_of_spectrum
from flwr_leakage.operators import sample_gradients
from flwr_leakage.records import Batch, InputSpec

LARGEST = 1024
"""The largest number of a layer's outputs or inputs, whichever are fewer, with which its row space
is computed. The cost of the singular values grows with the square of this number, to seconds for a
weight of 1024 × 4608."""

SPARE = 8
"""The least number of directions outside of a row space at which linear algebra decides. If a
non-member's layer input is spread over all these directions, the probability that its residual is a
tenth of the smallest null residual is about 0.1 to the power of this number."""

CHUNK = 64
"""The number of records in one forward pass."""

TELLING = 3
"""The number of layers whose statistics are weighted if linear algebra decides in no layer. The
weights come from a repetition of the round on the server's own records. The number was chosen on
development draws, of which there is no table."""

NOTICED = 10.0
"""The ratio of the noise on an update to the rounding of single precision above which the noise
counts as that of a defense."""


@dataclass(frozen=True)
class LayerSpan:
    """The row space of one layer's update, with the number of layer inputs that went into the
    update.

    Attributes:
        name: the name of the layer's weight.
        space: the row space of the weight's pseudo-gradient.
        rows: the number of layer inputs that went into the update: the number of samples, times the
            number of positions at which the layer sees a sample, such as a convolution's patches.
        capacity: the largest ``rows`` at which the row space still excludes inputs of other
            records. It is the number of outputs with a nonzero derivative of the loss (at most K −
            1 of K logits), or the layer's number of inputs less 8 (``SPARE``) if that is smaller.
        behind_batch_norm: whether a BatchNorm layer comes before this layer.
        noise_std: the standard deviation of noise on the pseudo-gradient's entries, estimated from
            its singular values; ``None`` if it was not estimated, as the noise was given or no
            singular value is that of noise alone.
    """

    name: str
    space: RowSpace
    rows: int
    capacity: int
    behind_batch_norm: bool
    noise_std: float | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether the row space consists of the inputs of one step's samples: ``rows`` is at
        most ``capacity``, and noise or further steps add no directions.
        """
        return self.rows <= self.capacity and not self.is_too_full

    @property
    def is_too_full(self) -> bool:
        """Return whether the row space has more directions than ``rows`` inputs span, as after
        noise or several steps.
        """
        return self.rows <= self.capacity and (self.space.rank > self.rows or bool(self.noise_std))

    def __str__(self) -> str:
        """Return the layer's name, rank, width and number of rows in a few words.

        Example:
            >>> space = RowSpace.of(torch.eye(3)[:2])
            >>> str(LayerSpan("fc1.weight", space, 2, 2, False))
            'fc1 (rank 2 of 3 inputs, 2 rows)'
        """
        width = self.space.directions.shape[1]
        name = self.name.removesuffix(".weight")
        return f"{name} (rank {self.space.rank} of {width} inputs, {self.rows} rows)"


def rounding_std(problem: Problem, name: str) -> float:
    """Return the standard deviation of the error in the pseudo-gradient of the weight ``name`` that
    single precision causes. Each step rounds a weight w with an error of standard deviation
    ε|w|/√12, where ε is the spacing of numbers next to 1. The pseudo-gradient is the weight's
    change divided by the learning rate, and so is its error.
    """
    weight = problem.params[name]
    size = float(weight.double().square().mean().sqrt())
    steps = problem.schedule.num_steps**0.5
    spacing = torch.finfo(weight.dtype).eps / 12**0.5
    return size * spacing * steps / problem.schedule.learning_rate


def find_spans(
    problem: Problem, noise_std: float | None = None, only: Sequence[str] | None = None
) -> tuple[list[LayerSpan], list[str]]:
    """Return the row spaces of the layers that may show members, in the model's order, and texts
    that say of each other layer why it is left out. A convolution is a linear layer whose inputs
    are patches. It is left out if the samples have more patches than its ``capacity``, the number
    up to which its row space excludes other patches.

    Args:
        problem: the update with its model, whose BatchNorm uses running statistics.
        noise_std: the standard deviation of a defense's noise on the pseudo-gradient's entries;
            ``None`` estimates it, for one step, from the singular values that only noise explains.
        only: the names of the weights whose layers are used, also if they would be left out;
            ``None`` to use all that need not be left out.
    """
    trace = traced(problem)
    found: dict[str, LayerSpan] = {}
    left_out: list[str] = []
    positions: dict[str, int] = {}
    normalised = False
    affine = []
    for step in trace.steps:
        normalised |= isinstance(step.op, Normalise)
        if isinstance(step.op, Affine) and step.op.name in problem.gradient:
            affine.append((step, normalised))
            positions[step.op.name] = positions.get(step.op.name, 0) + _positions(step)
    for step, behind in affine:
        assert isinstance(step.op, Affine)
        name, layer = step.op.name, step.op.layer
        if name in found or (only is not None and name not in only):
            continue
        matrix = problem.gradient[name].flatten(1)
        if only is None and (reason := _refusal(step.op, matrix)):
            left_out.append(f"{layer} {reason}")
            continue
        rows = problem.num_samples * positions[name]
        heard = int(matrix.any(1).sum())  # number of outputs with a nonzero derivative of the loss
        if step is affine[-1][0] and len(matrix) == problem.spec.num_classes:
            # the K derivatives by the logits sum to zero, so that only K − 1 are independent
            heard = min(heard, problem.spec.num_classes - 1)
        capacity = min(heard, matrix.shape[1] - SPARE)
        if only is None and step.op.is_convolution and rows > capacity:
            left_out.append(f"{layer} has {rows:,} patches for a row space of at most {capacity}")
            continue
        std = rounding_std(problem, name)
        space = RowSpace.of(matrix, math.hypot(std, noise_std or 0.0))
        told = None
        one_step = problem.schedule.num_steps == 1
        if noise_std is None and one_step and rows < min(capacity, len(space.singular_values)):
            told = noise_of_spectrum(space, rows)
            space = space.with_noise(max(std, told))
            told = told if told > NOTICED * std else 0.0
        found[name] = LayerSpan(name, space, rows, capacity, behind, told)
    return list(found.values()), left_out


def emptiest(spans: Sequence[LayerSpan]) -> list[LayerSpan]:
    """Return the three (``TELLING``) layers with the smallest ratios of ``rows`` to ``capacity``,
    in ascending order. Among layers of equal ratio, smaller ones come first.
    """
    return sorted(
        spans, key=lambda span: (span.rows / max(span.capacity, 1), span.space.directions.numel())
    )[:TELLING]


def leftovers(
    problem: Problem,
    views: Sequence[Sequence[LayerSpan]],
    inputs: Tensor,
    levels: Float[Tensor, " L"],
) -> tuple[Float[Tensor, "V N S L"], Float[Tensor, "N S"]]:
    """Return log r (V, N, S, L), with the residuals r of N records in S layers' row spaces for V
    updates and L dampings; and log ‖h‖ (N, S), with the records' layer inputs h. ``inputs`` are the
    records' images (N, C, H, W) or texts (N, T).

    r² is the share of ‖h‖² outside of the layer's row space, at each of the dampings ``levels``
    (see :meth:`RowSpace.leftover`). ‖h‖² is summed over the positions of a convolution, over the
    calls of a layer, or over a text's :func:`tokens_with_derivative`. A record whose inputs are all
    zero has r = 1. ``problem`` is an update with its model as the server sent it; BatchNorm uses
    running statistics. ``views`` holds the row spaces of the layers for each of V updates of its
    parameters.
    """
    by_name = {span.name: index for index, span in enumerate(views[0])}
    logs, sizes = [], []
    for part in inputs.split(CHUNK):
        energy = torch.zeros(len(part), len(by_name), dtype=torch.float64)
        left = torch.zeros(len(views), *energy.shape, len(levels), dtype=torch.float64)
        learnt = tokens_with_derivative(problem.spec, part) if problem.spec.is_text else None
        trace = traced(problem, part)
        for step in trace.steps:
            if not isinstance(step.op, Affine) or step.op.name not in by_name:
                continue
            index = by_name[step.op.name]
            rows = _rows(step).double()
            if learnt is not None and rows.shape[1] == learnt.shape[1]:
                rows = rows * learnt[..., None].to(rows)
            flat = rows.reshape(-1, rows.shape[-1])
            for view, spans in enumerate(views):
                found = spans[index].space.leftover(flat, levels.to(flat.device))
                left[view, :, index] += found.reshape(*rows.shape[:2], -1).sum(1).cpu()
            energy[:, index] += rows.square().sum((1, 2)).cpu()
        ratio = left / energy[:, :, None].clamp_min(torch.finfo(torch.float64).tiny)
        ratio = torch.where(energy[:, :, None] > 0, ratio, 1.0)
        logs.append(0.5 * ratio.clamp_min(1e-24).log())
        sizes.append(0.5 * energy.clamp_min(1e-24).log())
    return torch.cat(logs, 1), torch.cat(sizes)


def agreements(
    problem: Problem,
    views: Sequence[Sequence[LayerSpan]],
    records: Batch,
    levels: Float[Tensor, " L"],
) -> Float[Tensor, "V N S L"]:
    """Return how well records' outer products e hᵀ fit into layers' updates, large for members.

    The result has the shape (V, N, S, L) for V updates, N records, S layers and the L dampings in
    ``levels``.

    h is the record's input of a layer, and e the derivative of its loss by the layer's outputs; see
    :meth:`RowSpace.agreement`. The fit is 0 in layers that see a sample at several positions, as
    most convolutions do. ``problem`` is an update with its model, whose BatchNorm uses running
    statistics. ``views`` holds the row spaces of the layers for each of V updates of its
    parameters.
    """
    found = torch.zeros(len(views), len(records), len(views[0]), len(levels)).double()
    for at, start, e, h in _outer_products(problem, views[0], records):
        for view, spans in enumerate(views):
            value = spans[at].space.agreement(e, h, levels.to(h.device))
            found[view, start : start + len(h), at] = value.cpu()
    return found


def shares(problem: Problem, spans: Sequence[LayerSpan], records: Batch) -> Float[Tensor, "N S"]:
    """Return ``hᵀ G⁺ e / n`` (N, S) of N records in S layers, which is 1 for the update's n
    samples.

    G is the layer's pseudo-gradient, G⁺ its pseudoinverse, h the record's input of the layer, and e
    the derivative of its loss by the layer's outputs; see :meth:`RowSpace.share_of`. If the update
    is scaled, a sample's number is not 1, but still the same in all layers. The result is 0 in
    layers that see a sample at several positions, as most convolutions do.

    ``problem`` is the update with its model, whose BatchNorm uses running statistics; ``spans`` are
    the layers' row spaces.
    """
    count = problem.num_samples
    return _by_layer(problem, spans, records, lambda space, e, h: space.share_of(e, h) / count)


def traces(problem: Problem, spans: Sequence[LayerSpan], records: Batch) -> Float[Tensor, "N S"]:
    """Return ``‖e‖ ‖h‖ / (n σ)`` (N, S), the size of N records' parts of S layers' updates relative
    to noise.

    Here h is the record's input of the layer, e the derivative of its loss by the layer's outputs,
    n the number of samples, and σ the standard deviation of one entry's noise. If the model fits a
    record well, e is so small that no test of the update finds the record. The result is 0 in
    layers that see a sample at several positions, as most convolutions do.

    ``problem`` is the update with its model, whose BatchNorm uses running statistics; ``spans`` are
    the layers' row spaces.
    """

    def trace(space: RowSpace, e: Tensor, h: Tensor) -> Tensor:
        std = (space.rounding / len(space.left)) ** 0.5
        return e.norm(dim=1) * h.norm(dim=1) / (problem.num_samples * max(std, 1e-300))

    return _by_layer(problem, spans, records, trace)


def _by_layer(
    problem: Problem,
    spans: Sequence[LayerSpan],
    records: Batch,
    measure: Callable[[RowSpace, Tensor, Tensor], Tensor],
) -> Float[Tensor, "N S"]:
    """Return the values (N, S) of ``measure`` for N records in S layers; 0 in layers that see a
    sample at several positions, as most convolutions do. ``measure`` takes a layer's row space, the
    derivatives e (B, m) of records' losses by the layer's outputs, and the records' inputs h (B, n)
    of the layer, and returns values (B,).
    """
    found = torch.zeros(len(records), len(spans)).double()
    for at, start, e, h in _outer_products(problem, spans, records):
        found[start : start + len(h), at] = measure(spans[at].space, e, h).cpu()
    return found


def _outer_products(
    problem: Problem, spans: Sequence[LayerSpan], records: Batch
) -> Iterator[tuple[int, int, Float[Tensor, "B m"], Float[Tensor, "B n"]]]:
    """Yield for each layer and chunk of B records: the layer's index in ``spans``; the index of the
    first record; the derivatives e (B, m) of the losses by the layer's outputs; and the layer's
    inputs h (B, n). Layers that see a sample at several positions, as most convolutions do, are
    skipped.
    """
    chosen = [at for at, span in enumerate(spans) if span.rows == problem.num_samples]
    names = [spans[at].name for at in chosen]
    for start in range(0, len(records) if names else 0, CHUNK):
        part = records[start : start + CHUNK]
        with torch.no_grad():
            own = sample_gradients(
                problem.gradient_map, problem.params, part, problem.buffers, names
            )
            steps = traced(problem, part.inputs).steps
        rows = {s.op.name: _rows(s)[:, 0].double() for s in steps if isinstance(s.op, Affine)}
        ordered = [name for name in problem.params if name in names]
        sizes = [problem.params[name].numel() for name in ordered]
        matrices = dict(zip(ordered, own.split(sizes, 1), strict=True))
        for at, name in zip(chosen, names, strict=True):
            h = rows[name]
            gradient = matrices[name].reshape(len(h), -1, h.shape[1]).double()
            e = torch.einsum("bmn,bn->bm", gradient, h)
            yield at, start, e / h.square().sum(1, keepdim=True).clamp_min(1e-30), h


def _refusal(op: Affine, matrix: Float[Tensor, "m n"]) -> str:
    """Return the reason why a layer with this pseudo-gradient cannot show members; empty if it
    can.
    """
    if not bool(matrix.any()):
        return "did not change: it is frozen, or no derivative reached it"
    if min(matrix.shape) > LARGEST:
        return f"is too large for singular values ({matrix.shape[0]} × {matrix.shape[1]})"
    if op.is_convolution:
        try:
            _ = op.geometry
        except ValueError as error:
            return f"is no plain convolution: {error}".rstrip(".")
    return ""


def _positions(step: Step) -> int:
    """Return at how many positions one sample enters a layer: patches, tokens, or 1 otherwise."""
    shape = step.outputs.shape
    assert isinstance(step.op, Affine)
    return int(shape[2:].numel()) if step.op.is_convolution else int(shape[1:-1].numel())


def tokens_with_derivative(spec: InputSpec, ids: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Return booleans (B, T), true for tokens whose embedding gets a derivative of the loss.
    Padding gets none. In a model of the next token, a text's last token gets none either, as
    nothing is predicted after it.
    """
    is_token = torch.ones_like(ids, dtype=torch.bool)
    if spec.padding is not None:
        is_token = ids != spec.padding
    if spec.next_token:
        # only tokens that another token follows get a derivative
        is_token &= is_token.flip(1).cumsum(1).flip(1) > 1
    return is_token


def _rows(step: Step) -> Float[Tensor, "B P n"]:
    """Return each of B samples' inputs of a layer as P rows of n entries. A convolution has one row
    per patch.
    """
    assert isinstance(step.op, Affine)
    geometry = step.op.geometry
    if geometry is not None:
        return geometry.patches(step.inputs).transpose(1, 2)
    return step.inputs.reshape(len(step.inputs), -1, step.inputs.shape[-1])
