"""Dropout by functions: found, and left out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.dropout import Dropouts, functional_dropout
from flwr_leakage.gradient_map import GradientMap

INPUTS = torch.linspace(1, 2, 48).reshape(2, 3, 8)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.function(self, inputs * self.weight)


DROPS = {
    "dropout": lambda m, x: F.dropout(x, 0.3),
    "dropout1d": lambda m, x: F.dropout1d(x, 0.3),
    "alpha_dropout": lambda m, x: F.alpha_dropout(x, 0.3, training=True),
    "plain": lambda m, x: torch.dropout(x, 0.3, True),
    "of a module": lambda m, x: nn.Dropout(0.3)(x),
    "named": lambda m, x: F.dropout(input=x, p=0.3, training=True),
}
ATTENTION = {
    "positional": lambda m, x: F.scaled_dot_product_attention(x, x, x, None, 0.3),
    "named": lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
}


@pytest.mark.parametrize("function", [*DROPS.values(), *ATTENTION.values()])
def test_what_drops_is_found_and_left_out(function):
    model, state = Calls(function), torch.get_rng_state()
    (found,) = functional_dropout(model, INPUTS)
    assert found.endswith("(p=0.3)")
    with torch.no_grad(), Dropouts(skip=True):
        first, second = model(INPUTS), model(INPUTS)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        expected = INPUTS
        if function in ATTENTION.values():
            expected = F.scaled_dot_product_attention(INPUTS, INPUTS, INPUTS)
    assert torch.equal(first, expected)


def test_what_drops_nothing_is_no_dropout():
    for function in (
        lambda m, x: F.dropout(x, 0.3, training=m.training),
        lambda m, x: F.dropout(x, 0.0),
        lambda m, x: F.alpha_dropout(x, 0.3),
        lambda m, x: F.scaled_dot_product_attention(x, x, x),
    ):
        assert functional_dropout(Calls(function).eval(), INPUTS) == []


def test_attention_in_train_mode_drops():
    attention = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
    model = Calls(lambda m, x: attention(x, x, x)[0])
    assert functional_dropout(model, INPUTS) == ["multi_head_attention_forward (p=0.4)"]
    with torch.no_grad():
        with Dropouts(skip=True):
            found = model(INPUTS)
        attention.eval()
        torch.testing.assert_close(found, model(INPUTS))


def test_a_map_without_dropout_is_the_same_at_every_call():
    gradient_map = GradientMap(Calls(DROPS["dropout"])).without_dropout()
    assert gradient_map.without_dropout() is gradient_map
    found = [gradient_map.logits(gradient_map.params, INPUTS) for _ in range(2)]
    assert torch.equal(*found) and torch.equal(found[0], INPUTS)
