import pytest
import torch

from flwr_leakage.data import FederatedDataset, TextDataset, python_docs


@pytest.fixture(scope="module")
def docs():
    return python_docs(length=12, vocabulary=300, topics=("debugger", "assignment"))


def test_texts_are_distinct_stratified_and_the_same_each_time(docs):
    train, test = docs
    texts = torch.cat([train.ids, test.ids])
    assert train.words == test.words and len(train.words) == 300
    # Distinct words may share the id of rare ones, so that few texts look alike.
    assert len(texts.unique(dim=0)) > 0.98 * len(texts)
    shares = torch.bincount(test.labels) / torch.bincount(torch.cat([train.labels, test.labels]))
    assert shares.tolist() == pytest.approx([0.2, 0.2], abs=0.01)
    again, _ = python_docs(length=12, vocabulary=300, topics=("debugger", "assignment"))
    assert torch.equal(again.ids, train.ids) and torch.equal(again.labels, train.labels)


def test_short_texts_are_padded_at_the_end_and_hold_at_least_six_tokens(docs):
    train, _ = docs
    lengths = (train.ids != 0).sum(1)
    assert lengths.min() >= 6 and lengths.max() == 12
    assert bool(((train.ids != 0) == (torch.arange(12) < lengths[:, None])).all())


def test_frequent_words_have_small_ids(docs):
    train, test = docs
    counts = torch.bincount(torch.cat([train.ids, test.ids]).flatten(), minlength=300)
    assert bool((counts[2:-1] >= counts[3:]).all())


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"length": 3}, "length must be at least 6"),
        ({"vocabulary": 2}, "vocabulary must be at least 3"),
        ({"topics": ("no-topic",)}, "topics must be names of Python's help"),
    ],
)
def test_wrong_settings_are_named(given, match):
    with pytest.raises(ValueError, match=match):
        python_docs(**given)


def test_an_id_without_a_word_is_refused():
    ids, labels = torch.tensor([[1, 5]]), torch.tensor([0])
    with pytest.raises(ValueError, match=r"ids of x must lie in 0 … 2, got \[5\]"):
        TextDataset("x", ids, labels, ("a",), ("", "b", "c"))


def test_clients_get_batches_of_ids(docs):
    train, test = docs
    data = FederatedDataset(train, test, (torch.arange(5), torch.arange(5, 9)), seed=0)
    batch = data.client_batch(1, 1, 3)
    assert batch.inputs.shape == (3, 12) and batch.inputs.dtype == torch.int64
    assert data.spec.is_text and data.spec.padding == 0
