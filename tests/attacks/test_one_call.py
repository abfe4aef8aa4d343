import inspect
import warnings
from functools import partial

import pytest
import torch
from attacked import tiny_network
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import LBFGS, GradientInversion
from flwr_leakage.attacks.one_call import ParameterChange, attack
from flwr_leakage.records import InputSpec, LocalSchedule

SOLVER = GradientInversion(optimizer=LBFGS(iterations=150, tolerance=1e-12))


def loss_gradients(network, images, labels):
    loss = F.cross_entropy(network(images), labels)
    return torch.autograd.grad(loss, list(network.parameters()))


def test_gradients_as_a_tuple_a_mapping_and_a_list(spec, images):
    network = tiny_network()
    gradients = loss_gradients(network, images[:1], torch.tensor([3]))
    named = dict(zip(dict(network.named_parameters()), gradients, strict=True))
    single = attack(network, gradients, spec=spec, preset=SOLVER)
    both = attack(network, [gradients, named], spec=spec, preset=SOLVER)
    for result in (single, *both):
        assert result.batch.targets.tolist() == [3]
        assert float((result.batch.inputs - images[:1]).abs().max()) < 0.05


def test_parameters_before_and_after(spec, images):
    network = tiny_network()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(network(images[:1]), torch.tensor([2])).backward()
        optimizer.step()
    change = ParameterChange(before, network.state_dict())
    with pytest.raises(ValueError, match="schedule"):
        attack(tiny_network(), change, spec=spec, preset=SOLVER)
    result = attack(
        tiny_network(7),
        change,
        spec=spec,
        preset=SOLVER,
        schedule=LocalSchedule(0.1, num_steps=2),
        targets=torch.tensor([2]),
    )
    assert float((result.batch.inputs - images[:1]).abs().max()) < 0.05


