import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.data import FederatedDataset, ImageDataset


def numbered(count: int) -> ImageDataset:
    """Sample i is an image of constant value i."""
    images = torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    return ImageDataset("toy", images, torch.arange(count) % 3, ("a", "b", "c"), (0.0,), (1.0,))


def federate(sizes, seed=0) -> FederatedDataset:
    train = numbered(sum(sizes))
    partitions = torch.randperm(len(train), generator=torch.Generator().manual_seed(9))
    return FederatedDataset(train, numbered(10), partitions.split(sizes), seed)


@settings(deadline=None, max_examples=50)
@given(
    size=st.integers(1, 40),
    num_examples=st.integers(1, 40),
    seed=st.integers(0, 100),
    server_round=st.integers(1, 50),
)
def test_a_round_holds_distinct_samples_of_its_client(size, num_examples, seed, server_round):
    data = federate([5, size], seed)
    if num_examples > size:
        with pytest.raises(ValueError, match=rf"1 … {size}.*client 1, got {num_examples}"):
            data.client_indices(1, server_round, num_examples)
        return
    indices = data.client_indices(1, server_round, num_examples)
    assert len(indices) == num_examples == len(set(indices.tolist()))
    assert set(indices.tolist()) <= set(data.partitions[1].tolist())
    again = federate([5, size], seed).client_indices(1, server_round, num_examples)
    assert torch.equal(indices, again)


def test_an_epoch_shows_every_sample_once_then_reshuffles():
    data = federate([12])
    rounds = [data.client_indices(0, server_round, 4) for server_round in range(1, 7)]
    first, second = torch.cat(rounds[:3]), torch.cat(rounds[3:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(12))
    assert not torch.equal(first, second)


def test_seed_and_client_change_the_order():
    train = numbered(40)
    data, other = (
        FederatedDataset(train, train, torch.arange(40).split(20), seed) for seed in (0, 1)
    )
    first = data.client_indices(0, 1, 20)
    assert not torch.equal(first, other.client_indices(0, 1, 20))
    assert not torch.equal(first, data.client_indices(1, 1, 20) - 20)


def test_client_batch_is_the_indexed_samples():
    data = federate([6, 7])
    batch = data.client_batch(1, 3, 2)
    indices = data.client_indices(1, 3, 2)
    assert torch.equal((batch.inputs[:, 0, 0, 0] * 255).round().long(), indices)
    assert torch.equal(batch.targets, indices % 3)


def test_test_batches_cover_the_test_set_in_order():
    data = federate([3])
    batches = list(data.test_batches(4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    seen = torch.cat([batch.inputs[:, 0, 0, 0] for batch in batches]) * 255
    assert seen.round().tolist() == list(range(10))
    assert [len(batch) for batch in data.test_batches(4, limit=6)] == [4, 2]
    assert sum(len(batch) for batch in data.test_batches(4, limit=99)) == 10


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda d: d.client_batch(1, 1, 1), "client 1 has no samples, but num_examples is 1"),
        (lambda d: d.client_batch(0, 1, 6), "1 … 5, the number of samples of client 0, got 6"),
        (lambda d: d.client_batch(0, 1, 0), "client 0, got 0"),
        (lambda d: d.client_batch(2, 1, 1), "client_id must lie in 0 … 1, got 2"),
        (lambda d: d.client_batch(-1, 1, 1), "client_id must lie in 0 … 1, got -1"),
        (lambda d: d.client_batch(0, 0, 1), "server_round must be at least 1, got 0"),
        (lambda d: list(d.test_batches(0)), "at least 1, got 0 and None"),
        (lambda d: list(d.test_batches(2, limit=0)), "at least 1, got 2 and 0"),
        (
            lambda d: FederatedDataset(d.train, d.test, (torch.tensor([99]),), 0),
            "indices of client 0 must lie in 0 … 4, got 99 … 99",
        ),
    ],
)
def test_impossible_requests_are_named(act, message):
    with pytest.raises(ValueError, match=message):
        act(federate([5, 0]))


def test_train_and_test_must_be_alike():
    other = ImageDataset(
        "toy",
        torch.zeros(2, 1, 2, 2, dtype=torch.uint8),
        torch.zeros(2).long(),
        ("a",),
        (0.0,),
        (1.0,),
    )
    with pytest.raises(ValueError, match="train and test must have the same shape"):
        FederatedDataset(numbered(3), other, (torch.arange(3),), 0)
