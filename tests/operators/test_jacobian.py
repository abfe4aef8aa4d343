import pytest
import torch
from torch import nn
from torch.autograd.functional import jacobian

from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.operators import (
    AngularJacobian,
    BatchJacobian,
    FunctionJacobian,
    SampleJacobian,
    UpdateJacobian,
    last_layer,
)
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch, LocalSchedule

SHAPE = (2, 6, 6)


def network(batch_norm: bool = False, activation: type[nn.Module] = nn.Sigmoid) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(3)] if batch_norm else []
    layers = [nn.Conv2d(2, 3, 3, padding=1), *norm, activation(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(27, 4))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    return model


def problem(statistics="running", soft=False, batch_norm=False, activation=nn.Sigmoid):
    gradient_map = GradientMap(network(batch_norm, activation), batch_norm=statistics)
    params = {name: value.double() for name, value in gradient_map.params.items()}
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, *SHAPE, generator=generator, dtype=torch.float64)
    targets = torch.tensor([0, 3, 1, 1])
    if soft:
        targets = torch.rand(4, 4, generator=generator, dtype=torch.float64).softmax(1)
    return gradient_map, params, Batch(inputs, targets)


def brute_force(function, inputs: torch.Tensor) -> torch.Tensor:
    """(P, N) by reverse mode, one output at a time: independent of the operators."""
    return jacobian(function, inputs).reshape(-1, inputs.numel())


def assert_matches(operator, dense: torch.Tensor) -> None:
    """Both products and the dense form against (S, P, N)."""
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(dense.shape[0], dense.shape[2], generator=generator).to(dense)
    u = torch.randn(dense.shape[0], dense.shape[1], generator=generator).to(dense)
    scale = dense.abs().max()
    tolerance = {"rtol": 0, "atol": float(1e-10 * scale * dense.shape[1])}
    torch.testing.assert_close(operator.matvec(v), (dense @ v[..., None])[..., 0], **tolerance)
    expected = (dense.transpose(1, 2) @ u[..., None])[..., 0]
    torch.testing.assert_close(operator.rmatvec(u), expected, **tolerance)
    torch.testing.assert_close(operator.to_dense(), dense, **tolerance)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.ReLU])
def test_sample_jacobian_equals_brute_force_of_each_sample(soft, batch_norm, activation):
    gradient_map, params, batch = problem("running", soft, batch_norm, activation)

    def dense_of(i: int) -> torch.Tensor:
        target = batch.targets[i : i + 1]
        return brute_force(
            lambda x: ravel(gradient_map(params, Batch(x, target))), batch.inputs[i : i + 1]
        )

    operator = SampleJacobian(gradient_map, params, batch)
    assert_matches(operator, torch.stack([dense_of(i) for i in range(4)]))
    gradients = [ravel(gradient_map(params, batch[i : i + 1])) for i in range(4)]
    torch.testing.assert_close(operator.value, torch.stack(gradients))


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_batch_jacobian_equals_brute_force(statistics):
    gradient_map, params, batch = problem(statistics, batch_norm=True)
    dense = brute_force(
        lambda x: ravel(gradient_map(params, Batch(x, batch.targets))), batch.inputs
    )
    assert_matches(BatchJacobian(gradient_map, params, batch), dense[None])


