import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flwr_leakage.defenses import MixUp
from flwr_leakage.defenses.mixing import Mixing, draw_coefficients, draw_mixing
from flwr_leakage.defenses.mixup import mixup_batch
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch


@given(
    num_samples=st.integers(1, 30),
    k=st.integers(1, 8),
    slack=st.floats(0.02, 1),
    seed=st.integers(0, 10_000),
)
def test_draws_respect_bound_sum_and_partners(
    num_samples: int, k: int, slack: float, seed: int
) -> None:
    k = min(k, num_samples)
    bound = 1 / k + slack * (1 - 1 / k) if k > 1 else 1.0
    mixing = draw_mixing(num_samples, k, bound, Reproducible(torch.Generator().manual_seed(seed)))
    assert mixing.coefficients.shape == mixing.indices.shape == (num_samples, k)
    torch.testing.assert_close(mixing.coefficients.sum(1), torch.ones(num_samples))
    assert float(mixing.coefficients.min()) >= 0
    assert float(mixing.coefficients.max()) <= bound + 1e-6
    assert torch.equal(mixing.indices[:, 0], torch.arange(num_samples))
    assert all(len(set(row)) == k for row in mixing.indices.tolist())
    assert torch.equal(mixing.indices.flatten().bincount(), torch.full((num_samples,), k))


def test_coefficients_of_two_are_uniform_between_the_bounds() -> None:
    draws = draw_coefficients(4000, 2, 0.65, Reproducible(torch.Generator().manual_seed(0)))[
        :, 0
    ].double()
    assert stats.kstest(draws.numpy(), stats.uniform(0.35, 0.3).cdf).pvalue > 0.01


def test_fresh_draws_each_epoch() -> None:
    draws = Reproducible(torch.Generator().manual_seed(0))
    batch = Batch(torch.randn(6, 1, 2, 2), torch.arange(6) % 3)
    first, second = (MixUp(3).on_batch(batch, 3, draws) for _ in range(2))
    assert not torch.equal(first.inputs, second.inputs)


@given(seed=st.integers(0, 1000), k=st.integers(2, 5))
def test_labels_mix_as_images_do(seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Images that are their own one-hot label must come out as the label does.
    targets = torch.randint(4, (7,), generator=generator)
    inputs = torch.nn.functional.one_hot(targets, 4).double().reshape(7, 1, 2, 2)
    mixed = MixUp(k).on_batch(Batch(inputs, targets), 4, Reproducible(generator))
    torch.testing.assert_close(mixed.inputs.reshape(7, 4), mixed.targets)


def test_given_draws_give_the_hand_computed_mix() -> None:
    batch = Batch(torch.tensor([1.0, 10.0, 100.0]).reshape(3, 1, 1, 1), torch.tensor([0, 1, 1]))
    mixing = Mixing(torch.tensor([[0, 2], [1, 0]]), torch.tensor([[0.5, 0.5], [0.6, 0.4]]))
    mixed = mixup_batch(batch, mixing, 2)
    torch.testing.assert_close(mixed.inputs.flatten(), torch.tensor([50.5, 6.4]))
    torch.testing.assert_close(mixed.targets, torch.tensor([[0.5, 0.5], [0.4, 0.6]]))
    torch.testing.assert_close(mixing.matrix(3), torch.tensor([[0.5, 0.0, 0.5], [0.4, 0.6, 0.0]]))


def test_a_mini_batch_smaller_than_k_is_no_silent_leak() -> None:
    batch = Batch(torch.zeros(2, 1, 1, 1), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="k = 4 samples cannot be mixed out of 2"):
        MixUp(4).on_batch(batch, 2, Reproducible(torch.Generator()))


def test_soft_targets_are_mixed_too() -> None:
    soft = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    batch = Batch(torch.zeros(2, 1, 1, 1), soft)
    mixing = Mixing(torch.tensor([[0, 1]]), torch.tensor([[0.4, 0.6]]))
    torch.testing.assert_close(mixup_batch(batch, mixing, 2).targets, torch.tensor([[0.4, 0.6]]))
