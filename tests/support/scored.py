"""A small network, and a round of a client whose defense adds noise."""

import torch
from torch import nn

from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.records import Batch, Exposure, LocalSchedule, Measurement, Update
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.compute import compute_scores


def measure(
    score: Score, gradient_map: GradientMap, exposure: Exposure, seed: int = 0
) -> list[Measurement]:
    """One score on its own."""
    return score(ClientSamples(gradient_map, exposure), seed)


def measure_all(scores, gradient_map, exposure, *args, **kwargs) -> list[Measurement]:
    """The measurements of all scores of one call, in order."""
    results = compute_scores(scores, gradient_map, exposure, *args, **kwargs)
    return [measured for result in results.values() for measured in result]


def small_network(batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(3)] if batch_norm else []
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, 2, 1), *norm, nn.Sigmoid(), nn.Flatten(), nn.Linear(27, 4)
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def make_exposure(
    gradient_map: GradientMap,
    batch: Batch,
    schedule: LocalSchedule | None = None,
    noise_std: float = 0.0,
    defended: Batch | None = None,
) -> Exposure:
    """A round of a client whose defense adds noise to the pseudo-gradient."""
    schedule = schedule or LocalSchedule(0.1, 1, len(batch))
    defended = defended or batch
    params, buffers = gradient_map.params, gradient_map.buffers
    delta = local_update(gradient_map, params, defended, schedule, buffers)
    generator = torch.Generator().manual_seed(5)
    moved = {
        k: v - schedule.learning_rate * noise_std * torch.randn(v.shape, generator=generator)
        for k, v in delta.items()
    }
    raw, released = (Update(d, buffers, schedule, len(batch)) for d in (delta, moved))
    return Exposure(params, buffers, batch, defended, raw, released)
