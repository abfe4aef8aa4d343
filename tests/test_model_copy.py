"""Copies of models that carry tensors of a pass, compiled code, or no parameters to replace."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.model_copy import Uncompiled, copy_of
from flwr_leakage.records import Batch

INPUTS, TARGETS = torch.linspace(-1, 1, 12).reshape(2, 6), torch.tensor([1, 0])


def two_layers(wrap):
    torch.manual_seed(0)
    return nn.Sequential(wrap(nn.Linear(6, 5)), nn.Tanh(), wrap(nn.Linear(5, 3)))


def gradients(network):
    value = F.cross_entropy(network(INPUTS), TARGETS)
    names = dict(network.named_parameters())
    return dict(zip(names, torch.autograd.grad(value, list(names.values())), strict=True))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("mode", [True, False])
def test_norms_by_hooks_have_the_models_own_gradients(norm, mode):
    network = two_layers(getattr(nn.utils, norm)).train(mode)
    expected = gradients(network)  # leaves weights with a history on the modules
    gradient_map = GradientMap(network).with_batch_norm("batch")  # copied twice
    found = gradient_map(gradient_map.params, Batch(INPUTS, TARGETS))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient_map.with_batch_norm("running").params, gradient_map.params)


def test_tensors_that_a_pass_leaves_on_a_module_are_copied_without_history():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, inputs):
            self.seen = {"outputs": [self.layer(inputs)]}
            return self.seen["outputs"][0]

    network = Keeps()
    expected = network(INPUTS)
    (kept,) = copy_of(network).seen["outputs"]
    assert torch.equal(kept, expected) and kept.is_leaf and kept is not expected


def test_compiled_models_are_computed_as_they_were_written():
    network = two_layers(lambda layer: layer)
    compiled = torch.compile(network, backend="eager")
    parts = nn.Sequential(torch.compile(network[0], backend="eager"), *network[1:])
    for model in (compiled, parts):
        found = copy_of(model)
        assert found.state_dict().keys() == model.state_dict().keys()
        assert torch.equal(found(INPUTS), network(INPUTS))
    assert isinstance(copy_of(compiled), Uncompiled)
    assert isinstance(copy_of(parts)[0], Uncompiled)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_models_whose_parameters_cannot_be_replaced_are_refused_in_words():
    scripted = torch.jit.script(nn.Linear(6, 3))
    for model, said in (
        (scripted, "got a ScriptModule; pass the nn.Module that it was made from"),
        (torch.jit.trace(nn.Linear(6, 3), INPUTS), "got a ScriptModule"),
        (nn.Sequential(nn.Tanh(), scripted), "got a ScriptModule as '1'"),
        (nn.DataParallel(nn.Linear(6, 3)), r"got a DataParallel; pass model\.module"),
        (nn.Sequential(nn.LazyLinear(3)), "got 'weight' of LazyLinear as '0' uninitialised"),
    ):
        with pytest.raises(ValueError, match=said):
            GradientMap(model)