def test_given_statistics_enter_the_batch_jacobian():
    gradient_map, params, batch = problem(batch_norm=True)
    given = gradient_map.statistics(params, batch.inputs + 1)
    dense = brute_force(
        lambda x: ravel(gradient_map(params, Batch(x, batch.targets), given)), batch.inputs
    )
    assert_matches(BatchJacobian(gradient_map, params, batch, given), dense[None])
    assert not torch.allclose(
        BatchJacobian(gradient_map, params, batch).to_dense(), dense[None], rtol=1e-3
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_update_jacobian_equals_brute_force_of_local_training(momentum):
    gradient_map, params, batch = problem()
    schedule = LocalSchedule(0.2, 3, 2, momentum=momentum, weight_decay=0.01)
    dense = brute_force(
        lambda x: (
            -ravel(local_update(gradient_map, params, Batch(x, batch.targets), schedule)) / 0.2
        ),
        batch.inputs,
    )
    assert_matches(UpdateJacobian(gradient_map, params, batch, schedule), dense[None])


def test_one_plain_step_over_all_samples_is_the_batch_jacobian():
    gradient_map, params, batch = problem()
    update = UpdateJacobian(gradient_map, params, batch, LocalSchedule(0.3, 1, 4))
    torch.testing.assert_close(
        update.to_dense(), BatchJacobian(gradient_map, params, batch).to_dense()
    )


def test_angular_jacobian_is_the_jacobian_of_the_direction():
    gradient_map, params, batch = problem()
    operator = SampleJacobian(gradient_map, params, batch)

    def direction(x: torch.Tensor) -> torch.Tensor:
        gradient = ravel(gradient_map(params, Batch(x, batch.targets[:1])))
        return gradient / gradient.norm()

    dense = brute_force(direction, batch.inputs[:1])
    angular = AngularJacobian(operator, operator.value)
    torch.testing.assert_close(angular.to_dense()[0], dense)
    assert_matches(angular, angular.to_dense())


def test_a_zero_gradient_has_no_angular_jacobian():
    gradient_map, params, batch = problem()
    operator = SampleJacobian(gradient_map, params, batch)
    with pytest.raises(ValueError, match="must not be zero"):
        AngularJacobian(operator, torch.zeros_like(operator.value))


def test_float32_stays_float32_and_is_close():
    gradient_map, params, batch = problem()
    narrow = SampleJacobian(
        gradient_map,
        {name: value.float() for name, value in params.items()},
        Batch(batch.inputs.float(), batch.targets),
    ).to_dense()
    wide = SampleJacobian(gradient_map, params, batch).to_dense()
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-6)


def test_products_are_counted():
    operator = FunctionJacobian(lambda x: x**2, torch.ones(3, 5))
    operator.gram(torch.ones(3, 5))
    assert operator.products == 2


def test_integer_inputs_are_refused():
    gradient_map, params, batch = problem()
    integers = Batch(batch.inputs.long(), batch.targets)
    with pytest.raises(ValueError, match=r"floating-point.*int64"):
        SampleJacobian(gradient_map, params, integers)


def test_a_wrong_shape_is_refused():
    operator = FunctionJacobian(lambda x: x**2, torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"\(3, 5\)"):
        operator.matvec(torch.ones(3, 4))


def test_a_missing_second_derivative_is_named():
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.out = nn.Linear(72, 8), nn.Linear(16, 4)

        def forward(self, x):
            z = self.linear(x.flatten(1)).reshape(-1, 4, 2)
            # The double backward of cdist is not implemented in torch.
            return self.out(torch.cdist(z, z.sin()).flatten(1))

    gradient_map = GradientMap(Distances())
    batch = Batch(torch.randn(2, *SHAPE), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        SampleJacobian(gradient_map, gradient_map.params, batch)


def test_last_layer_is_its_share_of_the_whole_jacobian():
    gradient_map, params, batch = problem(batch_norm=True)
    operator = SampleJacobian(gradient_map, params, batch)
    share = operator.last_layer()
    # The linear layer's weight and bias come last.
    assert share.num_outputs == 4 * 27 + 4
    torch.testing.assert_close(share.value, operator.value[:, -share.num_outputs :])
    assert_matches(share, operator.to_dense()[:, -share.num_outputs :])


def test_last_layer_goes_by_the_owner_of_the_last_parameter():
    assert last_layer(["a.weight", "b.weight", "b.bias"]) == ("b.weight", "b.bias")
    assert last_layer(["weight", "bias"]) == ("weight", "bias")
