"""Every network: shapes, published parameter counts, second derivatives, torch.func."""

import pytest
import torch
from torch import nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import (
    MLP,
    VGG9,
    AlexNet,
    ConvNet,
    LeNet,
    Linear,
    ResNet8,
    ResNet18,
    ResNet34,
    ResNet50,
    ResNet101,
    ResNet152,
    ShuffleNet,
    ShuffleNetV2,
)
from flwr_leakage.models.shufflenet import shuffle_channels
from flwr_leakage.records import Batch

CIFAR = (3, 32, 32)
SMALL_CONVNET = {
    "width": 16,
    "channel_multipliers": (1, 2, 2),
    "strides": (1, 2, 2),
    "pool_after": (),
    "use_batch_norm": False,
}

NETWORKS = {
    "linear": (Linear, {}),
    "mlp": (MLP, {"hidden_features": [64, 32], "activation": "softplus"}),
    "lenet": (LeNet, {}),
    "convnet": (ConvNet, {"width": 4}),
    "convnet_small": (ConvNet, SMALL_CONVNET),
    "alexnet": (AlexNet, {"hidden_features": 32, "width": 8}),
    "vgg9": (VGG9, {"hidden_features": 32, "width": 8}),
    "vgg9_bn": (VGG9, {"hidden_features": 32, "use_batch_norm": True}),
    "resnet8": (ResNet8, {"width": 4}),
    "resnet18": (ResNet18, {"width": 4, "width_factor": 2}),
    "resnet18_plain": (ResNet18, {"width": 4, "skip_connections": False}),
    "resnet50": (ResNet50, {"width": 2}),
    "shufflenet": (ShuffleNet, {"groups": 1}),
    "shufflenet_v2": (ShuffleNetV2, {"stage_channels": (8, 16, 32), "last_channels": 16}),
}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("shape", [CIFAR, (1, 28, 28)], ids=["cifar", "mnist"])
def test_logits_have_one_row_a_sample(name, shape):
    make, settings = NETWORKS[name]
    model = make(shape, 7, **settings).eval()
    inputs = torch.rand(3, *shape)
    logits = model(inputs)
    assert logits.shape == (3, 7)
    torch.testing.assert_close(model(inputs[1:2]), logits[1:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # DLG's layers: 3·12·25 + 12, then 12·12·25 + 12 each, then 12·8·8·10 + 10.
        (lambda: LeNet(CIFAR, 10), 912 + 3 * 3612 + 7690),
        (lambda: LeNet(CIFAR, 10, num_convolutions=3), 15_826),
        (lambda: LeNet((1, 28, 28), 10), 312 + 3 * 3612 + 5890),
        (lambda: Linear(CIFAR, 10), 30_730),
        # The count of torchvision-style CIFAR ResNet-18s, as often published (11.17 M).
        (lambda: ResNet18(CIFAR, 10), 11_173_962),
        # FedMA's VGG-9 (3.49 M).
        (lambda: VGG9(CIFAR, 10), 3_491_530),
        # torchvision's ShuffleNet v2 × 1.0 and × 0.5 on ImageNet; the stride of the stem has none.
        (lambda: ShuffleNetV2(CIFAR, 1000), 2_278_604),
        (lambda: ShuffleNetV2(CIFAR, 1000, (48, 96, 192)), 1_366_792),
        (
            lambda: ConvNet(CIFAR, 10, **SMALL_CONVNET),
            (3 * 9 + 1) * 16 + (16 * 9 + 1) * 32 + (32 * 9 + 1) * 32 + 2048 * 10 + 10,
        ),
    ],
)
def test_parameter_counts(model, expected):
    assert count(model()) == expected


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        # torchvision's counts with 1,000 classes.
        (ResNet34, 21_797_672),
        (ResNet50, 25_557_032),
        (ResNet101, 44_549_160),
        (ResNet152, 60_192_808),
    ],
)
def test_deep_residual_networks_have_the_published_counts(network, expected):
    with torch.device("meta"):
        model = network((3, 224, 224), 1000, stem="large")
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        before = model.pool1(model.conv1(torch.empty(1, 3, 224, 224)))
    assert count(model) == expected and before.shape[2:] == (56, 56)


def test_geiping_convnet_ends_in_36_width_features():
    model = ConvNet(CIFAR, 10, width=2)
    assert model.fc.in_features == 36 * 2
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [2, 4, 4, 8, 8, 8, 8, 8]


