"""Generators depend on their arguments, on all of them, and on nothing else."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flwr_leakage.randomness import (
    Reproducible,
    Secure,
    derive_seed,
    entropy_seed,
    make_generator,
    normal_rows,
    sign_rows,
)

WORDS = st.integers(0, 2**63 - 1)


def _draw(*args, **kwargs):
    return torch.randint(2**62, (4,), generator=make_generator(*args, **kwargs)).tolist()


@given(WORDS, WORDS, WORDS, st.text(max_size=5))
def test_the_same_arguments_give_the_same_draws(seed, server_round, client_id, purpose):
    arguments = {"server_round": server_round, "client_id": client_id, "purpose": purpose}
    state = torch.random.get_rng_state()
    assert _draw(seed, **arguments) == _draw(seed, **arguments)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_neighbouring_streams_all_differ():
    streams = [
        tuple(_draw(seed, server_round=r, client_id=c, purpose=purpose))
        for seed in (0, 1, 2**32, 2**32 + 1)
        for r in range(5)
        for c in (0, 1, 2, 3, 4, 2**62 + 1)
        for purpose in ("", "batch", "defense", "attack")
    ]
    assert len(set(streams)) == len(streams)


def test_every_process_and_platform_draws_the_same():
    generator = make_generator(3, server_round=2, client_id=1, purpose="batch")
    draws = torch.randint(2**31, (3,), generator=generator).tolist()
    assert draws == [1894378083, 1197778362, 201872345]


@pytest.mark.parametrize("arguments", [{"server_round": -1}, {"client_id": -1}])
def test_negative_words_are_refused_and_the_seed_is_kept(arguments):
    with pytest.raises(ValueError, match=r"must be ≥ 0, got .*-1") as caught:
        make_generator(8_675_309, **arguments)
    assert "8675309" not in str(caught.value)


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed must be ≥ 0"):
        make_generator(-1)


SOURCES = {"seed": Reproducible.from_seed(3), "entropy": Secure()}


@pytest.mark.parametrize("name", SOURCES)
def test_draws_have_their_laws(name):
    """p-values of 1e-7: entropy has no seed, and one failure in ten million is chance."""
    source, count = SOURCES[name], 50_000

    def fits(draws, law):
        return stats.kstest(draws.double().numpy().ravel(), law.cdf).pvalue > 1e-7

    assert fits(source.normal((count,), torch.float64), stats.norm)
    assert fits(source.laplace((2, count // 2), torch.float64), stats.laplace)
    assert fits(source.uniform((count,)), stats.uniform)
    assert fits(source.exponential((count, 1)), stats.expon)
    counts = source.bytes(count).bincount(minlength=256)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-7
    firsts = torch.stack([source.permutation(5) for _ in range(2000)])
    assert torch.equal(firsts.sort(1).values, torch.arange(5).expand(2000, 5))
    assert stats.chisquare(firsts[:, 0].bincount(minlength=5).numpy()).pvalue > 1e-7


@pytest.mark.parametrize("name", SOURCES)
def test_shapes_and_types_of_draws(name):
    source = SOURCES[name]
    assert source.normal((2, 0, 3), torch.float32).shape == (2, 0, 3)
    assert source.laplace((), torch.float64).shape == ()
    assert source.uniform((2, 3)).dtype == source.exponential((4,)).dtype == torch.float32
    assert source.permutation(0).tolist() == []
    assert source.bytes(0).tolist() == []
    assert source.bytes(7).dtype == source.permutation(3).dtype == torch.int64


def test_reproducible_draws_are_those_of_the_generator():
    for draw in (
        lambda r: r.normal((4,), torch.float32),
        lambda r: r.laplace((4,), torch.float64),
        lambda r: r.uniform((4,)),
        lambda r: r.exponential((4,)),
        lambda r: r.permutation(9),
        lambda r: r.bytes(9),
    ):
        first, second = (draw(Reproducible(make_generator(1, client_id=2))) for _ in range(2))
        assert torch.equal(first, second)
        assert not torch.equal(first, draw(Secure()))


def test_the_bits_below_the_rounding_do_not_tell_what_lies_below_the_noise():
    """Mironov 2012: one normal number is the image of a lattice, a sum of four is not.

    Where every number is Φ⁻¹ of a multiple of 2⁻⁵³, Φ(released − guess) · 2⁵³ is whole for the
    true value and for hardly any other.
    """

    def whole(numbers):
        scaled = torch.special.ndtr(numbers[numbers.abs() < 0.1]) * 2**12
        return float(((scaled - scaled.round()).abs() < 1e-9).double().mean())

    lattice = torch.special.ndtri(torch.randint(1, 2**12, (4000,)).double() * 2**-12)
    assert whole(lattice) == 1.0
    assert whole(Secure().normal((40_000,), torch.float64)) < 0.01


def test_entropy_survives_a_seeded_process():
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    first = Secure().normal((4,), torch.float64)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    assert not torch.equal(first, Secure().normal((4,), torch.float64))
    assert entropy_seed() != entropy_seed()


def test_a_derived_seed_is_one_of_a_seed_again():
    seed = derive_seed(3, purpose="a")
    assert seed == derive_seed(3, purpose="a") != derive_seed(3, purpose="b")
    assert make_generator(seed, purpose="c").initial_seed() >= 0


@pytest.mark.parametrize("rows", [normal_rows, sign_rows])
def test_a_row_of_a_generator_of_its_own_does_not_depend_on_the_others(rows):
    def draws(*names):
        return [make_generator(0, purpose=name) for name in names]

    both = rows((2, 5), draws("a", "b"))
    assert torch.equal(rows((1, 5), draws("b")), both[1:])
    assert not torch.equal(both[0], both[1]) and both.dtype == torch.float64
    assert rows((2, 5), make_generator(0)).shape == (2, 5)
    with pytest.raises(ValueError, match="each of 3 rows, got 2"):
        rows((3, 5), draws("a", "b"))
