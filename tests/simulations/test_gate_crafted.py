"""A gate's score is of the weights that the server sent: docs/threat-model.md says what follows."""

import pytest
import torch

from flwr_leakage.data import embedded_mnist
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import pixel
from flwr_leakage.records import Batch
from simulations.benchmarks import gate_crafted
from simulations.benchmarks.gate_server import SPEC, Server, make_network


@pytest.mark.parametrize("network", ["MLP", "ConvNet"])
def test_a_server_that_shrinks_gradients_passes_a_limit_of_their_norm_and_reads_digits(network):
    train_set, test_set = embedded_mnist()
    public, private = (_small(each, 256) for each in (train_set, test_set))
    server = Server(make_network(network), public)
    gradient_map = GradientMap(server.model.eval())
    params = server.crafts(gradient_map.params)
    policy = gate_crafted.Policy(
        "norm", "gradient_norm", gate_crafted.GradientNorm(), 10.0, clients=8
    )
    assert policy.limit == 10.0
    for craft, passing in (("enlarged", 0), ("shrunk", 8)):
        exposures = policy.exposures(gradient_map, params[craft], private)
        passed = [each for each in exposures if policy.passes(gradient_map, each)]
        assert len(passed) == passing
    found = [server.read(params["shrunk"], each.released.delta) for each in passed]
    truth = [SPEC.denormalize(each.private.inputs) for each in passed]
    read = [_nearest(candidates, images) for candidates, images in zip(found, truth, strict=True)]
    assert (torch.cat(read) > gate_crafted.READ_DB).float().mean() > 0.5


def _nearest(candidates, images):
    """PSNR of the candidate nearest to each image."""
    return torch.stack([pixel.psnr(candidates, x[None].expand_as(candidates)).max()
                        for x in images])  # fmt: skip


def _small(digits, count):
    batch = digits.batch(torch.arange(count))
    pixels = digits.spec.denormalize(batch.inputs)
    small = torch.nn.functional.avg_pool2d(pixels, 2)
    return Batch(SPEC.normalize(small), batch.targets)
