"""Parameters as one vector and back; entry-wise arithmetic."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.params import add, ravel, scale, subtract, unravel

SHAPES = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4)


def _params(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}": torch.randn(shape, generator=generator, dtype=torch.float64)
        for i, shape in enumerate(shapes)
    }


@given(SHAPES)
def test_unravel_inverts_ravel(shapes):
    params = _params(shapes)
    vector = ravel(params)
    assert vector.shape == (sum(value.numel() for value in params.values()),)
    back = unravel(vector, params)
    assert list(back) == list(params)
    for name, value in params.items():
        assert back[name].shape == value.shape
        assert torch.equal(back[name], value)


def test_ravel_follows_the_order_of_the_mapping():
    params = {"z": torch.tensor([[1.0, 2.0]]), "a": torch.tensor(3.0)}
    assert ravel(params).tolist() == [1.0, 2.0, 3.0]
    assert ravel(dict(reversed(params.items()))).tolist() == [3.0, 1.0, 2.0]


def test_ravel_and_unravel_are_differentiable():
    params = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
    (unravel(ravel(params) ** 2, params)["w"] * torch.tensor([1.0, 10.0])).sum().backward()
    assert params["w"].grad.tolist() == [2.0, 40.0]


@pytest.mark.parametrize("length", [0, 2, 4])
def test_a_vector_of_another_length_is_refused(length):
    with pytest.raises(ValueError, match=rf"shape \(3,\), got \({length},\)"):
        unravel(torch.zeros(length), {"w": torch.zeros(2), "b": torch.zeros(1)})


def test_no_parameters_are_refused():
    with pytest.raises(ValueError, match="at least one tensor"):
        ravel({})


def test_arithmetic_is_entry_by_entry_and_leaves_its_arguments_alone():
    left, right = _params([[2, 2], [3]], 1), _params([[2, 2], [3]], 2)
    before = ravel(left).clone()
    torch.testing.assert_close(ravel(add(left, right)), ravel(left) + ravel(right))
    torch.testing.assert_close(ravel(subtract(left, right)), ravel(left) - ravel(right))
    torch.testing.assert_close(ravel(scale(left, -2.5)), -2.5 * ravel(left))
    assert torch.equal(ravel(left), before)


@pytest.mark.parametrize("operation", [add, subtract])
def test_other_names_are_refused(operation):
    with pytest.raises(ValueError, match=r"expected the entries \['b'\], got \['a'\]"):
        operation({"a": torch.zeros(1)}, {"b": torch.zeros(1)})


@pytest.mark.parametrize("operation", [add, subtract])
def test_the_order_of_the_names_does_not_matter(operation):
    left = {"a": torch.ones(1), "b": torch.full((2,), 2.0)}
    result = operation(left, dict(reversed(left.items())))
    assert list(result) == ["a", "b"]
    assert torch.equal(result["b"], operation(left, left)["b"])
