from dataclasses import replace

import pytest
import torch
from attacked import observe, tiny_network
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob, one_call
from flwr_leakage.attacks.exact.feature_equations import solve_features
from flwr_leakage.attacks.exact.feature_fit import (
    equation_distance,
    feature_distance,
    noise_images,
    read_input,
)
from flwr_leakage.attacks.exact.feature_recursion import FeatureRecursion
from flwr_leakage.attacks.exact.last_mask import arrange, binary_columns, disjoint_columns
from flwr_leakage.attacks.exact.recover_features import (
    Features,
    above_zero,
    recover_features,
    repaired,
)
from flwr_leakage.attacks.exact.relu_walk import ReluWalk, Use
from flwr_leakage.attacks.exact.weight_equations import Whitened
from flwr_leakage.attacks.network.calls import Geometry
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ConvNet, ResNet8
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
    return FeatureRecursion()(AttackJob(gradient_map, spec, observations, ThreatModel()))


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


def test_a_last_layer_of_as_many_positions_as_channels_is_refused_in_words():
    torch.manual_seed(0)
    gradient_map = GradientMap(ResNet8((3, 32, 32), 4, width=16).eval())
    spec = InputSpec((3, 32, 32), 4)
    observation = observe(
        gradient_map, Batch(torch.randn(1, 3, 32, 32), torch.tensor([0])), LocalSchedule(1)
    )
    (failed,) = attack(gradient_map, [observation], spec)
    assert "64 masks, one for each position, as they span all of its 64 channels" in failed.error


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


def layer(generator, features, outputs=12, noise=0.0):
    """Two convolutions of stride 2 that take in features, the outputs' errors, noisy gradients."""
    uses, errors, gradients = [], [], []
    for kernel, padding in ((3, 1), (1, 0)):
        weight = torch.zeros(outputs, 3, kernel, kernel, dtype=torch.float64, requires_grad=True)
        found = torch.nn.functional.conv2d(features, weight, stride=2, padding=padding)
        errors.append(torch.randn(found.shape, generator=generator, dtype=torch.float64))
        (gradient,) = torch.autograd.grad(found, weight, errors[-1])
        spread = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        gradients.append(gradient + noise * spread)
        geometry = Geometry.of(kernel, 1, padding, 2)
        uses.append(Use("", 0, features.shape[1:], found, geometry))
    return uses, errors, gradients


def some_features(generator, size=6):
    return torch.rand(1, 3, size, size, generator=generator, dtype=torch.float64)


