"""The records check what enters them; the schedule agrees with a data loader."""

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Measurement,
    Reconstruction,
    ThreatModel,
    Update,
)

COUNTS = st.integers(1, 12)


def test_a_batch_is_cut_and_joined_in_order():
    batch = Batch(torch.arange(12.0).reshape(4, 1, 1, 3), torch.arange(4))
    assert len(batch) == 4
    joined = Batch.concatenate([batch[2:], batch[[1, 0]]])
    assert joined.targets.tolist() == [2, 3, 1, 0]
    assert torch.equal(joined.inputs[2], batch.inputs[1])
    masked = batch[batch.targets > 1]
    assert masked.targets.tolist() == [2, 3]


def test_a_batch_of_unequal_counts_is_refused():
    with pytest.raises(ValueError, match="same number of samples"):
        Batch(torch.zeros(2, 1, 1, 1), torch.zeros(3, dtype=torch.long))


def test_records_are_frozen():
    schedule = LocalSchedule(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.num_steps = 2


SPEC = InputSpec((3, 2, 2), 10, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))


def test_normalisation_is_inverted_and_in_the_dtype_of_its_argument():
    pixels = torch.rand(5, 3, 2, 2, dtype=torch.float64)
    inputs = SPEC.normalize(pixels)
    assert inputs.dtype == torch.float64
    torch.testing.assert_close(inputs[:, 1], (pixels[:, 1] - 0.2) / 0.25)
    torch.testing.assert_close(SPEC.denormalize(inputs), pixels)


def test_inputs_without_a_box_are_never_clamped():
    inputs = 9 * torch.randn(5, 1, 1, 4)
    table = InputSpec.table(4, 2)
    assert torch.equal(table.clamp(inputs), inputs)
    torch.testing.assert_close(table.denormalize(table.normalize(inputs)), inputs)
    assert torch.equal(table.normalize(torch.tensor([[[0.25, 0.5, 0.75, 1.0]]])),
                       torch.tensor([[[-1.0, 0.0, 1.0, 2.0]]]))  # fmt: skip


@pytest.mark.parametrize("name", ["box", "known"])
@pytest.mark.usefixtures("unchecked")
def test_a_flag_of_a_spec_is_true_or_false(name):
    with pytest.raises(ValueError, match=f"{name} must be true or false, got 'no'"):
        InputSpec((1, 2, 2), 2, **{name: "no"})


def test_clamp_projects_onto_the_box_of_pixels():
    pixels = torch.linspace(-1, 2, 60, dtype=torch.float64).reshape(5, 3, 2, 2)
    clamped = SPEC.clamp(SPEC.normalize(pixels))
    torch.testing.assert_close(SPEC.denormalize(clamped), pixels.clamp(0, 1))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mean": (0.1, 0.1)}, "each of 3 channels"),
        ({"std": (0.5, 0.0, 1.0)}, "std must be positive"),
        ({"std": (0.5, math.nan, 1.0)}, "std must be positive"),
        ({"shape": (28, 28)}, r"shape must be \(C, H, W\) .* got \(28, 28\)"),
        ({"shape": (3, 0, 2)}, r"all positive, got \(3, 0, 2\)"),
        ({"num_classes": 0}, "num_classes must be a positive integer, got 0"),
    ],
)
def test_a_wrong_spec_is_refused(unchecked, settings, said):
    with pytest.raises(ValueError, match=said):
        InputSpec(
            **{"shape": (3, 2, 2), "num_classes": 10, "mean": (0,) * 3, "std": (1,) * 3, **settings}
        )


@given(COUNTS, COUNTS, COUNTS)
def test_the_schedule_takes_the_mini_batches_of_a_data_loader(count, batch_size, num_steps):
    schedule = LocalSchedule(0.1, num_steps=num_steps, batch_size=batch_size)
    samples = torch.arange(count)
    loader = torch.utils.data.DataLoader(samples, batch_size=batch_size)
    epochs = [part.tolist() for _ in range(num_steps) for part in loader]
    taken = [samples[window].tolist() for window in schedule.slices(count)]
    assert taken == epochs[:num_steps]
    touched = {sample for step in taken for sample in step}
    assert touched == set(range(schedule.num_samples_used(count)))


def test_a_client_that_claims_any_number_of_samples_costs_no_memory():
    schedule = LocalSchedule(0.1, num_steps=2, batch_size=3)
    assert schedule.slices(10**15) == [slice(0, 3), slice(3, 6)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("learning_rate", math.inf),
        ("num_steps", 0),
        ("batch_size", 0),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("momentum", math.nan),
        ("weight_decay", -0.1),
        ("weight_decay", math.nan),
        ("weight_decay", math.inf),
    ],
)
def test_a_wrong_schedule_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must .*got {value}"):
        LocalSchedule(**{"learning_rate": 0.1, name: value})


