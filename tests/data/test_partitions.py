import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.data import (
    DirichletPartition,
    DirichletSizePartition,
    IidPartition,
    SizedPartition,
)
from flwr_leakage.randomness import make_generator

LABELS = torch.arange(10).repeat_interleave(100)


@settings(deadline=None, max_examples=40)
@given(
    num_examples=st.integers(1, 200),
    num_partitions=st.integers(1, 20),
    alpha=st.sampled_from([0.05, 0.5, 100.0]),
    seed=st.integers(0, 1000),
)
def test_every_sample_has_exactly_one_client(num_examples, num_partitions, alpha, seed):
    labels = torch.randint(0, 5, (num_examples,), generator=make_generator(seed))
    for partition in (
        IidPartition(min(num_partitions, num_examples)),
        DirichletPartition(num_partitions, alpha, min_samples=0),
    ):
        clients = partition(labels, make_generator(seed))
        assert len(clients) == partition.num_partitions
        assert torch.cat(clients).sort().values.tolist() == list(range(num_examples))


def test_iid_sizes_differ_by_one_and_labels_mix():
    clients = IidPartition(7)(LABELS, make_generator(0))
    assert {len(client) for client in clients} == {142, 143}
    assert all(LABELS[client].unique().numel() == 10 for client in clients)


def largest_share(clients):
    """The mean share of a client's most frequent class."""
    shares = [torch.bincount(LABELS[c], minlength=10).max() / len(c) for c in clients]
    return torch.stack(shares).mean().item()


def test_alpha_sets_the_label_skew():
    skews = [
        largest_share(DirichletPartition(5, alpha)(LABELS, make_generator(1)))
        for alpha in (0.05, 0.5, 1e6)
    ]
    assert skews[0] > skews[1] > skews[2]
    assert skews[2] == pytest.approx(0.1, abs=0.001)  # the limit: every class alike
    equal = DirichletPartition(5, 1e6)(LABELS, make_generator(1))
    assert all(abs(len(client) - 200) <= 2 for client in equal)


def test_shares_have_the_dirichlet_s_variance():
    """Var[p] = (1/m)(1 − 1/m) / (mα + 1) for m clients."""
    labels = torch.arange(300).repeat_interleave(100)
    clients = DirichletPartition(4, 0.5, min_samples=0)(labels, make_generator(2))
    shares = torch.stack([torch.bincount(labels[c], minlength=300) for c in clients]) / 100
    assert shares.var().item() == pytest.approx(0.25 * 0.75 / 3, rel=0.1)


def test_min_samples_is_kept():
    clients = DirichletPartition(20, 0.1, min_samples=5)(LABELS, make_generator(0))
    assert min(len(client) for client in clients) >= 5


@pytest.mark.parametrize("partition", [IidPartition(4), DirichletPartition(4, 0.5)])
def test_same_generator_same_clients(partition):
    first, second = (partition(LABELS, make_generator(3)) for _ in range(2))
    other = partition(LABELS, make_generator(4))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IidPartition(0), "num_partitions must be at least 1, got 0"),
        (lambda: IidPartition(1001), "1001 partitions of at least 1 samples need 1001"),
        (lambda: DirichletPartition(10, 0.0), "alpha must be positive and finite, got 0.0"),
        (lambda: DirichletPartition(10, 1.0, min_samples=-1), "min_samples must be ≥ 0, got -1"),
        (lambda: DirichletPartition(10, 1.0, min_samples=101), "need 1010 samples, got 1000"),
        (
            lambda: DirichletPartition(50, 0.01, min_samples=20),
            "no draw of 1000 with alpha=0.01 gave each of 50 partitions 20 samples",
        ),
    ],
)
def test_impossible_partitions_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()(LABELS, make_generator(0))


def test_given_sizes_are_those_of_the_clients_and_disjoint():
    clients = SizedPartition(3, [1, 8, 60])(LABELS, make_generator(0))
    assert [len(client) for client in clients] == [1, 8, 60]
    assert torch.cat(clients).unique().numel() == 69
    again = SizedPartition(3, [1, 8, 60])(LABELS, make_generator(0))
    assert all(torch.equal(one, other) for one, other in zip(clients, again, strict=True))


def test_sizes_that_are_not_given_are_repeated_over_the_clients():
    few = SizedPartition(3)(LABELS, make_generator(0))
    assert [len(client) for client in few] == [1, 4, 30]
    many = SizedPartition(9)(torch.zeros(2600), make_generator(0))
    assert [len(client) for client in many] == [1, 4, 30, 120, 400, 800, 1200, 1, 4]


def test_sizes_that_cannot_be_had_are_named():
    with pytest.raises(ValueError, match=r"at most 1000, .* got 1200 for 2 clients"):
        SizedPartition(2, [600, 600])(LABELS, make_generator(0))
    for number in (1, 3):
        with pytest.raises(ValueError, match=f"one size for each of {number} clients, got 2"):
            SizedPartition(number, [600, 1])
    with pytest.raises(ValueError, match=r"at least 1, got \[3, 0\]"):
        SizedPartition(2, [3, 0])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 20), st.sampled_from([0.05, 1.0, 100.0]), st.integers(0, 1000))
def test_dirichlet_sizes_deal_every_sample_and_leave_nobody_out(clients, alpha, seed):
    parts = DirichletSizePartition(clients, alpha, min_samples=3)(LABELS, make_generator(seed))
    assert torch.cat(parts).sort().values.tolist() == list(range(1000))
    assert len(parts) == clients and min(map(len, parts)) >= 3


def test_small_alpha_gives_few_clients_most_of_the_samples():
    def largest(alpha):
        draws = [DirichletSizePartition(10, alpha)(LABELS, make_generator(s)) for s in range(20)]
        return sum(max(map(len, parts)) for parts in draws) / 20

    assert largest(0.1) > 500 > 150 > largest(100.0)
