"""All scores of a batch in one call, from a notebook or any training script."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap, Loss, local_update
from flwr_leakage.normalization import BatchNormMode
from flwr_leakage.operators import Budget
from flwr_leakage.params import add
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, Exposure, LocalSchedule, Update
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.compute import ScoreResult, compute_scores
from flwr_leakage.scores.gradient_norm import GradientNorm
from flwr_leakage.scores.influence_krylov_bound import InfluenceKrylovBound
from flwr_leakage.scores.lambda_max import LambdaMax


def default_scores() -> dict[str, Score]:
    """The scores that a client can afford every round, as in ``conf/score/default.yaml``."""
    return {
        "gradient_norm": GradientNorm(),
        "lambda_max": LambdaMax(tolerance=2e-2),
        "influence_krylov_bound": InfluenceKrylovBound(),
    }


def score(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    scores: Mapping[str, Score] | Sequence[Score] | None = None,
    *,
    loss: Loss = F.cross_entropy,
    batch_norm: BatchNormMode = "running",
    perturbation: Mapping[str, Tensor] | None = None,
    noise_std: float = 0.0,
    schedule: LocalSchedule | None = None,
    budget: Budget | None = None,
    seed: int = 0,
) -> dict[str, ScoreResult]:
    """Score every sample of a batch; the model is not changed.

    Args:
        model: any module whose gradient is differentiable.
        inputs: (B, C, H, W), normalised as the model expects.
        targets: (B,) class indices or (B, K) probabilities.
        scores: by name, or a sequence, named by their classes; ``default_scores()`` if ``None``.
        loss: (logits, targets) ↦ scalar.
        batch_norm: ``batch`` for a client that trains in train mode, else ``running``.
        perturbation: δ, what a defense adds to the pseudo-gradient of the whole update, keyed as
            the model's parameters.
        noise_std: standard deviation of Gaussian noise added to every entry of the pseudo-gradient.
        schedule: of the local training; one step over the whole batch if ``None``.
        budget: for all scores together.
        seed: of all random draws, ≥ 0.

    Returns:
        A result under each name that was asked for, in order, with values, notes, unit and
        direction of its main quantity and the others under their names. A score that failed is
        among them: no values, and the reason as ``error`` and as the note of every sample.

    Raises:
        ValueError: ``noise_std`` is negative or not finite, ``perturbation`` has other keys than
            the model's parameters, or an entry of ``scores`` is no score.
    """
    if not 0 <= noise_std < math.inf:
        raise ValueError(f"noise_std must be finite and ≥ 0, got {noise_std}.")
    chosen = default_scores() if scores is None else scores
    for entry in chosen.values() if isinstance(chosen, Mapping) else chosen:
        if not isinstance(entry, Score) or isinstance(entry, type):
            raise ValueError(f"scores must hold scores such as GradientNorm(), got {entry!r}.")
    gradient_map = GradientMap(model, loss, batch_norm)
    params, buffers = gradient_map.params, gradient_map.buffers
    if perturbation is not None and perturbation.keys() != params.keys():
        raise ValueError(
            f"perturbation must have the entries {sorted(params)} of the model's parameters, "
            f"got {sorted(perturbation)}."
        )
    batch = Batch(inputs.detach(), targets.detach())
    schedule = schedule or LocalSchedule(1.0, 1, max(1, len(batch)))
    try:
        change = local_update(gradient_map, params, batch, schedule, buffers)
        delta = {name: value.detach() for name, value in change.items()}
    except (RuntimeError, IndexError):
        delta = {}
    if not (delta and all(bool(value.isfinite().all()) for value in delta.values())):
        # Each score itself says what is wrong with the batch, a sample or the model.
        delta = {name: torch.zeros_like(value) for name, value in params.items()}
    hidden = {name: torch.zeros_like(value) for name, value in params.items()}
    if perturbation is not None:
        hidden = add(hidden, perturbation)
    if noise_std:
        draw = make_generator(seed, purpose="noise")
        hidden = {
            name: value + noise_std * torch.randn(value.shape, generator=draw)
            for name, value in hidden.items()
        }
    moved = {name: delta[name] - schedule.learning_rate * value for name, value in hidden.items()}
    exposure = Exposure(
        params,
        buffers,
        batch,
        batch,
        Update(delta, buffers, schedule, len(batch)),
        Update(moved, buffers, schedule, len(batch)),
    )
    return compute_scores(chosen, gradient_map, exposure, seed, budget)
