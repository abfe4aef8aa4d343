"""Directions that a gradient does not determine, against the dense Jacobian."""

import pytest
import torch
from scored import make_exposure, measure_all
from torch import nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import SampleJacobian
from flwr_leakage.records import Batch
from flwr_leakage.scores import UnseenDirections


def relu_network() -> GradientMap:
    """Few units, of which ReLU turns off some: an image is not determined."""
    torch.manual_seed(3)
    layers = [nn.Conv2d(1, 2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)]
    return GradientMap(nn.Sequential(*layers))


def dense_ranks(gradient_map, batch):
    params = {name: value.double() for name, value in gradient_map.params.items()}
    inputs = Batch(batch.inputs.double(), batch.targets)
    dense = SampleJacobian(gradient_map, params, inputs).to_dense()
    return torch.linalg.matrix_rank(dense, rtol=1e-9).tolist()


def images(size=10):
    draw = torch.Generator().manual_seed(2)
    return Batch(torch.randn(4, 1, size, size, generator=draw), torch.arange(4))


@pytest.mark.parametrize("conf", ["relu", "sigmoid"])
def test_it_is_what_the_dense_jacobian_lacks(conf, gradient_map, batch):
    data = (relu_network(), images()) if conf == "relu" else (gradient_map, batch)
    (found,) = measure_all([UnseenDirections()], data[0], make_exposure(*data))
    size = data[1].inputs[0].numel()
    expected = [size - rank for rank in dense_ranks(*data)]
    assert list(found.values) == expected
    assert found.unit == "input directions"
    if conf == "relu":
        assert min(expected) > 0


def test_the_gradient_stays_the_same_along_them():
    gradient_map, batch = relu_network(), images()
    params = {name: value.double() for name, value in gradient_map.params.items()}
    sample = Batch(batch.inputs[:1].double(), batch.targets[:1])
    dense = SampleJacobian(gradient_map, params, sample).to_dense()[0]
    unseen = torch.linalg.svd(dense).Vh[-1].reshape(sample.inputs.shape)
    (found,) = measure_all([UnseenDirections()], gradient_map, make_exposure(gradient_map, batch))
    assert found.values[0] > 0
    moved = Batch(sample.inputs + 1e-4 * unseen, sample.targets)
    here, there = (gradient_map(params, each) for each in (sample, moved))
    assert max(float((here[name] - there[name]).abs().max()) for name in here) < 1e-12


def test_too_few_products_give_a_bound(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch)
    (found,) = measure_all([UnseenDirections(max_products=10)], gradient_map, exposure)
    assert found.values == (None,) * 4
    assert found.notes[0] == "unresolved: at most 26 (random rows)"
    assert found.products == 40 + 4  # those of the check of second derivatives


def test_single_precision_is_refused(gradient_map, batch):
    exposure = make_exposure(gradient_map, batch)
    (found,) = measure_all([UnseenDirections(precision="float32")], gradient_map, exposure)
    assert "float64" in found.notes[0]