def _train(network, inputs, labels):
    before = {k: v.clone() for k, v in network.state_dict().items()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    F.cross_entropy(network(inputs), labels).backward()
    optimizer.step()
    return before, network.state_dict()


def test_the_servers_step_is_undone(spec, images):
    before, after = _train(tiny_network(), images[:1], torch.tensor([2]))
    stepped = {k: before[k] + 0.5 * (after[k] - before[k]) for k in before}
    quick = GradientInversion(optimizer=LBFGS(iterations=20), batching="loop", dtype="float64")
    settings = {"spec": spec, "preset": quick, "schedule": LocalSchedule(0.1)}
    changes = [ParameterChange(before, after), ParameterChange(before, stepped, 0.5)]
    client, server = (attack(tiny_network(), change, **settings) for change in changes)
    torch.testing.assert_close(client.batch.inputs, server.batch.inputs, atol=1e-2, rtol=0)
    with pytest.raises(ValueError, match="server_learning_rate must be positive"):
        ParameterChange(before, after, 0.0)


def test_rounds_of_the_same_samples_give_one_reconstruction(spec, images):
    inputs, labels = images[:2], torch.tensor([0, 3])
    changes = [ParameterChange(*_train(tiny_network(seed), inputs, labels)) for seed in (1, 2)]
    schedule = LocalSchedule(0.1, batch_size=2)
    settings = {"spec": spec, "preset": SOLVER, "schedule": schedule, "num_examples": 2}
    (joint,) = attack(tiny_network(), changes, same_samples=True, **settings)
    (alone,) = attack(tiny_network(), changes[1:], **settings)

    def error(result):
        order = [0, 1] if result.batch.targets.tolist() == [0, 3] else [1, 0]
        return float((result.batch.inputs[order] - inputs).square().mean())

    assert joint.objective < 1e-3
    assert error(joint) < error(alone)


def test_the_mean_of_two_clients_is_replayed_client_by_client(spec, images):
    gradients = [
        loss_gradients(tiny_network(), images[i : i + 1], torch.tensor([i])) for i in range(2)
    ]
    mean = tuple((a + 3 * b) / 4 for a, b in zip(*gradients, strict=True))
    result = attack(
        tiny_network(),
        mean,
        spec=spec,
        preset=SOLVER,
        num_examples=4,
        members=(1, 3),
        targets=torch.tensor([0, 1]),
        schedule=LocalSchedule(0.1, batch_size=1),
    )
    assert result.objective < 1e-4
    assert float((result.batch.inputs - images[:2]).abs().max()) < 0.3


def test_a_preset_by_name_and_wrong_lengths(spec, images):
    network = tiny_network()
    gradients = loss_gradients(network, images[:1], torch.tensor([0]))
    assert attack(network, gradients, spec=spec, preset="idlg").batch is not None
    with pytest.raises(ValueError, match="4 gradients"):
        attack(network, gradients[:2], spec=spec, preset=SOLVER)
    with pytest.raises(ValueError, match="one tensor"):
        attack(network, gradients, spec=spec, preset=SOLVER, targets=[torch.tensor([0])] * 2)


def test_an_update_is_neither_a_tensor_nor_a_list_of_tensors(spec, images):
    network = tiny_network()
    gradients = loss_gradients(network, images[:1], torch.tensor([0]))
    unchecked = inspect.unwrap(attack)  # as users call it, without the tests' type checker
    with pytest.raises(ValueError, match=r"got a list of Tensor; the gradients of one .* tuple"):
        unchecked(network, list(gradients), spec=spec, preset=SOLVER)
    with pytest.raises(ValueError, match=r"update must be a tuple of gradients.* got Tensor"):
        unchecked(network, gradients[0], spec=spec, preset=SOLVER)


def test_targets_that_are_not_one_for_each_sample_are_refused(spec, images):
    network = tiny_network()
    gradients = loss_gradients(network, images[:2], torch.tensor([0, 1]))
    settings = {"spec": spec, "preset": SOLVER}
    with pytest.raises(ValueError, match=r"targets must hold one entry for each of 1 .* got 2"):
        attack(network, gradients, targets=torch.tensor([1, 2]), **settings)
    with pytest.raises(ValueError, match="each of 4 samples of an update, got 2"):
        attack(network, gradients, targets=torch.tensor([1, 2]), num_examples=4, **settings)
    one_step = {"schedule": LocalSchedule(0.1, batch_size=2), **settings}
    with pytest.raises(ValueError, match="each of 2 or 4 samples of an update, got 3"):
        attack(network, gradients, targets=torch.tensor([1, 2, 0]), num_examples=4, **one_step)
    with pytest.raises(ValueError, match="each of 3 samples of an update, got 4"):
        attack(
            network,
            gradients,
            targets=torch.tensor([1, 2, 0, 0]),
            num_examples=4,
            members=(1, 3),
            **one_step,
        )
    for known in (torch.tensor([0, 1]), torch.tensor([0, 1, 2, 3])):
        result = attack(network, gradients, targets=known, num_examples=4, **one_step)
        assert result.batch.targets.tolist() == [0, 1]


def test_missing_parameters_are_named(spec, images):
    before, after = _train(tiny_network(), images[:1], torch.tensor([2]))
    renamed = {f"module.{name}": value for name, value in after.items()}
    settings = {"spec": spec, "preset": SOLVER, "schedule": LocalSchedule(0.1)}
    for change, said in (
        (ParameterChange(before, renamed), r"update.after must hold .*weight.*got \['module\."),
        (ParameterChange({}, after), r"update.before must hold .*weight.*got \[\]"),
    ):
        with pytest.raises(ValueError, match=said):
            attack(tiny_network(), change, **settings)


def test_a_preset_that_is_no_attack_is_an_error_that_lists_those_that_are(spec, images):
    network = tiny_network()
    gradients = loss_gradients(network, images[:1], torch.tensor([0]))
    with pytest.raises(ValueError, match=r"must be one of \[.*'idlg'.*'strongest'.*\], got 'none'"):
        attack(network, gradients, spec=spec, preset="none")


def test_frozen_parameters_may_be_left_out(spec, images):
    network = tiny_network()
    first, *rest = network.parameters()
    first.requires_grad_(False)
    gradients = torch.autograd.grad(F.cross_entropy(network(images[:1]), torch.tensor([3])), rest)
    names = [name for name, _ in network.named_parameters()]
    named = dict(zip(names[1:], gradients, strict=True))
    ways = [(torch.zeros_like(first), *gradients), gradients, (None, *gradients), named]
    quick = GradientInversion(optimizer=LBFGS(iterations=20), batching="loop")
    expected, *found = attack(network, ways, spec=spec, preset=quick)
    for result in found:
        assert result.error == ""
        assert torch.equal(result.batch.inputs, expected.batch.inputs)
    with pytest.raises(ValueError, match=r"4 gradients .* \(3 of them trained\), got 2"):
        attack(network, gradients[1:], spec=spec, preset=quick)


def test_shared_parameters_are_one(spec, images):
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid(),
        nn.Linear(64, 4),
    )  # fmt: skip
    network[3].weight = network[1].weight
    gradients = loss_gradients(network, images[:1], torch.tensor([1]))
    result = attack(network, gradients, spec=spec, preset=SOLVER)
    assert len(gradients) == 5
    assert float((result.batch.inputs - images[:1]).abs().max()) < 0.05


