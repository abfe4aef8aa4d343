"""Networks whose gradient does not tell the contrast of an image."""

import pytest
import torch
from torch import nn

import flwr_leakage
from flwr_leakage.attacks.contrast import Contrast, largest_factors
from flwr_leakage.attacks.one_call import as_observation
from flwr_leakage.attacks.problem import pose, simulate_rounds
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, ThreatModel
from flwr_leakage.spectral.image_prior import ImagePrior

SPEC = InputSpec((1, 8, 8), 3, (0.5,), (0.25,))


def _network(norm, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1, bias=bias), norm(6), nn.SiLU()),
        *(nn.Conv2d(6, 8, 3, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(128, 3)),
    )


def _groups(channels):
    return nn.GroupNorm(2, channels)


def _seen(network, count):
    """The gradient of some images that reach black and white, and the problem that it poses."""
    torch.manual_seed(1)
    waves = torch.linspace(0, 6, 64).reshape(1, 1, 8, 8) + torch.rand(count, 1, 1, 1)
    pixels = waves.sin() / 2 + 0.5
    low, high = (
        edge(pixels.flatten(1), 1).reshape(-1, 1, 1, 1) for edge in (torch.amin, torch.amax)
    )
    batch = Batch(SPEC.normalize((pixels - low) / (high - low)), torch.arange(count) % 3)
    loss = nn.functional.cross_entropy(network(batch.inputs), batch.targets)
    gradient = torch.autograd.grad(loss, list(network.parameters()))
    gradient_map = GradientMap(network, batch_norm="batch" if network.training else "running")
    seen = as_observation(gradient_map, gradient, count, None, None, 0, ())
    return batch, gradient, pose(gradient_map, SPEC, seen, ThreatModel()).to(torch.float64)


@pytest.mark.parametrize(
    ("norm", "bias", "mode", "count", "unknown"),
    [
        (nn.BatchNorm2d, True, "train", 1, "each"),
        (nn.BatchNorm2d, True, "train", 4, "common"),
        (nn.BatchNorm2d, True, "eval", 4, "none"),
        (_groups, False, "eval", 4, "each"),
        (_groups, True, "eval", 4, "none"),
    ],
)
def test_a_gradient_leaves_open_the_contrast_that_normalisation_removes(
    norm, bias, mode, count, unknown
):
    network = _network(norm, bias).train(mode == "train")
    batch, _, problem = _seen(network, count)
    contrast = Contrast.of(problem)
    assert contrast.unknown == unknown
    assert bool(contrast.note) == (unknown != "none")
    # Grey copies of the images are stretched to the images themselves, unless contrast is told.
    paler = 0.3 * batch.inputs.double()
    prior = ImagePrior.of(SPEC)
    point = prior.coordinates(paler)
    found = prior.inputs(contrast.gauged(prior, point))
    expected = paler if unknown == "none" else batch.inputs.double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    own, other = (simulate_rounds(problem, Batch(x, batch.targets)) for x in (paler, found))
    assert float((own - other).norm()) <= 1e-2 * float(own.norm())


def test_black_and_white_limit_a_factor_and_inputs_at_an_edge_do_not():
    spec = InputSpec((1, 1, 3), 3, (0.0,), (1.0,))
    inputs = torch.tensor([0.5, 0.25, -0.1]).reshape(1, 1, 1, 3)
    assert largest_factors(spec, inputs).tolist() == [2.0]


def test_a_client_that_withholds_its_buffers_hides_no_image_that_reaches_black_and_white():
    network = _network(nn.BatchNorm2d).train()
    batch, gradient, _ = _seen(network, 1)
    found = flwr_leakage.attack(network, gradient, spec=SPEC, preset="gauss_newton_smooth")
    assert float((found.batch.inputs - batch.inputs).square().mean().sqrt()) < 0.02
    assert found.stats["stage"].endswith("contrast assumed")
