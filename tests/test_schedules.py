"""Local training by epochs, which gives each client its own number of steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage import EpochSchedule, LocalSchedule


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 4))
def test_every_sample_is_used_once_an_epoch(num_examples, batch_size, num_epochs):
    schedule = EpochSchedule(0.1, num_epochs, batch_size).for_client(num_examples)
    uses = [0] * num_examples
    for window in schedule.slices(num_examples):
        for index in range(window.start, window.stop):
            uses[index] += 1
    assert uses == [num_epochs] * num_examples
    assert schedule.num_samples_used(num_examples) == num_examples


def test_the_other_settings_are_kept():
    schedule = EpochSchedule(0.1, 2, 8, momentum=0.5, weight_decay=0.25).for_client(20)
    assert schedule == LocalSchedule(0.1, 6, 8, momentum=0.5, weight_decay=0.25)
    assert LocalSchedule(0.1, 3).for_client(99) == LocalSchedule(0.1, 3)


def test_a_number_of_samples_that_nobody_has_is_refused():
    with pytest.raises(ValueError, match="at most 1,000,000 steps, got 10,000,000"):
        EpochSchedule(0.1).for_client(10_000_000)
    with pytest.raises(ValueError, match="num_examples must be at least 1"):
        EpochSchedule(0.1).for_client(0)
    with pytest.raises(ValueError, match="num_epochs must be at least 1"):
        EpochSchedule(0.1, 0)
    with pytest.raises(ValueError, match="learning_rate"):
        EpochSchedule(-0.1)


def test_what_a_client_does_is_told_in_words():
    assert LocalSchedule(0.1, 1, 10).describe(1) == "1 image, 1 step of 1 image, learning rate 0.1"
    told = LocalSchedule(0.05, 30, 10, momentum=0.9).describe(1200)
    assert told == "1,200 images, 30 steps of 10 images, learning rate 0.05, momentum 0.9"