def test_dropout_that_is_active_is_warned_of(spec, images):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Dropout(0.3))
    gradients = loss_gradients(network.eval(), images[:1], torch.tensor([1]))
    quick = GradientInversion(optimizer=LBFGS(iterations=1))
    attack(network, gradients, spec=spec, preset=quick)
    with pytest.warns(UserWarning, match=r"train mode and has dropout: 2 \(p=0.3\)"):
        attack(network.train(), gradients, spec=spec, preset=quick)


class Drops(nn.Module):
    """Dropout by a function: in train mode, or always."""

    def __init__(self, always):
        super().__init__()
        self.always, self.layer = always, nn.Linear(64, 4)

    def forward(self, x):
        return self.layer(F.dropout(x.flatten(1), 0.2, training=self.always or self.training))


def test_dropout_by_functions_is_warned_of_and_draws_nothing(spec, images):
    quick = GradientInversion(optimizer=LBFGS(iterations=1))
    for always, mode, said in (
        (False, True, r"train mode and has dropout: dropout \(p=0.2\).* pass model.eval\(\)"),
        (True, False, r"drops: dropout \(p=0.2\)\. .* drops in eval mode, too"),
    ):
        network = Drops(always).train(mode)
        gradients = loss_gradients(network, images[:1], torch.tensor([1]))
        state = torch.get_rng_state()
        with pytest.warns(UserWarning, match=said):
            result = attack(network, gradients, spec=spec, preset=quick)
        assert result.error == ""
        assert torch.equal(torch.get_rng_state(), state)
    network = Drops(always=False).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attack(network, gradients, spec=spec, preset=quick)


def test_layers_in_both_modes_are_taken_where_the_statistics_are_named(spec, images):
    network = nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )
    gradients = loss_gradients(network.eval(), images[:1], torch.tensor([1]))
    network[1].train()
    settings = {"spec": spec, "preset": GradientInversion(optimizer=LBFGS(iterations=1))}
    assert attack(network, gradients, batch_norm="running", **settings).error == ""
    with pytest.raises(ValueError, match="all in eval mode"):
        attack(network, gradients, **settings)


