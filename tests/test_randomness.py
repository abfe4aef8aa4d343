"""Generators depend on their arguments, on all of them, and on nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.randomness import derive_seed, make_generator, normal_rows, sign_rows

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


@pytest.mark.parametrize(
    "arguments", [{"seed": -1}, {"seed": 0, "server_round": -1}, {"seed": 0, "client_id": -1}]
)
def test_negative_words_are_refused(arguments):
    with pytest.raises(ValueError, match=r"must be ≥ 0, got \["):
        make_generator(**arguments)


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
