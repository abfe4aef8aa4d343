import pytest
import torch
from attacked import observe, tiny_network
from torch import nn

from flwr_leakage.attacks.feature_recursion import (
    FeatureRecursion,
    Use,
    arrange,
    binary_columns,
    feature_distance,
    solve_features,
)
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ResNet8
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel


def residual_network(seed=0):
    torch.manual_seed(seed)
    network = ResNet8((3, 8, 8), 4, width=32)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.normal_(module.running_mean, 0, 0.1)
    return GradientMap(network)


def attack(gradient_map, observations, spec):
    generator = torch.Generator().manual_seed(0)
    return FeatureRecursion()(gradient_map, spec, observations, ThreatModel(), generator)


def test_other_networks_and_batches_fail_in_words_while_the_others_go_on():
    spec = InputSpec((3, 8, 8), 4, (0.5,) * 3, (0.25,) * 3)
    gradient_map = residual_network()
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batch = Batch(images, torch.tensor([1, 2]))
    schedule = LocalSchedule(0.1, batch_size=2)
    two = observe(gradient_map, batch, schedule)
    one = observe(gradient_map, batch[:1], LocalSchedule(0.1))
    failed, solved = attack(gradient_map, [two, one], spec)
    assert failed.batch is None
    assert "one sample" in failed.error
    assert solved.error == ""
    flat = GradientMap(tiny_network(activation=nn.ReLU))
    spec = InputSpec((1, 8, 8), 4)
    observation = observe(flat, Batch(torch.randn(1, 1, 8, 8), torch.tensor([0])), LocalSchedule(1))
    (failed,) = attack(flat, [observation], spec)
    assert "3×3" in failed.error


@pytest.mark.parametrize("count", [4, 9])
def test_binary_columns_are_found_in_a_product(count):
    generator = torch.Generator().manual_seed(count)
    masks = (torch.rand(60, count, generator=generator) > 0.5).double()
    patches = torch.randn(count, 40, generator=generator, dtype=torch.float64)
    found = binary_columns(masks @ patches + 1e-7 * torch.randn(60, 40), count)
    assert sorted(map(tuple, found.T.tolist())) == sorted(map(tuple, masks.T.tolist()))


def test_masks_without_full_rank_are_refused():
    masks = torch.ones(10, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="rank 2"):
        binary_columns(masks @ torch.randn(2, 5, dtype=torch.float64), 2)


def test_shuffled_patches_are_put_in_their_places():
    image = torch.rand(1, 5, 3, 3, generator=torch.Generator().manual_seed(0))
    patches = torch.nn.functional.unfold(image, 3, padding=1)[0].T.reshape(9, 5, 3, 3)
    shuffled = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    order = arrange(patches[shuffled])
    assert shuffled[order].tolist() == list(range(9))


def test_features_solve_the_equations_of_a_convolution_even_with_a_wrong_channel():
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(1, 3, 6, 6, generator=generator, dtype=torch.float64)
    errors = torch.randn(1, 12, 3, 3, generator=generator, dtype=torch.float64)
    weight = torch.zeros(12, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    outputs = torch.nn.functional.conv2d(features, weight, stride=2, padding=1)
    gradient = torch.autograd.grad(outputs, weight, errors)[0]
    shortcut_errors = torch.randn(1, 12, 3, 3, generator=generator, dtype=torch.float64)
    point = torch.zeros(12, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    shortcut = torch.nn.functional.conv2d(features, point, stride=2)
    point_gradient = torch.autograd.grad(shortcut, point, shortcut_errors)[0]
    uses = [
        Use("conv", 0, features.shape[1:], outputs, ((3, 3), 1, 1, 2)),
        Use("shortcut", 0, features.shape[1:], shortcut, ((1, 1), 1, 0, 2)),
    ]
    wrong = errors.clone()
    wrong[0, 4, 1, 1] += 1.0
    gradients = [gradient, point_gradient]
    found = solve_features(uses, [wrong, shortcut_errors], gradients, 1e-6)
    torch.testing.assert_close(found, features)
    with pytest.raises(ValueError, match="determine"):
        solve_features(uses, [torch.zeros_like(errors), shortcut_errors], gradients, 1e-6)


def test_an_inactive_output_asks_only_for_a_preactivation_that_is_not_positive():
    known = torch.tensor([0.0, 0.0, 2.0])
    assert float(feature_distance(torch.tensor([-3.0, 1.0, 1.0]), known)) == pytest.approx(2 / 4)
