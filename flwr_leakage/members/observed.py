"""Test records for membership in the update that a server observed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.members.verdict import (
    STATISTICS,
    Correction,
    Membership,
    Statistic,
    examine,
)
from flwr_leakage.records import Batch, InputSpec, Observation, ThreatModel

Records = Tensor | Batch
"""Records: inputs (N, C, H, W) as the model takes them, or token ids (N, T) of texts; a ``Batch``
if their labels are known. A model of the next token has the ids as labels."""


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
    optimizer: str = "SGD",
) -> Membership:
    """Return the test of records for membership in the update that a server observed.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        spec: the public facts about the inputs.
        observation: the server's view of the update.
        records: the records in question.
        null: records that cannot be members, from the same distribution.
        null_origin: the source of the null records in words, for the result.
        statistics: the names of the statistics that may be used; see :func:`membership`.
        correction: the correction of p-values for the number of records.
        noise_std: the standard deviation of a defense's noise on the entries of the gradient;
            ``None`` if it is not known.
        seed: the seed of random draws, if the test repeats the round on null records.
        optimizer: the class name of the client's optimizer, such as ``SGD`` or ``Adam``, by which
            such a repetition trains.
    """
    threat = ThreatModel(view="aggregate" if observation.members else "single")
    # A model may draw from torch's global generator, so that its state is restored.
    with torch.random.fork_rng(devices=[]):
        problem = pose(gradient_map, spec, observation, threat)
        both = isinstance(records, Batch) and isinstance(null, Batch)
        generator = torch.Generator().manual_seed(seed)
        return examine(
            problem,
            _as_batch(records, spec, generator),
            _as_batch(null, spec, generator),
            labelled=both or spec.next_token,
            null_origin=null_origin,
            statistics=statistics,
            correction=correction,
            noise_std=noise_std,
            seed=seed,
            mixed=observation.update.mixed,
            optimizer=optimizer,
        )


def _as_batch(records: Records, spec: InputSpec, generator: torch.Generator) -> Batch:
    """Return records as a batch on the CPU, with contiguous inputs, as many models need for
    ``view``. Unknown labels are drawn at random; they serve only to repeat the round on records
    that are no members. In a model of the next token, the labels are the token ids.
    """
    if isinstance(records, Batch):
        records = records.to(torch.device("cpu"))
        return Batch(records.inputs.contiguous(), records.targets)
    inputs = records.cpu().contiguous()
    if spec.next_token:
        return Batch(inputs, inputs)
    return Batch(inputs, torch.randint(spec.num_classes, (len(records),), generator=generator))
