import numpy as np
import pytest
import torch
from PIL import Image

from flwr_leakage.data import FederatedDataset, LoadedPartition

IMAGES = np.random.default_rng(0).integers(0, 256, (9, 8, 6), dtype=np.uint8)


class FakePartitioner:
    """As flwr-datasets' partitioners: ``load_partition(i)`` gives a table by columns."""

    def __init__(self, sizes, column="image", as_pil=True):
        self.edges = np.cumsum([0, *sizes])
        self.column = column
        self.convert = Image.fromarray if as_pil else (lambda image: image)

    def load_partition(self, partition_id):
        rows = range(self.edges[partition_id], self.edges[partition_id + 1])
        return {
            self.column: [self.convert(IMAGES[row]) for row in rows],
            "label": [row % 3 for row in rows],
        }


def adapt(partitioner, num_partitions=3, **settings):
    return LoadedPartition(
        partitioner, num_partitions, "toy", (0.5,), (0.25,), ("a", "b", "c"), **settings
    )


@pytest.mark.parametrize("as_pil", [True, False])
def test_clients_keep_their_samples(as_pil):
    partitioner = FakePartitioner([2, 4, 3], as_pil=as_pil)
    loaded = adapt(partitioner)
    train, partitions = loaded.load()
    assert [len(part) for part in partitions] == [2, 4, 3]
    assert np.array_equal(train.images[partitions[1], 0].numpy(), IMAGES[2:6])
    assert train.labels[partitions[2]].tolist() == [0, 1, 2]

    data = FederatedDataset(train, loaded.convert(partitioner.load_partition(0)), partitions, 0)
    batch = data.client_batch(1, 1, 4)
    pixels = (data.spec.denormalize(batch.inputs) * 255).round().to(torch.uint8)
    assert {image.numpy().tobytes() for image in pixels} == {i.tobytes() for i in IMAGES[2:6]}


def test_an_empty_client_stays_a_client():
    train, partitions = adapt(FakePartitioner([3, 0, 6])).load()
    assert len(train) == 9 and [len(part) for part in partitions] == [3, 0, 6]


def test_other_column_names():
    train, _ = adapt(FakePartitioner([3, 3, 3], column="img"), image_column="img").load()
    assert len(train) == 9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: adapt(FakePartitioner([3, 3, 3], column="img")),
            "toy must have the column 'image'",
        ),
        (lambda: adapt(FakePartitioner([0, 0, 0])), "toy must hold at least one image"),
        (lambda: adapt(FakePartitioner([3]), num_partitions=0), "at least 1, got 0"),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make().load()
