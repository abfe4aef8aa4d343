"""BatchNorm without side effects against ``nn.BatchNorm``, and statistics from buffers."""

import copy

import pytest
import torch
from torch import nn

from flwr_leakage.normalization import (
    StatelessBatchNorm,
    capture_batch_norm_inputs,
    derive_statistics,
    statistics_of,
    without_side_effects,
)

LAYERS = {
    "2d": (lambda: nn.BatchNorm2d(3, eps=1e-3, momentum=0.3), (4, 3, 2, 2)),
    "1d": (lambda: nn.BatchNorm1d(3), (5, 3)),
    "1d sequence": (lambda: nn.BatchNorm1d(3), (2, 3, 4)),
    "without affine": (lambda: nn.BatchNorm2d(3, affine=False), (4, 3, 2, 2)),
    "without running": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 2, 2)),
}


def _layer(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make().double()
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    if layer.track_running_stats:
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return layer, 2 + 3 * torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("mode", ["batch", "running"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_output_is_that_of_torchs_layer_and_nothing_is_written(name, mode):
    layer, inputs = _layer(name)
    if mode == "running" and not layer.track_running_stats:
        with pytest.raises(ValueError, match="use batch_norm='batch'"):
            StatelessBatchNorm(layer, mode)
        return
    stateless = without_side_effects(layer, mode)
    before = {key: value.clone() for key, value in stateless.state_dict().items()}
    expected = copy.deepcopy(layer).train(mode == "batch")(inputs)
    for training in (True, False):
        torch.testing.assert_close(stateless.train(training)(inputs), expected)
    assert all(torch.equal(value, before[key]) for key, value in stateless.state_dict().items())


def _network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(),
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3, momentum=0.5)),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 2), nn.BatchNorm1d(2),
    ).double()  # fmt: skip


INPUTS = torch.randn(3, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_the_copy_keeps_names_and_the_original_is_untouched():
    network = _network()
    stateless = without_side_effects(network, "batch")
    assert list(stateless.state_dict()) == list(network.state_dict())
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in stateless.modules())
    assert sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()) == 3
    assert network.training
    with torch.no_grad():
        next(stateless.parameters()).zero_()
    assert not torch.equal(next(network.parameters()), next(stateless.parameters()))


def test_a_layer_under_two_names_is_replaced_under_both():
    shared = nn.BatchNorm2d(1, momentum=1.0)
    network = nn.Sequential(shared, nn.ReLU(), shared).double()
    inputs = torch.randn(4, 1, 2, 2, dtype=torch.float64)
    stateless = without_side_effects(network, "batch")
    torch.testing.assert_close(stateless(inputs), copy.deepcopy(network).train()(inputs))


def test_an_unknown_mode_is_refused():
    with pytest.raises((ValueError, TypeError), match="'eval'"):
        without_side_effects(_network(), "eval")


def test_each_layers_input_is_captured_inside_the_context_only():
    stateless = without_side_effects(_network(), "batch")
    with capture_batch_norm_inputs(stateless) as captured:
        stateless(INPUTS)
    assert list(captured) == ["1", "3.1", "7"]
    assert torch.equal(captured["1"], stateless[0](INPUTS))
    first = captured["1"]
    stateless(2 * INPUTS)
    assert captured["1"] is first


def test_statistics_are_mean_and_biased_variance_of_each_channel():
    inputs = {"a": torch.randn(4, 3, 2, 5, dtype=torch.float64), "": torch.randn(6, 2).double()}
    statistics = statistics_of(inputs)
    assert list(statistics) == ["a.running_mean", "a.running_var", "running_mean", "running_var"]
    flat = inputs["a"].transpose(0, 1).reshape(3, -1)
    torch.testing.assert_close(statistics["a.running_mean"], flat.mean(1))
    torch.testing.assert_close(statistics["a.running_var"], flat.var(1, unbiased=False))
    torch.testing.assert_close(statistics["running_mean"], inputs[""].mean(0))


def _buffers(network):
    return {name: value.clone() for name, value in network.named_buffers()}


def _layer_inputs(network, inputs):
    stateless = without_side_effects(network, "batch")
    with capture_batch_norm_inputs(stateless) as captured:
        stateless(inputs)
    return dict(captured)


def test_one_steps_statistics_are_derived_exactly():
    network = _network().eval()
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    before, layer_inputs = _buffers(network), _layer_inputs(network, INPUTS)
    network(INPUTS)
    shapes_only = {name: torch.zeros_like(value) for name, value in layer_inputs.items()}
    derived = derive_statistics(network, before, _buffers(network), 1, shapes_only)
    exact = statistics_of(layer_inputs)
    assert derived.keys() == exact.keys()
    for name, value in exact.items():
        assert derived[name].dtype == value.dtype
        torch.testing.assert_close(derived[name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0, 1])
def test_several_steps_give_the_exponentially_weighted_mean(momentum):
    layer = nn.BatchNorm2d(2, momentum=momentum).double()
    layer.running_mean.fill_(5.0)
    before = _buffers(layer)
    steps = [torch.randn(3, 2, 2, 2, dtype=torch.float64) + i for i in range(4)]
    for inputs in steps:
        layer(inputs)
    weights = torch.tensor([(1 - momentum) ** (3 - i) for i in range(4)], dtype=torch.float64)
    weights /= weights.sum()
    derived = derive_statistics(layer, before, _buffers(layer), 4, {"": steps[0]})
    for name in ("running_mean", "running_var"):
        each = torch.stack([statistics_of({"": inputs})[name] for inputs in steps])
        torch.testing.assert_close(derived[name], weights @ each, rtol=1e-10, atol=1e-10)


def test_a_variance_that_noise_made_negative_is_zero():
    layer = nn.BatchNorm1d(1)
    after = _buffers(layer) | {"running_var": torch.tensor([-1.0])}
    derived = derive_statistics(layer, _buffers(layer), after, 1, {"": torch.zeros(3, 1)})
    assert derived["running_var"].item() == 0


@pytest.mark.parametrize("momentum", [None, 0.0])
def test_a_momentum_that_hides_the_statistics_is_refused(momentum):
    layer = nn.BatchNorm1d(2, momentum=momentum)
    with pytest.raises(ValueError, match=f"momentum.*got {momentum}"):
        derive_statistics(layer, _buffers(layer), _buffers(layer), 1, {"": torch.zeros(3, 2)})


def test_withheld_buffers_are_refused_by_name():
    layer = nn.BatchNorm1d(2)
    after = _buffers(layer)
    del after["running_var"]
    with pytest.raises(ValueError, match="'running_var' must be sent and returned"):
        derive_statistics(layer, _buffers(layer), after, 1, {"": torch.zeros(3, 2)})
