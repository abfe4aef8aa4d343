"""What an attack would take, before anything is allocated."""

import resource
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from flwr_leakage.audit import needs
from flwr_leakage.audit.needs import Trials, measure
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, LocalSchedule, Observation, Update


def any_size():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip


class ByValues(nn.Module):
    """A model that decides by values, for which a pass without them ends."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 3)

    def forward(self, inputs):
        rows = inputs.flatten(1)
        return self.layer(rows * 2 if rows.sum().item() > 0 else rows)


@pytest.mark.parametrize("mode", ["running", "batch"])
def test_a_pass_without_values_counts_what_a_sample_takes(mode):
    needs = measure(GradientMap(any_size(), batch_norm=mode), InputSpec((3, 32, 32), 10))
    convolution = 2 * 8 * 3 * 9 * 32 * 32
    assert needs.operations == convolution + 2 * 128 * 10
    assert needs.num_classes == 10
    floats = 2 * 8 * 32**2 + 8 * 16 + 10
    assert 4 * floats <= needs.num_bytes <= 1.1 * 4 * floats


@pytest.mark.parametrize(
    ("model", "shape", "said"),
    [
        (any_size(), (1, 32, 32), "does not take inputs of shape"),
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), (1, 6, 7), "does not take inputs"),
        (nn.Conv2d(1, 4, 3), (1, 6, 6), "one row of logits a sample"),
        (ByValues(), (1, 6, 7), "does not take inputs"),
        (ByValues(), (1, 2000, 2000), "too large"),
        (any_size(), (3, 32768, 16384), "too large"),
        (any_size(), (3, 2000, 2000), "too large"),
        (any_size(), (3, 2**31, 2**31), "too large"),
    ],
)
def test_what_does_not_fit_is_refused_and_takes_no_memory(model, shape, said):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=said):
        measure(GradientMap(model), InputSpec(shape, 10), 2**27)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_model_that_decides_by_values_is_tried_with_zeros():
    assert measure(GradientMap(ByValues()), InputSpec((1, 6, 6), 3), 2**27).num_classes == 3


def test_a_sequence_of_operations_has_an_end(monkeypatch):
    monkeypatch.setattr(needs, "_MAX_CALLS", 500)

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, inputs):
            total = inputs[:, 0, 0, :1]
            for place in range(inputs.shape[-1]):
                total = self.layer(total) + inputs[:, 0, 0, place, None]
            return total

    with pytest.raises(ValueError, match="operations"):
        measure(GradientMap(Loop()), InputSpec((1, 1, 2_000), 1), 2**30)


def seen(count, **schedule):
    model = any_size()
    params = dict(model.named_parameters())
    update = Update({}, {}, LocalSchedule(0.1, **schedule), count)
    return Observation(1, 3, params, {}, update)


@pytest.mark.parametrize(
    ("trials", "observation", "said"),
    [
        (Trials(), seen(2**50, num_steps=10**6, batch_size=10**9), ""),
        (Trials(max_bytes=2**25), seen(8, batch_size=8), ""),
        (Trials(max_bytes=2**24), seen(100, batch_size=100), "100 samples"),
        (Trials(max_bytes=2**24), seen(1, num_steps=5000), "5,000 steps would need about"),
        (Trials(max_seconds=1e-3), seen(1), "no 10 fit into max_seconds=0.001"),
        (Trials(max_seconds=1.0), seen(1), ""),
        (Trials(max_bytes=10_000), seen(1), "one alone takes more"),
    ],
)
def test_an_attack_beyond_a_limit_is_refused_in_words(trials, observation, said):
    reason = trials.refusal(GradientMap(any_size()), InputSpec((3, 32, 32), 10), observation)
    assert bool(reason) == bool(said)
    assert said in reason


def test_weights_of_linear_layers_count_once_however_many_samples_there_are():
    wide = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10))
    needed = measure(GradientMap(wide), InputSpec((3, 32, 32), 10))
    assert needed.num_bytes == 4 * (256 + 256 + 10)


def test_what_is_kept_of_trials_has_an_end(monkeypatch):
    monkeypatch.setattr(needs, "_MAX_KEPT", 8)
    trials, gradient_map = Trials(), GradientMap(any_size())
    for side in range(1, 12):
        trials.needs(gradient_map, InputSpec((3, 4, side), 10))
    assert len(trials._known) == 8
    assert torch.get_default_device().type == "cpu"


@dataclass(frozen=True)
class Case:
    observation: Observation


def test_what_is_attacked_together_fits_together():
    cases = [Case(seen(count, batch_size=8)) for count in (8, 1, 1, 8, 8)]
    trials, gradient_map = Trials(max_bytes=30 * 2**20), GradientMap(any_size())
    parts = list(trials.together(gradient_map, InputSpec((3, 32, 32), 10), cases))
    assert [[case.observation.update.num_examples for case in part] for part in parts] == [
        [8, 1], [1, 8], [8],
    ]  # fmt: skip
    assert list(Trials().together(gradient_map, InputSpec((3, 32, 32), 10), cases)) == [cases]


def test_texts_take_what_their_tokens_take():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
    found = measure(GradientMap(model), InputSpec.text(9, 3, 2))
    assert found.operations == 2 * 12 * 2 and found.num_classes == 2
    with pytest.raises(ValueError, match="one row of logits at each position of a text"):
        measure(GradientMap(model), InputSpec.text(9, 3))
