"""What exact inputs show of their normalisation."""

import pytest
import torch

from flwr_leakage.conventions import (
    PUBLIC,
    possible_specs,
    public_specs,
    public_statistics,
    read_normalization,
)
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import InputSpec

NAMES = [name for name in PUBLIC if name != "0 to 16"]  # those are levels of 0 to 255, too


def of(name, channels=3, size=8):
    return InputSpec((channels, size, size), 4, *public_statistics(name, channels))


def pixels(count=1, channels=3, size=8, levels=255, seed=0):
    draw = make_generator(seed)
    return torch.randint(0, levels + 1, (count, channels, size, size), generator=draw) / levels


@pytest.mark.parametrize("told", NAMES)
@pytest.mark.parametrize("own", NAMES)
def test_the_right_public_normalisation_is_found_whatever_was_told(own, told):
    inputs = of(own).normalize(pixels())
    error = 1e-5 * float(inputs.square().mean().sqrt())
    inputs = inputs + error * torch.randn(inputs.shape, generator=make_generator(1))
    found = read_normalization(inputs, of(told), error)
    assert found.spec == of(own)
    assert found.claim == ("confirmed" if own == told else "read off")


def test_digits_of_17_levels_are_levels_of_pixels():
    inputs = of("MNIST", 1).normalize(pixels(channels=1, levels=16))
    assert read_normalization(inputs, of("0 to 1", 1), 1e-6).spec == of("MNIST", 1)
    assert read_normalization(inputs, of("MNIST", 1), 1e-6).claim == "confirmed"


def test_levels_that_several_normalisations_have_prove_none():
    inputs = 16 * pixels(channels=1, levels=16)
    found = read_normalization(inputs, of("0 to 255", 1), 1e-6)
    assert (found.claim, found.spec) == ("refuted", None)
    assert "'0 to 16'" in found.reason


def test_a_finer_grid_than_the_true_one_is_none():
    """Bright images by 0.5 are images by 0 and 1 of which each second level is missing."""
    inputs = of("0.5 and 0.5").normalize(0.5 + pixels(levels=127) * 127 / 255 + 0.5 / 255)
    assert read_normalization(inputs, of("0 to 1"), 1e-6).spec == of("0.5 and 0.5")


@pytest.mark.parametrize(
    ("make", "told", "claim"),
    [
        (lambda p: p, InputSpec((1, 8, 8), 4), "as told"),  # on no grid
        (lambda p: 2 * p, InputSpec((1, 8, 8), 4), "refuted"),  # outside
        (lambda p: p.reshape(1, 1, 1, 64), InputSpec((1, 1, 64), 4), "refuted"),  # a table
        (lambda p: (p > 0.5).float(), InputSpec((1, 8, 8), 4), "refuted"),  # also 0 to 255
        (lambda p: 0.3 + 0.4 * (255 * p).round() / 255, InputSpec((1, 8, 8), 4), "refuted"),
    ],
    ids=["interpolated", "outside", "table", "two levels", "another grid"],
)
def test_values_that_show_no_normalisation(make, told, claim):
    inputs = make(torch.rand(1, 1, 8, 8, generator=make_generator(0)))
    found = read_normalization(inputs, told, 1e-6)
    assert found.claim == claim
    assert found.spec == (told if claim == "as told" else None)


def test_errors_of_a_level_show_nothing():
    inputs = of("MNIST", 1).normalize(pixels(channels=1))
    found = read_normalization(inputs, of("MNIST", 1), 0.01)
    assert found.claim == "as told"


def test_what_is_possible_if_nothing_is_known():
    known = of("MNIST", 1)
    unknown = InputSpec(known.shape, 4, known.mean, known.std, known=False)
    assert possible_specs(known) == [known]
    assert possible_specs(unknown)[0] == known
    assert set(possible_specs(unknown)) == set(public_specs(known).values())
    table = InputSpec.table(4, 2)
    assert possible_specs(table) == [table]