def test_features_solve_the_equations_of_a_convolution_even_with_a_wrong_channel():
    generator = torch.Generator().manual_seed(0)
    features = some_features(generator)
    uses, errors, gradients = layer(generator, features)
    wrong = errors[0].clone()
    wrong[0, 4, 1, 1] += 1.0
    found = solve_features(uses, [wrong, errors[1]], gradients)
    torch.testing.assert_close(found.values, features)
    assert found.contradicted == ((0, 4),)
    few = solve_features(uses, [torch.zeros_like(wrong), errors[1]], gradients)
    assert not few.equations.is_determined
    with pytest.raises(ValueError, match="determine"):
        solve_features(uses, [torch.zeros_like(error) for error in errors], gradients)


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_channel_is_told_among_hardly_more_equations_than_features(seed):
    # 10 · (9 + 1) equations for 64 features: 20 for 16, thrice, and 40 for 16.
    generator = torch.Generator().manual_seed(seed)
    features = some_features(generator, size=8)
    uses, errors, gradients = layer(generator, features, 10, 1e-9)
    wrong = errors[0].clone()
    wrong[0, 4, 1, 1] += 0.3
    found = solve_features(uses, [wrong, errors[1]], gradients)
    assert found.contradicted == ((0, 4),)
    truth = features[0].flatten(1).T
    torch.testing.assert_close(
        found.equations.rows @ truth, found.equations.values, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("noise", [1e-9, 1e-3])
def test_the_noise_of_features_is_measured(noise):
    generator = torch.Generator().manual_seed(1)
    features = some_features(generator)
    found = solve_features(*layer(generator, features, 64, noise))
    ratio = (found.values - features) / found.noise
    assert float(ratio.std()) == pytest.approx(1.0, abs=0.25)
    assert not found.contradicted


def test_a_small_feature_is_told_from_a_zero_by_the_noise_that_was_measured():
    generator = torch.Generator().manual_seed(2)
    features = some_features(generator)
    features[features < 0.4] = 0.0
    for noise, size in ((1e-10, 3e-8), (1e-4, 3e-2)):
        features[0, 1, 2, 3] = size
        found = solve_features(*layer(generator, features, 32, noise))
        assert torch.equal(above_zero(found) > 0, features > 0)


def test_noise_of_one_sign_is_no_feature():
    generator = torch.Generator().manual_seed(2)
    found = solve_features(*layer(generator, some_features(generator), 32, 1e-4))
    positive = replace(found, values=5 * found.noise.expand_as(found.values))
    assert not above_zero(positive).any()
    assert above_zero(replace(found, values=3 * positive.values)).all()


def masked_channel(generator):
    patches = torch.randn(27, 16, generator=generator, dtype=torch.float64)
    mask = torch.rand(16, generator=generator) > 0.5
    closed, opened = torch.randn(2, 16, generator=generator, dtype=torch.float64)
    gradient = patches @ torch.where(mask, opened, closed)
    return (gradient, patches, closed, opened, 1e-9), mask


def test_wrong_entries_of_a_mask_are_set_right_by_the_gradient_before_it():
    channel, mask = masked_channel(torch.Generator().manual_seed(3))
    wrong = mask.clone()
    wrong[[2, 5]] = ~wrong[[2, 5]]
    assert torch.equal(repaired(wrong, *channel), mask)
    assert torch.equal(repaired(mask, *channel), mask)
    gradient, *rest = channel
    assert repaired(wrong, gradient + 0.1, *rest) is None


@pytest.mark.parametrize("rate", [0.01, 0.003])
def test_features_are_right_where_rounding_on_the_wire_makes_masks_wrong_at_first(rate):
    gradient_map = residual_network(1)
    spec = InputSpec((3, 8, 8), 4, (0.5,) * 3, (0.25,) * 3)
    image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    observation = observe(gradient_map, Batch(image, torch.tensor([1])), LocalSchedule(rate))
    problem = pose(gradient_map, spec, observation, ThreatModel()).to(torch.float64)
    found = recover_features(problem)
    assert found.repaired
    assert "repaired" in str(found)
    walk = ReluWalk(problem, image.double())
    for number, values in found.outputs.items():
        truth = walk.preactivations[number].clamp_min(0)
        assert float((values - truth).norm()) < 20 * found.noise[number] * float(truth.norm())


def test_an_inactive_output_asks_only_for_a_preactivation_that_is_not_positive():
    known = torch.tensor([0.0, 0.0, 2.0])
    assert float(feature_distance(torch.tensor([-3.0, 1.0, 1.0]), known)) == pytest.approx(2 / 4)


def test_equations_ask_for_the_directions_that_they_determine_alone():
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.6, 0.8]])
    outputs = torch.tensor([[2.0, 3.0, 4.0]])
    known = Whitened(rows, rows @ outputs.T, torch.ones(2))
    shape = (1, 1, 1, 3)
    assert float(equation_distance(outputs.reshape(shape), known)) == pytest.approx(0, abs=1e-12)
    elsewhere = (outputs + torch.tensor([0.0, 0.8, -0.6])).reshape(shape)
    assert float(equation_distance(elsewhere, known)) == pytest.approx(0, abs=1e-12)
    closed = torch.tensor([-1.0, 3.0, 4.0]).reshape(shape)
    assert float(equation_distance(closed, known)) == pytest.approx(4 / (4 + 25))


