"""The limit that a gradient sets, against networks whose answer is known."""

import torch
from torch import nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec
from simulations.benchmarks import lab, limits

SPEC = InputSpec((3, 6, 6), 4, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


def limit(network):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(1, *SPEC.shape, generator=generator)
    sample = Batch(SPEC.normalize(images), torch.tensor([1]))
    return limits.linearised_limit(network, SPEC, sample, lab.observe(GradientMap(network), sample))


def test_what_a_pooling_network_averages_is_not_told():
    torch.manual_seed(0)
    found = limit(nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(27, 4)))
    assert (found.told, found.unknowns) == (27, 108)
    assert found.psnr < 30


def test_a_layer_that_takes_the_image_tells_all_of_it_and_a_sketch_says_the_same(monkeypatch):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(108, 20), nn.Sigmoid(), nn.Linear(20, 4))
    sketched = limit(network)
    monkeypatch.setattr(limits, "SURPLUS", 1000)
    whole = limit(network)
    assert whole.told == sketched.told == 108
    assert whole.psnr > 100
    assert abs(whole.psnr - sketched.psnr) < 3
