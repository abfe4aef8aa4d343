import pytest
import torch

from flwr_leakage.attacks.text.tables import noise_of, pair_weights, placed_tokens, rows_above


def tables(length, width, kinds, seed):
    generator = torch.Generator().manual_seed(seed)
    errors = torch.randn(length, width, generator=generator, dtype=torch.float64)
    tokens = torch.randint(kinds, (length,), generator=generator)
    words = torch.zeros(kinds, width, dtype=torch.float64).index_add_(0, tokens, errors)
    return words, errors, tokens


@pytest.mark.parametrize(("length", "width"), [(10, 16), (16, 16), (30, 16)])
def test_one_text_is_placed_beyond_the_width(length, width):
    words, places, tokens = tables(length, width, 20, 100)
    used = tokens.unique()
    chosen, weights = placed_tokens(words[used], places)
    assert torch.equal(used[chosen], tokens)
    torch.testing.assert_close(weights, torch.ones_like(weights))


def test_too_long_a_text_is_refused():
    words, places, _ = tables(60, 4, 6, 100)
    with pytest.raises(ValueError, match="not told apart by tables of width 4"):
        placed_tokens(words + 10 * torch.randn_like(words), places)


def test_noise_names_no_token():
    generator = torch.Generator().manual_seed(0)
    table = 1e-3 * torch.randn(5000, 32, generator=generator)
    assert noise_of(table) == pytest.approx(1e-3, rel=0.02)
    table[[7, 70]] += 0.01
    assert rows_above(table, noise_of(table)).tolist() == [7, 70]


def test_tokens_that_occur_once_have_the_largest_weights():
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(3, 5, 64, generator=generator, dtype=torch.float64)
    errors += torch.randn(3, 1, 64, generator=generator)  # a text's errors have much in common
    weights = pair_weights(errors.flatten(0, 1), errors.sum(0))
    true = torch.eye(5, dtype=torch.bool).repeat(1, 3)
    assert float(weights[true].min()) > float(weights[~true].max())


def test_all_tokens_of_a_small_vocabulary_are_no_noise():
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(20, 64, generator=generator) * torch.linspace(0.1, 1, 20)[:, None]
    assert noise_of(table) == 0 and len(rows_above(table, 0.0)) == 20