def test_layers_count_by_their_noise_and_the_nearest_is_fitted_first():
    layers = {number: torch.ones(1, 1, 2, 2) for number in (1, 2, 3)}
    noise = {1: 1e-4, 2: 1e-6, 3: float("nan"), 9: 1e-9}
    known = Features(layers, {}, noise)
    assert [known.weight(number) for number in layers] == pytest.approx([1e-4, 1.0, 1e-4])
    parts = [sorted(part.outputs) for part in known.beginnings(2)]
    assert parts == [[1], [1, 2], [2]]
    partly = replace(known, equations={0: Whitened(torch.eye(4), torch.ones(4, 1), torch.ones(4))})
    first, *others = partly.beginnings(2)
    assert (list(first.outputs), list(first.equations)) == ([], [0])
    assert [(sorted(part.outputs), part.equations) for part in others] == [([1], {}), ([1, 2], {})]


def pooling_network(width=96, pool_after=(1, 2), strides=(1, 1)):
    torch.manual_seed(0)
    network = ConvNet((3, 18, 18), 4, width, (1, 1), strides, pool_after)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.normal_(module.weight, 0, 1)
    return network.eval()


POOLED_SPEC = InputSpec((3, 18, 18), 4, (0.5,) * 3, (0.25,) * 3)


def smooth_image(seed=0):
    return POOLED_SPEC.normalize(noise_images(POOLED_SPEC, 1, torch.Generator().manual_seed(seed)))


def observe_pooled(network):
    batch = Batch(smooth_image(), torch.tensor([2]))
    return observe(GradientMap(network), batch, LocalSchedule(0.1))


def test_features_are_read_through_max_pooling_up_to_the_second():
    network = pooling_network()
    gradient_map, observation = GradientMap(network), observe_pooled(network)
    problem = pose(gradient_map, POOLED_SPEC, observation, ThreatModel()).to(torch.float64)
    found = recover_features(problem)
    expected = network.double().features[:4](smooth_image().double())
    assert found.windows == {0: (3, 3), 1: (3, 3)}
    assert list(found.outputs) == [found.shallowest] == [0]
    assert found.is_pooled
    torch.testing.assert_close(found.outputs[0], expected, rtol=1e-3, atol=1e-4)


def test_a_hidden_layer_behind_upsampled_maxima_starts_a_recursion_through_three_poolings():
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(24, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(576, 16), nn.ReLU(), nn.Linear(16, 4)),
    )
    spec = InputSpec((3, 8, 8), 4)
    image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    gradient_map = GradientMap(network)
    observation = observe(gradient_map, Batch(image, torch.tensor([2])), LocalSchedule(0.1))
    found = recover_features(pose(gradient_map, spec, observation, ThreatModel()).to(torch.float64))
    for number, end in ((0, 3), (1, 6)):
        expected = network.double()[:end](image.double())
        torch.testing.assert_close(found.outputs[number], expected, rtol=1e-3, atol=1e-5)


def test_an_image_is_recovered_where_maxima_are_all_that_the_last_layer_takes_in():
    network = pooling_network(pool_after=(2,), strides=(3, 1))
    (found,) = attack(GradientMap(network), [observe_pooled(network)], POOLED_SPEC)
    assert found.error == ""
    seen = (..., slice(17), slice(17))  # by a stride of 3
    torch.testing.assert_close(found.batch.inputs[seen], smooth_image()[seen], rtol=0, atol=1e-3)
    assert found.batch.targets.tolist() == [2]


def test_an_image_is_told_roughly_through_two_poolings():
    network = pooling_network()
    solver = FeatureRecursion(synthetic=50, smoothed_iterations=40, rounds=1)
    targets = [observe_pooled(network)]
    (found,) = solver(AttackJob(GradientMap(network), POOLED_SPEC, targets, ThreatModel()))
    error = (found.batch.inputs - smooth_image()).square().mean()
    assert error < 0.1 * smooth_image().square().mean()


def test_too_few_channels_behind_max_pooling_are_refused():
    network = pooling_network(width=16)
    (failed,) = attack(GradientMap(network), [observe_pooled(network)], POOLED_SPEC)
    assert "rank 36" in failed.error


