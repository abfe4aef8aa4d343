"""The gradient map against autograd, and local training against ``torch.optim.SGD``."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch, LocalSchedule


def _network(with_batch_norm=True):
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(2)] if with_batch_norm else []
    network = nn.Sequential(
        nn.Conv2d(1, 2, 2), *norm, nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return network


def _inputs(count=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 3, 3, dtype=torch.float64, generator=generator)


HARD = torch.tensor([2, 0, 1, 2])
SOFT = torch.tensor([[0.2, 0.3, 0.5], [1, 0, 0], [0.6, 0.4, 0], [0, 0.1, 0.9]]).double()


def _autograd(network, inputs, targets, loss=F.cross_entropy):
    gradients = torch.autograd.grad(
        loss(network(inputs), targets), list(network.parameters()), create_graph=True
    )
    return torch.cat([g.reshape(-1) for g in gradients])


@pytest.mark.parametrize("mode", ["batch", "running"])
@pytest.mark.parametrize("targets", [HARD, SOFT], ids=["hard", "soft"])
def test_the_gradient_is_autograds(mode, targets):
    network = _network()
    gradient_map = GradientMap(network, batch_norm=mode)
    gradient = gradient_map(gradient_map.params, Batch(_inputs(), targets))
    assert list(gradient) == [name for name, _ in network.named_parameters()]
    expected = _autograd(copy.deepcopy(network).train(mode == "batch"), _inputs(), targets)
    torch.testing.assert_close(ravel(gradient), expected, rtol=1e-10, atol=1e-12)


def test_any_loss_of_logits_and_targets_is_taken():
    def squares(logits, targets):
        return ((logits - targets) ** 2).sum()

    network = _network().eval()
    gradient_map = GradientMap(network, squares)
    gradient = gradient_map(gradient_map.params, Batch(_inputs(), SOFT))
    torch.testing.assert_close(ravel(gradient), _autograd(network, _inputs(), SOFT, squares))


def test_soft_targets_are_differentiable():
    gradient_map = GradientMap(_network(False))

    def first_entry(targets):
        return ravel(gradient_map(gradient_map.params, Batch(_inputs(), targets)))[:3]

    assert torch.autograd.gradcheck(first_entry, SOFT.clone().requires_grad_())


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_products_with_the_jacobian_are_those_of_the_dense_one(mode):
    network = _network()
    gradient_map = GradientMap(network, batch_norm=mode)
    reference = copy.deepcopy(network).train(mode == "batch")
    inputs = _inputs()

    def gradient(x):
        return ravel(gradient_map(gradient_map.params, Batch(x, HARD)))

    dense = torch.autograd.functional.jacobian(lambda x: _autograd(reference, x, HARD), inputs)
    dense = dense.reshape(len(dense), -1)
    tangent = _inputs(seed=2)
    _, forward = torch.func.jvp(gradient, (inputs,), (tangent,))
    torch.testing.assert_close(forward, dense @ tangent.reshape(-1), rtol=1e-9, atol=1e-12)
    cotangent = torch.randn(len(dense), dtype=torch.float64)
    _, pull_back = torch.func.vjp(gradient, inputs)
    (backward,) = pull_back(cotangent)
    torch.testing.assert_close(backward.reshape(-1), cotangent @ dense, rtol=1e-9, atol=1e-12)


def test_mapped_over_samples_it_equals_one_by_one():
    gradient_map = GradientMap(_network())
    params, inputs = gradient_map.params, _inputs()

    def one(x, y):
        return ravel(gradient_map(params, Batch(x[None], y[None])))

    together = torch.func.vmap(one)(inputs, HARD)
    each = torch.stack([one(x, y) for x, y in zip(inputs, HARD, strict=True)])
    torch.testing.assert_close(together, each, rtol=1e-10, atol=1e-12)
    mean = ravel(gradient_map(params, Batch(inputs, HARD)))
    torch.testing.assert_close(together.mean(0), mean, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_neither_the_model_nor_the_map_changes(mode):
    network = _network().train()
    before = copy.deepcopy(network.state_dict())
    gradient_map = GradientMap(network, batch_norm=mode)
    own = copy.deepcopy(gradient_map.model.state_dict())
    batch = Batch(_inputs(), HARD)
    gradient_map(gradient_map.params, batch)
    gradient_map.statistics(gradient_map.params, batch.inputs)
    local_update(gradient_map, gradient_map.params, batch, LocalSchedule(0.1, 2, 4))
    for state, kept in ((network.state_dict(), before), (gradient_map.model.state_dict(), own)):
        assert all(torch.equal(value, kept[name]) for name, value in state.items())
    assert network.training
    assert all(p.requires_grad and p.grad is None for p in network.parameters())
    with torch.no_grad():
        network[0].weight.zero_()
    assert gradient_map.params["0.weight"].ne(0).all()


def test_given_statistics_take_the_place_of_the_running_ones():
    batch_map = GradientMap(_network(), batch_norm="batch")
    running_map = batch_map.with_batch_norm("running")
    params, inputs = batch_map.params, _inputs()
    statistics = batch_map.statistics(params, inputs)
    assert sorted(statistics) == ["1.running_mean", "1.running_var"]
    given = running_map.logits(params, inputs, statistics)
    torch.testing.assert_close(given, batch_map.logits(params, inputs), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(given, running_map.logits(params, inputs))


def test_switching_the_mode_leaves_the_map_as_it_was():
    gradient_map = GradientMap(_network(), batch_norm="batch")
    other = gradient_map.with_batch_norm("running")
    assert gradient_map.with_batch_norm("batch") is gradient_map
    assert (gradient_map.batch_norm, other.batch_norm) == ("batch", "running")
    expected = _network().train()(_inputs())
    torch.testing.assert_close(gradient_map.logits(gradient_map.params, _inputs()), expected)


@pytest.mark.parametrize("with_batch_norm", [True, False])
@pytest.mark.parametrize("mode", ["batch", "running"])
def test_samples_depend_on_their_batch_where_batchnorm_takes_its_statistics(with_batch_norm, mode):
    gradient_map = GradientMap(_network(with_batch_norm), batch_norm=mode)
    assert gradient_map.has_batch_norm == with_batch_norm
    assert gradient_map.uses_batch_statistics == (with_batch_norm and mode == "batch")
    batch = Batch(_inputs(), torch.tensor([0, 1, 2, 0]))
    logits = gradient_map.logits(gradient_map.params, batch.inputs)
    alone = gradient_map.logits(gradient_map.params, batch.inputs[:2])
    assert torch.allclose(logits[:2], alone, atol=1e-4) != gradient_map.uses_batch_statistics


def test_a_float64_analysis_of_a_float32_model_needs_no_conversion_of_buffers():
    single = GradientMap(_network().float())
    double = {name: value.double() for name, value in single.params.items()}
    gradient = single(double, Batch(_inputs(), HARD))
    reference = GradientMap(_network().float().double())
    expected = reference(reference.params, Batch(_inputs(), HARD))
    torch.testing.assert_close(ravel(gradient), ravel(expected), rtol=1e-12, atol=1e-14)


class _Shifted(nn.Module):
    """A model with a constant that its ``state_dict`` leaves out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(9, 3)
        self.register_buffer("shift", torch.full((3,), 0.5), persistent=False)

    def forward(self, inputs):
        return self.linear(inputs.flatten(1)) + self.shift


