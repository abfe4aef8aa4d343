"""Test records for membership in one call, without Flower."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks.one_call import Gradients, ParameterChange, as_observation
from flwr_leakage.attacks.problem import pose, require_arguments
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.losses import Loss
from flwr_leakage.members.verdict import (
    STATISTICS,
    Correction,
    Membership,
    Statistic,
    examine,
    refuse_embeddings,
)
from flwr_leakage.normalization import BatchNormMode, mode_of
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, ThreatModel

Records = Tensor | Batch
"""Inputs (N, C, H, W) as the model takes them, with labels where these are known."""


def membership(
    model: nn.Module,
    update: Gradients | ParameterChange,
    records: Records,
    *,
    spec: InputSpec,
    null: Records | None,
    num_examples: int,
    null_origin: str = "given",
    schedule: LocalSchedule | None = None,
    statistics: Sequence[Statistic] = STATISTICS,
    correction: Correction = "holm",
    noise_std: float | None = None,
    members: Sequence[int] = (),
    loss: Loss = F.cross_entropy,
    batch_norm: BatchNormMode | None = None,
    seed: int = 0,
) -> Membership:
    """Test whether each record was among the samples behind an update.

    Args:
        model: the network; gradients belong to its present parameters.
        update: gradients, or parameters before and after.
        records: the records in question.
        spec: input shape, classes and normalisation.
        null: records that cannot be members, drawn like the records in question: p-values are
            calibrated as far as they are. The server's own test data serve.
        num_examples: samples behind the update.
        null_origin: where the null comes from, in words, for the result.
        schedule: of local training; one step of all samples by default. Parameters before and
            after need it.
        statistics: which may be used: ``row_space``, and with labels ``gradient_cosine``,
            ``gradient_difference`` and ``loss``.
        correction: for the number of records: ``holm`` or ``benjamini_hochberg``.
        noise_std: σ of a defense's noise on the entries of the gradient, where it is known.
        members: examples of each client, where the update is the mean of several clients'.
        loss: of the client.
        batch_norm: whether the client normalised with ``batch`` or ``running`` statistics; that of
            the model's own mode by default.
        seed: of the draws of a rehearsal.

    Returns:
        p-values, the evidence, and the reason in words; ``print`` shows them.

    Raises:
        ValueError: there is no null, or fewer than 20 records of it; shapes differ from the spec;
            the model takes token ids; the update is not of this model, or zero everywhere.

    Example:
        A linear model's update after one step holds the inputs of the step.

        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        >>> images, labels = torch.randn(203, 1, 8, 8), torch.arange(203) % 10
        >>> value = F.cross_entropy(model(images[:2]), labels[:2])
        >>> gradients = torch.autograd.grad(value, model.parameters())
        >>> result = membership(
        ...     model, gradients, images[:3], spec=InputSpec((1, 8, 8), 10), null=images[3:],
        ...     num_examples=2,
        ... )
        >>> result.evidence, result.is_exact.tolist()
        ('exact', [True, True, False])
    """
    require_arguments(spec, num_examples)
    if null is None:
        raise ValueError(
            "null must hold records that cannot be members, such as the server's own test data: "
            "without them a statistic has no p-value."
        )
    refuse_embeddings(model)
    gradient_map = GradientMap(model, loss, batch_norm or mode_of(model))
    seen = as_observation(gradient_map, update, num_examples, schedule, None, 0, tuple(members))
    return examine_observation(
        gradient_map,
        spec,
        seen,
        records,
        null,
        null_origin=null_origin,
        statistics=statistics,
        correction=correction,
        noise_std=noise_std,
        seed=seed,
    )


def examine_observation(
    gradient_map: GradientMap,
    spec: InputSpec,
    observation: Observation,
    records: Records,
    null: Records,
    *,
    null_origin: str = "given",
    statistics: Sequence[Statistic] = STATISTICS,
    correction: Correction = "holm",
    noise_std: float | None = None,
    seed: int = 0,
) -> Membership:
    """Test records for membership in what a server observed; see :func:`membership`."""
    threat = ThreatModel(view="aggregate" if observation.members else "single")
    with torch.random.fork_rng(devices=[]):  # a model may draw from the global generator
        problem = pose(gradient_map, spec, observation, threat)
        labelled = isinstance(records, Batch) and isinstance(null, Batch)
        generator = torch.Generator().manual_seed(seed)
        return examine(
            problem,
            _as_batch(records, spec.num_classes, generator),
            _as_batch(null, spec.num_classes, generator),
            labelled=labelled,
            null_origin=null_origin,
            statistics=statistics,
            correction=correction,
            noise_std=noise_std,
            seed=seed,
        )


def _as_batch(records: Records, num_classes: int, generator: torch.Generator) -> Batch:
    """Return records on the CPU with labels; unknown ones are drawn, for a rehearsal only."""
    if isinstance(records, Batch):
        return records.to(torch.device("cpu"))
    return Batch(records.cpu(), torch.randint(num_classes, (len(records),), generator=generator))