def test_what_a_model_draws_is_put_back(spec, images):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 4)

        def forward(self, x):
            return self.layer(x.flatten(1) + 1e-3 * torch.randn(64))

    network = Noisy()
    gradients = loss_gradients(network, images[:1], torch.tensor([1]))
    state = torch.get_rng_state()
    attack(network, gradients, spec=spec, preset="analytic")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["analytic", "strongest", "feature_matching"])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0, 4.0])),
        partial(F.cross_entropy, weight=torch.tensor([0.5, 1.0, 2.0, 4.0])),
    ],
)
def test_one_image_is_recovered_through_a_weighted_loss(name, loss, spec, images):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 10, 3, padding=1, stride=2), nn.Tanh()]
    body = [*layers, nn.Flatten(), nn.Linear(160, 4)]
    if name == "analytic":
        body = [nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 4)]
    network = nn.Sequential(*body)
    value = loss(network(images[:1]), torch.tensor([2]))
    gradients = torch.autograd.grad(value, list(network.parameters()))
    result = attack(network, gradients, spec=spec, loss=loss, preset=name, max_seconds=5)
    assert result.error == ""
    assert result.batch.targets.tolist() == [2]
    assert float((result.batch.inputs - images[:1]).abs().max()) < 0.02


def test_a_loss_that_attacks_cannot_compute_is_refused(spec, images):
    network, weight = tiny_network(), torch.ones(4)
    gradients = loss_gradients(network, images[:1], torch.tensor([0]))
    for loss, said in (
        (lambda z, y: F.cross_entropy(z, y, weight=weight), "must work in float64"),
        (nn.MSELoss(), "stretched to one shape"),
        (nn.BCEWithLogitsLoss(), r"class ids \(B,\)"),
    ):
        with pytest.raises(ValueError, match=said):
            attack(network, gradients, spec=spec, loss=loss)


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_refused_in_words(spec, images):
    network = tiny_network()
    gradients = loss_gradients(network, images[:1], torch.tensor([0]))
    names = [name for name, _ in network.named_parameters()]
    arrays = {name: value.numpy() for name, value in zip(names, gradients, strict=True)}
    change = ParameterChange(arrays, arrays)
    one = {"schedule": LocalSchedule(0.1)}
    for update, settings, said in (
        (arrays, {}, r"update\['0.weight'\] must be a torch.Tensor, got numpy.ndarray"),
        (change, one, r"update must be|update.before\['0.weight'\] must be a torch.Tensor"),
        (gradients, {"num_examples": 0}, "num_examples must be a positive integer, got 0"),
        (gradients, {"num_examples": 1.0}, "positive integer, got 1.0"),
        (gradients, {"targets": [2]}, r"class ids \(B,\).* got 2; torch.tensor"),
        (gradients, {"targets": 2}, r"class ids \(B,\).* got 2; torch.tensor"),
        (gradients, {"targets": torch.tensor(2)}, r"got a tensor of shape \(\)"),
        (gradients, {"spec": None}, "spec must be an InputSpec .* got NoneType"),
        (gradients, {"loss": "cross_entropy"}, "loss must be a function .* got 'cross_entropy'"),
    ):
        with pytest.raises(ValueError, match=said):
            attack(network, update, **{"spec": spec, "preset": SOLVER, **settings})


def test_a_spec_that_the_model_does_not_take_is_named(images):
    network = tiny_network()
    gradients = loss_gradients(network, images[:1], torch.tensor([0]))
    result = attack(network, gradients, spec=InputSpec((3, 8, 8), 4), preset=SOLVER)
    assert "must take inputs of spec.shape (3, 8, 8), got RuntimeError" in result.error
    assert "3 channels" in result.error


def test_a_compiled_model_is_attacked_under_its_own_names(spec, images):
    network = torch.compile(tiny_network(), backend="eager")
    gradients = loss_gradients(network, images[:1], torch.tensor([3]))
    named = dict(zip(dict(network.named_parameters()), gradients, strict=True))
    assert all(name.startswith("_orig_mod.") for name in named)
    (first, second) = attack(network, [gradients, named], spec=spec, preset=SOLVER)
    assert torch.equal(first.batch.inputs, second.batch.inputs)
    assert float((first.batch.inputs - images[:1]).abs().max()) < 0.05
