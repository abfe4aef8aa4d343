"""Test records for membership in one call, without Flower."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks.one_call import Gradients, ParameterChange, as_observation
from flwr_leakage.attacks.problem import require_arguments
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.losses import Loss
from flwr_leakage.members.statistics import STATISTICS, Statistic
from flwr_leakage.members.verdict import (
    Correction,
    Membership,
    Records,
    examine_observation,
    require_text_spec,
)
from flwr_leakage.normalization import BatchNormMode, mode_of
from flwr_leakage.records import InputSpec, LocalSchedule


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
    mixed: bool = False,
    optimizer: str = "SGD",
    seed: int = 0,
) -> Membership:
    """Return a test of whether each record was among the samples behind an update.

    Args:
        model: the network; gradients are taken to be those at its present parameters.
        update: gradients, or the parameters before and after training.
        records: the records in question.
        spec: the shape, classes and normalisation of the inputs.
        null: records that cannot be members, from the same distribution as the records in question,
            such as the server's own test data. The p-values compare records with them.
        num_examples: the number of samples behind the update.
        null_origin: the source of the null records in words, for the result.
        schedule: the schedule of local training; one step of all samples by default. It is required
            for parameters before and after.
        statistics: the names of the statistics that may be used: ``row_space``, and with labels
            ``outer_product``, ``gradient_likelihood``, ``gradient_cosine``, ``gradient_difference``
            and ``loss``.
        correction: the correction of p-values for the number of records: ``holm`` or
            ``benjamini_hochberg``.
        noise_std: the standard deviation of a defense's noise on the entries of the gradient;
            ``None`` if it is not known.
        members: the number of samples of each client, if the update is the mean of several clients'
            updates; else empty.
        loss: the client's loss.
        batch_norm: whether the client normalised with ``batch`` or ``running`` statistics; by
            default the model's mode decides.
        mixed: whether the client states that it trained on mixtures of its records, as by MixUp.
            The evidence is then ``statistical`` at most.
        optimizer: name of the client's optimizer in ``torch.optim``, such as ``Adam``, which a
            rehearsal (a repetition of the round on null records) uses, too; the schedule has its
            learning rate, momentum and weight decay. On another than SGD the evidence is
            ``statistical`` at most.
        seed: the seed of a rehearsal's draws.

    Returns:
        The p-values, the strength of the evidence, and the reason in words; ``print`` shows them.

    Raises:
        ValueError: there are fewer than 20 null records; shapes differ from the spec; the model
            takes token ids, and the spec is one of images; the update is not of this model, or zero
            everywhere; the optimizer is none that a rehearsal repeats.

    Example:
        The update of a linear model after one step contains the inputs of the step.

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
    require_text_spec(model, spec)
    gradient_map = GradientMap(model, loss, batch_norm or mode_of(model))
    seen = as_observation(gradient_map, update, num_examples, schedule, None, 0, tuple(members))
    seen = replace(seen, update=replace(seen.update, mixed=mixed))
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
        optimizer=optimizer,
    )
