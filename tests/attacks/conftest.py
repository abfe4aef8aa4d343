import pytest
import torch
from attacked import observe, tiny_network

from flwr_leakage.attacks import AttackJob
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel


@pytest.fixture
def spec():
    return InputSpec((1, 8, 8), 4, (0.4,), (0.3,))


@pytest.fixture
def gradient_map():
    return GradientMap(tiny_network())


@pytest.fixture
def images(spec):
    generator = torch.Generator().manual_seed(5)
    return spec.normalize(torch.rand(6, *spec.shape, generator=generator))


@pytest.fixture
def one_step():
    return LocalSchedule(learning_rate=0.1)


@pytest.fixture
def observations(gradient_map, images, one_step):
    return [
        observe(
            gradient_map,
            Batch(images[i : i + 1], torch.tensor([i % 4])),
            one_step,
            client_id=i,
        )
        for i in range(3)
    ]


@pytest.fixture
def smooth(spec):
    """An image such as a prior of images expects, and its label."""
    across = torch.linspace(0.1, 0.9, 8)
    image = spec.normalize((across[:, None] * across.sqrt()).reshape(1, *spec.shape))
    return Batch(image, torch.tensor([1]))


@pytest.fixture
def job(gradient_map, spec, smooth, one_step):
    return AttackJob(gradient_map, spec, [observe(gradient_map, smooth, one_step)], ThreatModel())


@pytest.fixture
def grey(spec, smooth):
    return Batch(spec.normalize(torch.full_like(smooth.inputs, 0.5)), smooth.targets)
