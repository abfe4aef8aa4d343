import pytest
import torch
from attacked import tiny_network
from torch.nn import functional as F

from flwr_leakage.attacks import LBFGS, GradientInversion
from flwr_leakage.attacks.one_call import ParameterChange, attack
from flwr_leakage.records import LocalSchedule

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


def test_a_preset_by_name_and_wrong_lengths(spec, images):
    network = tiny_network()
    gradients = loss_gradients(network, images[:1], torch.tensor([0]))
    assert attack(network, gradients, spec=spec, preset="idlg").batch is not None
    with pytest.raises(ValueError, match="4 gradients"):
        attack(network, gradients[:2], spec=spec, preset=SOLVER)
    with pytest.raises(ValueError, match="one tensor"):
        attack(network, gradients, spec=spec, preset=SOLVER, targets=[torch.tensor([0])] * 2)
