"""Arrays are matched to a model, and what a client says of them decides the attack on it alone."""

import pytest
import torch
from torch import nn

from flwr_leakage.capture import TrainingFacts
from flwr_leakage.capture.sent import ANOTHER_MULTIPLE, SENDS
from flwr_leakage.flower.arrays import MalformedArraysError
from flwr_leakage.flower.part import Part, change_made
from flwr_leakage.gradient_map import GradientMap

MODEL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
MAP = GradientMap(MODEL)
SHAPES = {name: tuple(value.shape) for name, value in MODEL.state_dict().items()}


def test_a_part_is_matched_by_names_a_wrapper_or_order():
    whole = Part.of(SHAPES, MAP)
    assert whole.is_whole and not whole.sentence()
    wrapped = Part.of({f"module.{name}": shape for name, shape in SHAPES.items()}, MAP)
    assert not wrapped.is_whole and wrapped.names == {f"module.{name}": name for name in SHAPES}
    assert not wrapped.missing and not wrapped.sentence()
    kept = [name for name in SHAPES if not name.startswith("1.")]
    part = Part.of({str(place): SHAPES[name] for place, name in enumerate(kept)}, MAP)
    assert list(part.names.values()) == kept and part.missing == ("1.weight", "1.bias")
    assert "4 of the model's 9 arrays" in part.sentence()
    more = Part.of({**SHAPES, "variate": (2,)}, MAP)
    assert more.extra == ("variate",) and "(variate) is none of the model's" in more.sentence()


class Twins(nn.Module):
    """A personal and a global part of one architecture, as in APFL, FENDA and PerFCL."""

    def __init__(self):
        super().__init__()
        self.personal, self.shared = nn.Linear(4, 3), nn.Linear(4, 3)


def test_parts_that_only_their_values_tell_apart_are_named():
    shapes = {"0": (3, 4), "1": (3,)}
    part = Part.of(shapes, GradientMap(Twins()))
    assert part.alike == ("personal.weight", "shared.weight")
    assert "begin with personal.weight and shared.weight" in part.sentence()
    assert "are taken for personal.weight and what follows" in part.sentence()
    last = {"shared.weight": (3, 4), "shared.bias": (3,)}
    named = Part.of(last, GradientMap(Twins()))
    assert dict(named.names) == {name: name for name in last} and not named.alike
    body = {str(place): shape for place, shape in enumerate(list(SHAPES.values())[:2])}
    assert not Part.of(body, MAP).alike  # no other part of this model has these shapes


def test_arrays_that_are_none_of_the_model_are_refused():
    with pytest.raises(MalformedArraysError, match="got 1 that no part fits"):
        Part.of({"other": (7,)}, MAP)
    with pytest.raises(MalformedArraysError, match=r"must have shape \(3, 8\), got \(4, 8\)"):
        Part.of({"3.weight": (4, 8)}, MAP)


@pytest.mark.parametrize("sends", [*SENDS, ANOTHER_MULTIPLE])
def test_whatever_a_client_says_is_no_error(sends):
    local = {"3.bias": torch.ones(3)}
    for rate, momentum, steps in ((0.0, 1.0, 0), (0.1, 1.0, 3), (1e-300, 0.0, 2**30)):
        facts = TrainingFacts("SGD", rate, momentum, num_steps=steps, sends=sends)
        assert change_made(facts, local, MAP.params).keys() == local.keys()
    assert change_made(None, local, MAP.params)["3.bias"].equal(1 - MODEL[3].bias.detach())
