"""What the gradient of an image does not see."""

import torch
from torch import nn

from flwr_leakage.records import Batch, InputSpec
from simulations.benchmarks.attacks_unseen import find_unseen

SPEC = InputSpec((3, 4, 4), 3, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


def sample():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(1, *SPEC.shape, generator=generator)
    return Batch(SPEC.normalize(images), torch.tensor([1]))


def test_a_pooling_network_sees_the_means_only():
    torch.manual_seed(0)
    pool = nn.AvgPool2d(2)
    found = find_unseen(nn.Sequential(pool, nn.Flatten(), nn.Linear(12, 3)), sample(), SPEC)
    assert found.count == 3 * 16 - 3 * 4
    assert found.change < 1e-6
    means = pool(sample().inputs.double())
    torch.testing.assert_close(pool(found.plausible), means)
    assert not torch.allclose(found.plausible, sample().inputs.double(), atol=1e-2)


def test_of_an_image_that_is_seen_whole_nothing_is_made_up():
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(48, 6), nn.Sigmoid(), nn.Linear(6, 3)
    found = find_unseen(nn.Sequential(*layers), sample(), SPEC)
    assert found.count == 0
    torch.testing.assert_close(found.plausible, sample().inputs.double(), rtol=0, atol=1e-6)
