import torch
from attacked import observe
from torch import nn

from flwr_leakage.attacks import pose
from flwr_leakage.attacks.exact.chain import IDENTITY, features_of, trace_chain
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))


def chain_of(*layers):
    network = nn.Sequential(*layers)
    for module in network:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, -1.5, -0.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)
    gradient_map = GradientMap(network)
    image = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    observation = observe(gradient_map, Batch(image, torch.tensor([2])), LocalSchedule(1.0))
    problem = pose(gradient_map, SPEC, observation, ThreatModel()).to(torch.float64)
    logits = gradient_map.logits(problem.params, image.double(), problem.buffers)
    return trace_chain(problem), image.double(), logits, problem


def test_two_batch_norms_in_a_row_are_folded_into_one():
    torch.manual_seed(0)
    conv = nn.Conv2d(1, 4, 3, 2, bias=False)
    norms = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=True)
    chain, image, logits, _ = chain_of(conv, *norms, nn.Sigmoid(), nn.Flatten(), nn.Linear(36, 4))
    torch.testing.assert_close(features_of(chain, image), logits)
    assert chain[-1].activation is IDENTITY


def test_links_own_the_gradients_of_their_parameters():
    torch.manual_seed(0)
    chain, image, _, problem = chain_of(
        nn.Conv2d(1, 4, 3, 2, bias=False),
        nn.BatchNorm2d(4),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(36, 4),
    )
    first, last = chain
    assert torch.equal(first.weight_gradient, problem.gradient["0.weight"])
    assert torch.equal(last.bias_gradient, problem.gradient["4.bias"])
    errors = last.pull_back(last.bias_gradient[None]).reshape(1, 4, 3, 3)
    errors = errors * first.activation.slope(first.outputs(image)) * first.scale.reshape(-1, 1, 1)
    torch.testing.assert_close(errors.sum((0, 2, 3)), first.bias_gradient, rtol=0, atol=1e-7)
    patches = first.patches(image)
    torch.testing.assert_close(
        errors[0].flatten(1) @ patches.T, first.weight_gradient.flatten(1), rtol=0, atol=1e-6
    )


def test_tracing_draws_nothing_from_the_shared_random_stream():
    torch.manual_seed(0)
    chain, _, _, problem = chain_of(nn.Flatten(), nn.Linear(64, 4))
    before = torch.get_rng_state()
    trace_chain(problem)
    assert torch.equal(torch.get_rng_state(), before)
    assert chain[0].geometry is None