def test_buffers_outside_of_the_state_dict_are_constants_of_the_model():
    network = _Shifted()
    gradient_map = GradientMap(network)
    assert gradient_map.buffers == {}
    inputs = _inputs().float()
    torch.testing.assert_close(gradient_map.logits(gradient_map.params, inputs), network(inputs))
    double = {name: value.double() for name, value in gradient_map.params.items()}
    assert gradient_map.logits(double, _inputs()).dtype == torch.float64


def _train(network, batch, schedule):
    """θ after torch's own SGD over a data loader's mini-batches."""
    optimizer = torch.optim.SGD(
        network.parameters(),
        lr=schedule.learning_rate,
        momentum=schedule.momentum,
        weight_decay=schedule.weight_decay,
    )
    data = torch.utils.data.TensorDataset(batch.inputs, batch.targets)
    loader = torch.utils.data.DataLoader(data, schedule.batch_size)
    parts = [part for _ in range(schedule.num_steps) for part in loader][: schedule.num_steps]
    for inputs, targets in parts:
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), targets).backward()
        optimizer.step()


@pytest.mark.parametrize("mode", ["batch", "running"])
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 7},
        {"batch_size": 3, "num_steps": 7},
        {"batch_size": 5, "num_steps": 5, "momentum": 0.9},
        {"batch_size": 5, "num_steps": 3, "weight_decay": 0.1},
        {"batch_size": 4, "num_steps": 6, "momentum": 0.5, "weight_decay": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("soft", [False, True])
def test_local_training_is_torchs_sgd(mode, settings, soft):
    schedule = LocalSchedule(0.2, **settings)
    labels = torch.arange(7) % 3
    targets = F.one_hot(labels, 3).double() * 0.7 + 0.1 if soft else labels
    batch = Batch(_inputs(7), targets)
    network = _network()
    gradient_map = GradientMap(network, batch_norm=mode)
    sent = gradient_map.params
    trained = copy.deepcopy(network).train(mode == "batch")
    _train(trained, batch, schedule)
    delta = local_update(gradient_map, sent, batch, schedule)
    expected = torch.cat([(p - sent[n]).reshape(-1) for n, p in trained.named_parameters()])
    torch.testing.assert_close(ravel(delta), expected, rtol=1e-9, atol=1e-12)


def test_local_training_uses_given_statistics():
    gradient_map = GradientMap(_network())
    batch, schedule = Batch(_inputs(), HARD), LocalSchedule(0.2, 2, 4)
    given = {"1.running_mean": torch.ones(2).double(), "1.running_var": torch.full((2,), 3.0)}
    network = _network().eval()
    network.load_state_dict({**network.state_dict(), **given})
    expected = local_update(GradientMap(network), gradient_map.params, batch, schedule)
    delta = local_update(gradient_map, gradient_map.params, batch, schedule, given)
    torch.testing.assert_close(ravel(delta), ravel(expected))


def test_local_training_is_differentiable_in_the_inputs():
    gradient_map = GradientMap(_network(), batch_norm="batch")
    schedule = LocalSchedule(0.5, num_steps=3, batch_size=2, momentum=0.5)

    def trained(inputs):
        update = local_update(gradient_map, gradient_map.params, Batch(inputs, HARD[:3]), schedule)
        return ravel(update)[::7]

    # The last mini-batch holds one sample, of four values a channel.
    assert torch.autograd.gradcheck(trained, _inputs(3).requires_grad_())
