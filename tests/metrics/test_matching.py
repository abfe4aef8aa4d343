import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.metrics import match_samples
from flwr_leakage.metrics.matching import pairwise_mse


def total(truth, reconstructed, assignment):
    return sum(
        (truth[i] - reconstructed[j]).square().mean().item() for i, j in enumerate(assignment)
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(0, 10**6))
def test_assignment_is_the_best_of_all_permutations(count, seed):
    generator = torch.Generator().manual_seed(seed)
    truth, reconstructed = torch.rand(2, count, 1, 3, 3, generator=generator).double()
    assignment = match_samples(truth, reconstructed).tolist()
    best = min(total(truth, reconstructed, p) for p in itertools.permutations(range(count)))
    assert sorted(assignment) == list(range(count))
    assert abs(total(truth, reconstructed, assignment) - best) < 1e-12


def test_a_greedy_match_would_be_wrong():
    truth = torch.tensor([0.0, 0.4]).reshape(2, 1, 1, 1)
    reconstructed = torch.tensor([0.3, 0.9]).reshape(2, 1, 1, 1)
    # Truth 1 is nearest to 0.3 too; taking it first would cost 0.01 + 0.81 > 0.09 + 0.25.
    assert match_samples(truth, reconstructed).tolist() == [0, 1]


def test_permuted_batches_are_found_again():
    truth = torch.rand(8, 3, 4, 4)
    order = torch.randperm(8)
    assignment = match_samples(truth, truth[order])
    assert torch.equal(assignment, order.argsort())
    assert torch.equal(truth[order][assignment], truth)


def test_too_few_and_not_finite_reconstructions_leave_minus_one():
    truth = torch.rand(3, 1, 2, 2)
    assert match_samples(truth, truth[2:]).tolist() == [-1, -1, 0]
    broken = truth.clone()
    broken[1, 0, 0, 0] = float("nan")
    assert match_samples(truth, broken).tolist() == [0, -1, 2]
    assert match_samples(truth, truth[:0]).tolist() == [-1, -1, -1]
    assert match_samples(truth[:1], truth).tolist() == [0]


def test_pairwise_mse_keeps_small_differences():
    truth = torch.full((1, 1, 8, 8), 0.5, dtype=torch.float64)
    assert abs(pairwise_mse(truth, truth + 1e-9).item() / 1e-18 - 1) < 1e-6