@pytest.mark.parametrize("pooling", [nn.MaxPool2d(3, 2), nn.MaxPool2d(3, padding=1)])
def test_windows_that_overlap_or_reach_over_the_border_are_refused(pooling):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 96, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(96, 96, 3, padding=1),
        nn.ReLU(),
        pooling,
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    network(torch.zeros(1, 3, 18, 18))
    (failed,) = attack(GradientMap(network), [observe_pooled(network)], POOLED_SPEC)
    assert "windows that do not overlap" in failed.error


def test_max_pooling_that_the_last_layer_does_not_take_in_as_it_is_is_refused():
    features = pooling_network().features
    network = nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 4))
    (failed,) = attack(GradientMap(network.eval()), [observe_pooled(network)], POOLED_SPEC)
    assert "the last layer takes in" in failed.error


@given(
    st.integers(0, 10**6),
    st.integers(2, 6),
    st.integers(0, 12),
)
@settings(deadline=None)
@example(1, 4, 1)  # what HiGHS' presolve calls infeasible
def test_disjoint_columns_are_found_among_other_directions(seed, count, others):
    generator = torch.Generator().manual_seed(seed)
    size = 14 * (count + others)
    masks = torch.nn.functional.one_hot(torch.arange(size) % count)[
        torch.randperm(size, generator=generator)
    ].double()
    scales = torch.randn(size, generator=generator, dtype=torch.float64)
    scales[torch.rand(size, generator=generator) < 0.1] = 0.0
    scales[0] = 1e-4  # too small to tell anything in the search
    nuisance = torch.randn(size, others, generator=generator, dtype=torch.float64)
    space = torch.cat([masks * scales[:, None], nuisance], 1)
    basis = torch.linalg.svd(space, full_matrices=False)[0]
    found = disjoint_columns(basis, scales, count)
    expected = masks * (scales != 0)[:, None]
    assert sorted(map(tuple, found.T.tolist())) == sorted(map(tuple, expected.T.tolist()))


def test_columns_that_are_not_in_the_space_are_not_invented():
    basis = torch.linalg.qr(torch.randn(40, 4, dtype=torch.float64))[0]
    with pytest.raises(ValueError, match="4 masks were sought"):
        disjoint_columns(basis, torch.ones(40, dtype=torch.float64), 4)


def test_a_start_is_read_from_features_that_tell_the_input_linearly():
    def averages(inputs):
        return torch.nn.functional.avg_pool2d(inputs, 3)

    image = smooth_image(1)
    generator = torch.Generator().manual_seed(3)
    found = read_input(averages, averages(image), POOLED_SPEC, 50, generator, ridge=1e-6)
    assert found.shape == image.shape
    grey = POOLED_SPEC.normalize(torch.full_like(image, 0.5))
    assert (found - image).square().mean() < 0.25 * (grey - image).square().mean()
    with pytest.raises(ValueError, match="at least 1"):
        read_input(averages, averages(image), POOLED_SPEC, 0, generator)
    with pytest.raises(ValueError, match="pixels"):
        read_input(averages, torch.zeros(1, 3, 40, 40), POOLED_SPEC, 1, generator)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rounds", 0, "rounds must be at least 1, got 0"),
        ("iterations", 0, "iterations must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        FeatureRecursion(**{name: value})


@pytest.mark.parametrize(
    ("layers", "shape", "words"),
    [
        (
            [nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU()],
            (1, 8, 8),
            "the network has GroupNorm, whose statistics are the sample's own",
        ),
        ([nn.Flatten(1, 2), nn.Conv1d(8, 4, 3), nn.ReLU()], (1, 8, 8), "two-dimensional"),
    ],
)
def test_a_layer_that_it_does_not_take_is_named(layers, shape, words):
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))
    images = torch.rand(1, *shape)
    F.cross_entropy(model(images), torch.tensor([1])).backward()
    update = tuple(parameter.grad for parameter in model.parameters())
    found = one_call.attack(model, update, spec=InputSpec(shape, 3), preset="feature_recursion")
    assert words in found.error
