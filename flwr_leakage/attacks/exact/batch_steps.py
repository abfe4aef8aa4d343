"""Whole batches from several local steps, through a first linear layer.

Images do not change from step to step. So the pseudo-gradient of the first layer is
``(Σ_t S⁽ᵗ⁾) X``, of rank B, and a sample's column is zero where the unit stays inactive in all
steps. A single column does not determine its input. The attack collects sparse columns until it has
B independent ones, whose inverse gives all images. It judges them by their own masks, and proves
them by a replay of all steps.
"""

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.exact.batch_layer import BatchLayer
from flwr_leakage.attacks.exact.batch_proof import PROVEN_DEVIATION, BatchInputs, Verdict, replays
from flwr_leakage.attacks.exact.batch_search import ROW_START_SHARE, SearchSettings
from flwr_leakage.attacks.exact.sparse_columns import null_vector, sparsest, zero_entries
from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.params import Params
from flwr_leakage.records import Batch

LEAST_AGREEMENT = 0.9
"""Least share of units for which an image's mask and the zeros of its column must agree (chosen on
development draws; no table)."""


def recover_steps(
    problem: Problem, layer: BatchLayer, settings: SearchSettings, generator: torch.Generator
) -> BatchInputs:
    """Return all images of a batch whose client took several steps on all of its samples.

    Args:
        problem: the network, the schedule and the observed update.
        layer: the layer on the network's input.
        settings: the limits of the search.
        generator: draws all starts.

    Raises:
        ValueError: the schedule or the layer does not allow it, or not all columns were found.
    """
    require_steps(problem, layer)
    columns, duals = _collect(layer, settings, generator)
    inputs = duals @ layer.factor.right
    labels = torch.tensor([_label(layer, c, t) for c, t in zip(columns.T, duals, strict=True)])
    errors = (layer.factor.left @ columns / (duals @ columns).diagonal()).T
    relative = layer.factor.noise * duals.norm(dim=1) * inputs.shape[1] ** 0.5
    relative = relative / inputs.norm(dim=1)

    def replay(points: Tensor) -> Params:
        images = layer.images(points)
        assert images is not None  # require_steps
        batch = Batch(images, labels)
        return simulate_gradient(
            problem.gradient_map, problem.params, problem.buffers, problem.schedule, batch
        )

    proven = problem.schedule.batch_size >= problem.num_samples == len(labels)
    proven = proven and replays(layer, replay, inputs, relative, generator)
    proven = proven and float((relative * layer.in_units(inputs)).max()) <= PROVEN_DEVIATION
    verdict: Verdict = "proven" if proven else "plausible"
    return BatchInputs(
        layer.name,
        layer.order,
        inputs,
        labels,
        errors,
        (verdict,) * len(labels),
        relative,
        layer.factor.rank,
        torch.nan,
    )


def require_steps(problem: Problem, layer: BatchLayer) -> None:
    """Raise ``ValueError`` if the layer or the problem's clients do not allow several steps."""
    if not layer.takes_input or not layer.rectified:
        raise ValueError(
            f"{layer.name} must be a linear layer with ReLU on the input: features move between "
            f"{problem.schedule.num_steps} local steps."
        )
    if problem.members:
        raise ValueError("several steps must be one client's, got a mean of several clients'.")


def _collect(
    layer: BatchLayer, settings: SearchSettings, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the columns Q (b, b) and the duals T (b, b) of all samples."""
    rank = layer.factor.rank
    left = layer.factor.left[layer.live]
    budget = Budget.of(settings.max_seconds)
    columns: list[Tensor] = []
    for _ in range(settings.starts):
        if budget.is_spent:
            break
        row = left[int(torch.randint(len(left), (), generator=generator))]
        noise = torch.randn(rank, generator=generator, dtype=torch.float64).to(left)
        from_row = float(torch.rand((), generator=generator)) < ROW_START_SHARE
        column = _column(left, row if from_row else noise)
        # Two columns with a larger cosine belong to the same sample.
        if column is None or any(abs(float(column @ other)) > 0.95 for other in columns):
            continue
        columns.append(column)
        if len(columns) < rank:
            continue
        found = torch.stack(columns, 1)
        duals = torch.linalg.pinv(found)
        duals = duals / (duals @ layer.factor.bias)[:, None]
        outputs = duals @ layer.projected.T + layer.offset
        values = (layer.factor.left @ found).T
        active = values.abs() > 1e-2 * values.abs().mean(1, keepdim=True)
        agreement = (active == (outputs > 0)).double().mean(1)
        if float(agreement.min()) > LEAST_AGREEMENT:
            return found, duals
        # A column of no sample spoils the samples that it mixes. The densest doubtful one goes.
        doubtful = torch.where(agreement > LEAST_AGREEMENT, -1, active.sum(1))
        columns.pop(int(doubtful.argmax()))
    raise ValueError(
        f"{len(columns)} of {rank} sparse columns were found; images need all of them."
    )


def _column(left: Tensor, start: Tensor, max_corrections: int = 5) -> Tensor | None:
    """Return a sparse column's q (b,) near a start, or None if its zeros do not determine it.

    The column and its zeros are computed from each other, up to ``max_corrections`` times.
    """
    rank = left.shape[1]
    column = sparsest(left, start)
    zeros = None
    for _ in range(max_corrections):
        found = zero_entries(left @ column, rank + rank // 4)
        if found is None:
            return None
        if zeros is not None and torch.equal(found, zeros):
            break
        zeros = found
        column, ratio = null_vector(left[zeros])
        if ratio > 0.1:
            return None
    return column


def _label(layer: BatchLayer, column: Tensor, dual: Tensor) -> int:
    """Return the class whose errors at the first step have the largest cosine with the column."""
    inputs = dual @ layer.factor.right
    classes = layer.problem.spec.num_classes
    outputs = (layer.matrix @ inputs + layer.offset).expand(classes, -1)
    errors = layer.errors(outputs, torch.arange(classes), inputs.expand(classes, -1))
    values = layer.factor.left @ column / (dual @ column)
    return int((errors @ values / errors.norm(dim=1).clamp_min(1e-300)).argmax())