def test_no_samples_have_no_steps():
    with pytest.raises(ValueError, match="num_examples must be at least 1, got 0"):
        LocalSchedule(0.1).slices(0)


def test_the_pseudo_gradient_of_one_step_is_the_gradient():
    gradient = torch.randn(4, dtype=torch.float64)
    update = Update({"w": -0.25 * gradient}, {}, LocalSchedule(0.25), 1)
    torch.testing.assert_close(update.pseudo_gradient()["w"], gradient)


@pytest.mark.parametrize(
    "settings", [{"labels": "guessed"}, {"batch_norm": "eval"}, {"view": "several"}]
)
def test_an_unknown_threat_is_refused(settings):
    (value,) = settings.values()
    with pytest.raises((ValueError, TypeError), match=value):
        ThreatModel(**settings)


def test_the_threat_names_all_that_is_known():
    threat = ThreatModel(labels="known", batch_norm="exact", view="aggregate")
    assert threat.describe() == (
        "labels known, batch norm exact, local schedule known, aggregate view"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_measurement_holds_finite_numbers_only(value):
    with pytest.raises(ValueError, match="psnr must be finite or None"):
        Measurement("psnr", (1.0, value), "dB", "larger leaks more")


def test_a_measurement_has_a_note_for_each_sample_or_none():
    Measurement("psnr", (1.0, None), "dB", "larger leaks more", ("", "no number"))
    with pytest.raises(ValueError, match="each of 2 samples, got 1"):
        Measurement("psnr", (1.0, None), "dB", "larger leaks more", ("",))


def test_a_reconstruction_prints_shapes_instead_of_tensors():
    batch = Batch(torch.rand(2, 3, 32, 32), torch.tensor([1, 2]))
    found = Reconstruction(batch, 1.25e-6, {"iterations": 7, "mask": torch.zeros(40, 2)})
    assert repr(found) == (
        "Reconstruction(batch=Batch(inputs=(2, 3, 32, 32), targets=(2,)), objective=1.25e-06, "
        "stats={'iterations': 7, 'mask': (40, 2)}, error='')"
    )
    assert repr(Reconstruction(None, float("nan"), error="no bias")) == (
        "Reconstruction(batch=None, objective=nan, stats={}, error='no bias')"
    )


@pytest.mark.parametrize(
    ("errors", "states", "expected"),
    [
        ((0.1,), (), "errors must have one entry for each of 2 samples, got 1"),
        ((), ("exact",), "states must have one entry for each of 2 samples, got 1"),
        ((-0.1, None), (), "got -0.1 for the value 1.0"),
        ((0.1, 0.1), (), "got 0.1 for the value None"),
        ((math.inf, None), (), "got inf for the value 1.0"),
        ((), ("unresolved", "unresolved"), "the state of psnr = 1.0 cannot be 'unresolved'"),
        ((), ("exact", "exact"), "the state of psnr = None cannot be 'exact'"),
        ((), ("good", "unresolved"), "got 'good'"),
    ],
)
def test_a_measurement_s_errors_and_states_fit_its_values(unchecked, errors, states, expected):
    Measurement(
        "psnr", (1.0, None), "dB", "larger leaks more", (), 0, (0.1, None), ("exact", "lower bound")
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        Measurement("psnr", (1.0, None), "dB", "larger leaks more", (), 0, errors, states)


def test_one_mean_and_one_deviation_are_those_of_every_channel():
    spec = InputSpec((3, 2, 2), 10)
    assert (spec.mean, spec.std) == ((0.0,) * 3, (1.0,) * 3)
    assert InputSpec((3, 2, 2), 10, (0.5,), (0.25,)).std == (0.25,) * 3
    with pytest.raises(ValueError, match="one entry for each of 3 channels"):
        InputSpec((3, 2, 2), 10, (0.5, 0.5), (1.0,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": (1, 1, 4)}, r"shape must be \(T,\) of texts"),
        ({"vocabulary": 1}, "vocabulary must be at least 2 ids, got 1"),
        ({"padding": 9}, r"padding must be an id in \[0, 9\) or None, got 9"),
        ({"padding": True}, "padding must be an id"),
        ({"num_classes": 3, "next_token": True}, "one class for each of 9 ids, got num_classes=3"),
        ({"box": True}, "token ids have no box and no normalisation"),
        ({"std": (2.0,)}, "token ids have no box and no normalisation"),
    ],
)
def test_a_spec_of_texts_names_what_is_wrong(change, said):
    good = InputSpec.text(9, 4, 2, padding=0)
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(good, **change)


def test_a_spec_of_texts_tells_the_shapes_of_its_model():
    assert InputSpec.text(9, 4, 2).output_shape == (2,)
    spec = InputSpec.text(9, 4)
    assert spec.next_token and spec.output_shape == (4, 9)
    blank = InputSpec.text(9, 4, padding=0).blank(2, torch.zeros(()))
    assert blank.dtype == torch.int64 and blank.tolist() == [[1] * 4] * 2
