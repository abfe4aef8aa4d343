"""Score the samples of a batch in one call, from a notebook or any training script."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage._conf import load_part
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.losses import Loss
from flwr_leakage.normalization import BatchNormMode, mode_of
from flwr_leakage.operators import Budget
from flwr_leakage.params import Params, add
from flwr_leakage.per_sample import differentiable
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, Exposure, LocalSchedule, Update
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.compute import compute_scores
from flwr_leakage.scores.gradient_norm import GradientNorm
from flwr_leakage.scores.influence_krylov_bound import InfluenceKrylovBound
from flwr_leakage.scores.inputs import as_batch
from flwr_leakage.scores.lambda_max import LambdaMax
from flwr_leakage.scores.model_mode import mode_warnings
from flwr_leakage.scores.result import Scores

Samples = Any
"""Inputs or targets of samples: a tensor, a NumPy array, or a list of numbers or of equally shaped
tensors or arrays."""


class ScoreWarning(UserWarning):
    """The warning that risk scores leave out a part of a model in train mode, such as dropout.

    The scores then describe another function than the one that is trained.
    """


def default_scores() -> dict[str, Score]:
    """Return the scores of ``conf/score/default.yaml``, by name, which are cheap enough for every
    round.
    """
    return {
        "gradient_norm": GradientNorm(),
        "lambda_max": LambdaMax(tolerance=2e-2),
        "influence_krylov_bound": InfluenceKrylovBound(),
    }


def score(
    model: nn.Module,
    inputs: Samples,
    targets: Samples,
    scores: Mapping[str, Score] | Sequence[Score | str] | None = None,
    *,
    loss: Loss = F.cross_entropy,
    batch_norm: BatchNormMode | None = None,
    trained: Iterable[nn.Parameter] | None = None,
    perturbation: Mapping[str, Tensor] | None = None,
    noise_std: float = 0.0,
    schedule: LocalSchedule | None = None,
    budget: Budget | None = None,
    seed: int = 0,
) -> Scores:
    """Return risk scores of every sample of a batch; the model is not changed.

    The scored function is the one that is trained: BatchNorm is in the model's mode, only
    parameters that require a gradient count, and the loss keeps its own reduction. If scores leave
    out parts of the training, mostly dropout, a ``ScoreWarning`` says so, and so do ``notes`` of
    the result and the note of every sample.

    A perturbation δ of the update counts as the perturbation δ/wᵢ of sample i's own gradient, with
    wᵢ the sample's weight in the update: 1/B for a mean over B samples. The result's ``notes`` name
    wᵢ.

    Args:
        model: any module whose gradient is differentiable; it returns logits, or an output that has
            them as ``logits``.
        inputs: (B, C, H, W), normalised as the model expects; a tensor, an array or a list.
        targets: (B,) class indices or (B, K) probabilities; a tensor, an array or a list.
        scores: the scores by name, or a sequence of scores, which are named by their classes;
            ``default_scores()`` if ``None``. An entry of a sequence may be a name that
            ``flwr-leakage list score`` prints, such as ``"lavp"``.
        loss: (logits, targets) ↦ scalar; a mean or a sum over the samples, weighted or not.
        batch_norm: ``batch`` for a client that trains in train mode, ``running`` for one in eval
            mode; ``None`` for the present mode of the model's BatchNorm layers.
        trained: the parameters that the client's optimizer holds, such as
            ``model.head.parameters()``; by default all that require a gradient.
        perturbation: the perturbation δ that a defense adds to the pseudo-gradient of the whole
            update, keyed as the model's parameters.
        noise_std: the standard deviation of Gaussian noise that is added to every entry of the
            pseudo-gradient of the whole update.
        schedule: the schedule of the local training; one step over the whole batch if ``None``.
        budget: the limit on the cost of all scores together; ``None`` for no limit.
        seed: the seed of all random draws, ≥ 0.

    Returns:
        The result of each score under its name, in order. It has the values, notes, unit and
        direction of the score's main quantity, and the other quantities under their names. A score
        that failed has no values, and the reason as ``error`` and as the note of every sample.
        Printed, all results are one table.

    Raises:
        ValueError: ``noise_std`` is negative or not finite, ``perturbation`` has other keys than
            the model's parameters, an entry of ``scores`` is no score, inputs or targets are no
            arrays, the loss is no scalar, the model's output has no logits, or its BatchNorm layers
            are in different modes.
    """
    if not 0 <= noise_std < math.inf:
        raise ValueError(f"noise_std must be finite and ≥ 0, got {noise_std}.")
    chosen = default_scores() if scores is None else scores
    if not isinstance(chosen, Mapping):
        chosen = _by_name([chosen] if isinstance(chosen, str) else chosen)
    for entry in chosen.values() if isinstance(chosen, Mapping) else chosen:
        if not isinstance(entry, Score) or isinstance(entry, type):
            raise ValueError(f"scores must hold scores such as GradientNorm(), got {entry!r}.")
    mode = mode_of(model) if batch_norm is None else batch_norm
    gradient_map = GradientMap(model, loss, mode, trained)
    params, buffers = gradient_map.params, gradient_map.buffers
    if perturbation is not None and perturbation.keys() != params.keys():
        raise ValueError(
            f"perturbation must have the entries {sorted(params)} of the model's parameters, "
            f"got {sorted(perturbation)}."
        )
    batch = as_batch(inputs, targets, next(iter(params.values())))
    warned = mode_warnings(model, mode, gradient_map, batch)
    for text in warned:
        warnings.warn(text, ScoreWarning, stacklevel=2)
    gradient_map = differentiable(gradient_map, params, buffers, batch)
    schedule = schedule or LocalSchedule(1.0, 1, max(1, len(batch)))
    delta = _trained(gradient_map, batch, schedule)
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
    return compute_scores(chosen, gradient_map, exposure, seed, budget, warnings=warned)


def _by_name(entries: Iterable[Score | str]) -> list[Score]:
    """Return a list of scores in which each name, such as ``lavp``, is replaced by the scores that
    the file of that name in ``conf/score`` configures.
    """
    named = (
        load_part("score", entry).values() if isinstance(entry, str) else [entry]
        for entry in entries
    )  # fmt: skip
    return [score for scores in named for score in scores]


def _trained(gradient_map: GradientMap, batch: Batch, schedule: LocalSchedule) -> Params:
    """Return the change of the parameters by local training. The change is zero if training fails
    or its result is not finite; each score then reports the cause itself.
    """
    params, buffers = gradient_map.params, gradient_map.buffers
    try:
        change = local_update(gradient_map, params, batch, schedule, buffers)
    except (RuntimeError, IndexError):
        change = {}
    if change and all(bool(value.isfinite().all()) for value in change.values()):
        return {name: value.detach() for name, value in change.items()}
    return {name: torch.zeros_like(value) for name, value in params.items()}
