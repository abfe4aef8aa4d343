import pytest
import torch
from scored import small_network

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch


@pytest.fixture
def gradient_map() -> GradientMap:
    return GradientMap(small_network())


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(torch.rand(4, 1, 6, 6, generator=generator), torch.tensor([0, 3, 1, 1]))


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
