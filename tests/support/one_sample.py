"""A network of which few last units are on, and what a server sees of its one sample."""

import torch
from attacked import observe
from torch import nn

from flwr_leakage.attacks import AttackJob, GaussNewton, pose
from flwr_leakage.attacks.inversion.annealing import Annealing
from flwr_leakage.attacks.inversion.likelihood import Likelihood, estimate_noise
from flwr_leakage.attacks.whole_batch.one_sample import OneSample
from flwr_leakage.defenses.pruning import GradientPruning
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, ThreatModel, Update
from flwr_leakage.spectral.image_prior import ImagePrior

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))


def images(count=1, seed=0):
    prior = ImagePrior.of(SPEC).single()
    draws = torch.randn(count, *SPEC.shape, generator=torch.Generator().manual_seed(seed))
    return Batch(SPEC.clamp(prior.inputs(draws)), torch.arange(count) % 4)


def network(seed=0, bias=True):
    """Few units of its last ReLU are on, as in a trained network."""
    torch.manual_seed(seed)
    second = nn.Conv2d(6, 12, 3, padding=1)
    second.bias.data -= 0.25
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), second, nn.ReLU()),
        *(nn.Flatten(), nn.Linear(12 * 64, 4, bias=bias)),
    )


def hidden(pooled=True, bias=True):
    """A head of two linear layers, behind pooling as tutorials write it."""
    torch.manual_seed(0)
    pool = [nn.MaxPool2d(2)] if pooled else []
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), *pool, nn.Flatten()),
        *(nn.Linear(6 * (16 if pooled else 64), 20, bias=bias), nn.ReLU(), nn.Linear(20, 4)),
    )


def noisy(delta, share=1e-2):
    generator = torch.Generator().manual_seed(1)
    size = share * ravel(delta).square().mean().sqrt()
    return {k: v + size * torch.randn(v.shape, generator=generator) for k, v in delta.items()}


def pruned(delta):
    update = Update(delta, {}, LocalSchedule(1.0), 1)
    return GradientPruning(0.9).on_update(update, Reproducible.from_seed(0)).delta


def posed(model, batch, change=lambda delta: delta, schedule=None):
    gradient_map = GradientMap(model)
    schedule = schedule or LocalSchedule(1.0, batch_size=len(batch))
    seen = observe(gradient_map, batch, schedule)
    update = Update(change(seen.update.delta), {}, schedule, len(batch))
    seen = Observation(1, 0, seen.params, seen.buffers, update)
    problem = pose(gradient_map, SPEC, seen, ThreatModel()).to(torch.float64)
    return gradient_map, seen, problem


def equations(problem):
    likelihood = Likelihood.of([problem.gradient], estimate_noise(problem))
    return OneSample()(problem, likelihood, torch.Generator().manual_seed(0))


def refused(model, batch, **settings):
    gradient_map, seen, _ = posed(model, batch, **settings)
    attack = GaussNewton((Annealing(),), steps=1, rewriting=OneSample())
    (result,) = attack(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
    assert result.batch is not None
    return result.stats["equations"]