def test_width_factor_and_skip_connections_change_what_they_name():
    narrow, wide = ResNet18(CIFAR, 10, width=4), ResNet18(CIFAR, 10, width=4, width_factor=4)
    assert wide.fc.in_features == 4 * narrow.fc.in_features == 4 * 32
    torch.manual_seed(0)
    plain = ResNet8(CIFAR, 10, width=4, skip_connections=False).eval()
    # Without shortcuts, a block whose last BatchNorm is zero blocks everything.
    nn.init.zeros_(plain.blocks[1].bn2.weight)
    first, second = plain(torch.rand(1, *CIFAR)), plain(torch.rand(1, *CIFAR))
    torch.testing.assert_close(first, second)
    skipping = ResNet8(CIFAR, 10, width=4).eval()
    nn.init.zeros_(skipping.blocks[1].bn2.weight)
    assert not torch.allclose(skipping(torch.rand(1, *CIFAR)), skipping(torch.rand(1, *CIFAR)))


@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_map_is_differentiable_and_vmappable(name):
    """What attacks (reverse over reverse) and scores (forward over reverse, vmap) do."""
    make, settings = NETWORKS[name]
    torch.manual_seed(0)
    shape = (1, 28, 28)
    gradient_map = GradientMap(make(shape, 10, **settings).double())
    params = gradient_map.params
    inputs = torch.rand(2, 1, *shape, dtype=torch.float64)
    targets = torch.tensor([[3], [8]])

    def energy(x, y):
        return sum(g.square().sum() for g in gradient_map(params, Batch(x, y)).values()) / 2

    gradients = torch.func.vmap(torch.func.grad(energy))(inputs, targets)
    single = torch.func.grad(energy)(inputs[1], targets[1])
    torch.testing.assert_close(gradients[1], single)
    assert single.abs().max() > 0

    direction = torch.randn(1, *shape, dtype=torch.float64)
    _, slope = torch.func.jvp(lambda x: energy(x, targets[1]), (inputs[1],), (direction,))
    torch.testing.assert_close(slope, (single * direction).sum())


@pytest.mark.parametrize("name", ["convnet", "vgg9_bn", "resnet8", "shufflenet_v2"])
def test_batch_norm_in_train_mode_works(name):
    make, settings = NETWORKS[name]
    gradient_map = GradientMap(make((1, 28, 28), 10, **settings), batch_norm="batch")
    batch = Batch(torch.rand(4, 1, 28, 28), torch.arange(4))
    before = {name: value.clone() for name, value in gradient_map.buffers.items()}
    gradients = gradient_map(gradient_map.params, batch)
    assert all(value.isfinite().all() for value in gradients.values())
    assert all(torch.equal(value, before[name]) for name, value in gradient_map.buffers.items())


def test_probing_the_feature_size_leaves_running_statistics_alone():
    model = ConvNet(CIFAR, 10, width=2)
    statistics = {k: v for k, v in model.named_buffers() if k.endswith("num_batches_tracked")}
    assert statistics and all(value == 0 for value in statistics.values())
    assert model.training and all(module.training for module in model.modules())


def test_shuffle_channels_is_undone_by_the_complementary_shuffle():
    inputs = torch.rand(2, 12, 3, 3)
    shuffled = shuffle_channels(inputs, 3)
    assert not torch.equal(shuffled, inputs)
    torch.testing.assert_close(shuffle_channels(shuffled, 4), inputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LeNet((32, 32), 10), r"input_shape must be positive \(C, H, W\), got \(32, 32\)"),
        (lambda: LeNet(CIFAR, 1), "num_classes must be at least 2, got 1"),
        (lambda: LeNet(CIFAR, 10, activation="reul"), "activation must be one of .*'reul'"),
        (lambda: LeNet(CIFAR, 10, num_convolutions=5), "num_convolutions must lie in 1 … 4, got 5"),
        (lambda: ConvNet((3, 8, 8), 10, width=2), r"input_shape \(3, 8, 8\) is too small"),
        (lambda: ConvNet(CIFAR, 10, strides=(1, 2)), "one entry for each of 8 convolutions"),
        (lambda: ConvNet(CIFAR, 10, pool_after=(9,)), "pool_after must name convolutions 1 … 8"),
        (lambda: ResNet18(CIFAR, 10, width_factor=0), "width_factor must be at least 1, got 0"),
        (lambda: ShuffleNet(CIFAR, 10, groups=5), "groups must be one of .*got 5"),
        (lambda: ShuffleNetV2(CIFAR, 10, (8, 15, 32)), "3 positive even numbers, got .8, 15, 32"),
        (lambda: MLP(CIFAR, 10, hidden_features=[0]), "hidden_features must be at least 1"),
    ],
)
def test_impossible_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_mistyped_setting_is_an_error():
    with pytest.raises(TypeError, match="widht"):
        ResNet18(CIFAR, 10, widht=16)
