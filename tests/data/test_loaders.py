"""npz files, torchvision's layouts and image folders, on small files written here."""

import gzip
import hashlib
import pickle
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from flwr_leakage.data import image_folder, npz_dataset, torchvision_dataset

RANDOM = np.random.default_rng(0)
GREY = RANDOM.integers(0, 256, (6, 28, 28), dtype=np.uint8)
COLOUR = RANDOM.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 3, 4, 4])


class TestNpz:
    @pytest.mark.parametrize("images", [GREY, COLOUR], ids=["grey", "colour"])
    def test_loads_both_parts(self, tmp_path, images):
        np.savez(tmp_path / "toy_train.npz", images=images, labels=LABELS)
        np.savez(tmp_path / "toy_test.npz", images=images[:2], labels=LABELS[:2].astype(np.uint8))
        channels = 1 if images.ndim == 3 else 3
        train, test = npz_dataset(tmp_path, "toy", [0.5] * channels, [0.5] * channels)
        assert (len(train), len(test)) == (6, 2)
        first = images[1] if images.ndim == 3 else images[1, :, :, 0]
        assert np.array_equal(train.images[1, 0].numpy(), first)
        # The test set lacks class 4, but knows it.
        assert train.class_names == test.class_names == ("0", "1", "2", "3", "4")

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({"images": GREY}, r"toy_train.npz must .*lacks \['labels'\] and has \['images'\]"),
            ({"x": GREY, "y": LABELS}, r"lacks \['images', 'labels'\] and has \['x', 'y'\]"),
            ({"images": GREY, "labels": LABELS[:3]}, r"toy_train.npz must be 6 integers"),
            ({"images": GREY / 255, "labels": LABELS}, r"must be uint8 .*got float64"),
            ({"images": GREY, "labels": LABELS / 2}, r"integers, got float64"),
            (
                {"images": GREY, "labels": np.array([print] * 6, dtype=object)},
                "toy_train.npz must be an .npz file .*allow_pickle=False",
            ),
        ],
    )
    def test_wrong_contents_are_named(self, tmp_path, arrays, message):
        np.savez(tmp_path / "toy_train.npz", **arrays)
        np.savez(tmp_path / "toy_test.npz", images=GREY, labels=LABELS)
        with pytest.raises(ValueError, match=message):
            npz_dataset(tmp_path, "toy", [0.5], [0.5])

    @pytest.mark.parametrize("content", [b"", b"not an archive"])
    def test_a_file_that_is_no_archive(self, tmp_path, content):
        (tmp_path / "toy_train.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"toy_train\.npz must be an \.npz file"):
            npz_dataset(tmp_path, "toy", [0.5], [0.5])

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"toy_train\.npz does not exist; expected"):
            npz_dataset(tmp_path, "toy", [0.5], [0.5])


def write_mnist(folder):
    folder.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 3)):
        images = struct.pack(">IIII", 0x803, count, 28, 28) + GREY[:count].tobytes()
        labels = struct.pack(">II", 0x801, count) + LABELS[:count].astype(np.uint8).tobytes()
        for name, content in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{part}-{name}-ubyte").write_bytes(content)
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(content))


def write_cifar10(folder, monkeypatch):
    """Files with CIFAR-10's layout; torchvision checks their MD5 before it unpickles them."""
    from torchvision.datasets import CIFAR10

    folder.mkdir()

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    rows = COLOUR.transpose(0, 3, 1, 2).reshape(6, -1)
    train = write("data_batch_1", {"data": rows, "labels": LABELS.tolist()})
    test = write("test_batch", {"data": rows[:2], "labels": LABELS[:2].tolist()})
    meta = write("batches.meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(CIFAR10, "train_list", [train])
    monkeypatch.setattr(CIFAR10, "test_list", [test])
    monkeypatch.setattr(
        CIFAR10, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]}
    )


class TestTorchvision:
    @pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
    def test_mnist_files(self, tmp_path, name):
        write_mnist(tmp_path / name / "raw")
        train, test = torchvision_dataset(name, tmp_path, [0.1], [0.3])
        assert (len(train), len(test)) == (6, 3)
        assert np.array_equal(train.images[:, 0].numpy(), GREY)
        assert train.labels.tolist() == LABELS.tolist() and train.spec.num_classes == 10

    def test_cifar_files(self, tmp_path, monkeypatch):
        write_cifar10(tmp_path / "cifar-10-batches-py", monkeypatch)
        train, test = torchvision_dataset("CIFAR10", tmp_path, [0.5] * 3, [0.2] * 3)
        assert np.array_equal(train.images.permute(0, 2, 3, 1).numpy(), COLOUR)
        assert len(test) == 2 and train.class_names == tuple("abcdefghij")

    @pytest.mark.parametrize("name", ["MNIST", "CIFAR10"])
    def test_missing_files_say_what_to_do(self, tmp_path, name):
        with pytest.raises(FileNotFoundError, match=rf"{name} was not found.*download=true"):
            torchvision_dataset(name, tmp_path, [0.5], [0.5])

    def test_unknown_name(self, tmp_path):
        with pytest.raises(ValueError, match=r"name must be one of .*'CIFAR10'.* got 'CIFAR11'"):
            torchvision_dataset("CIFAR11", tmp_path, [0.5], [0.5])


class TestImageFolder:
    @pytest.fixture
    def folder(self, tmp_path):
        for label, (name, mode) in enumerate([("cats", "RGB"), ("dogs", "L")]):
            (tmp_path / name).mkdir()
            for index in range(5):
                colour = (40 * index, 255 * label, 0) if mode == "RGB" else 40 * index
                Image.new(mode, (20, 30 + index), colour).save(tmp_path / name / f"{index}.png")
        return tmp_path

    def test_loads_squares_and_splits_by_class(self, folder):
        train, test = image_folder(folder, 16, [0.5] * 3, [0.5] * 3, test_fraction=0.4)
        assert train.spec.shape == (3, 16, 16) and train.class_names == ("cats", "dogs")
        assert torch.bincount(train.labels).tolist() == [3, 3]
        assert torch.bincount(test.labels).tolist() == [2, 2]
        cats = torch.cat([part.images[part.labels == 0] for part in (train, test)])
        assert sorted(cats[:, 0, 8, 8].tolist()) == [0, 40, 80, 120, 160]
        assert (cats[:, 1:] == 0).all()

    def test_split_is_a_function_of_the_seed(self, folder):
        first, _ = image_folder(folder, 8, [0.5] * 3, [0.5] * 3, seed=1)
        second, _ = image_folder(folder, 8, [0.5] * 3, [0.5] * 3, seed=1)
        other, _ = image_folder(folder, 8, [0.5] * 3, [0.5] * 3, seed=2)
        assert torch.equal(first.images, second.images)
        assert not torch.equal(first.images, other.images)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"size": 0}, "size must be at least 1 pixel, got 0"),
            ({"test_fraction": 1.0}, r"test_fraction must lie in \(0, 1\), got 1.0"),
            ({"test_fraction": 0.01}, "test_fraction 0.01 leaves no test samples of 10"),
        ],
    )
    def test_impossible_settings(self, folder, settings, message):
        with pytest.raises(ValueError, match=message):
            image_folder(folder, **{"size": 8, "mean": [0.5] * 3, "std": [0.5] * 3, **settings})

    def test_a_given_split_is_kept(self, folder, tmp_path):
        given = tmp_path / "given"
        for part, kept in (("train", (0, 1, 2)), ("val", (3, 4))):
            for label in ("cats", "dogs"):
                (given / part / label).mkdir(parents=True)
                for path in [sorted((folder / label).iterdir())[i] for i in kept]:
                    (given / part / label / path.name).write_bytes(path.read_bytes())
        settings = {"mean": [0.5] * 3, "std": [0.5] * 3, "test_fraction": None}
        train, test = image_folder(given, 8, **settings)
        assert (len(train), len(test)) == (6, 4) and test.class_names == ("cats", "dogs")
        (given / "val" / "dogs").rename(given / "val" / "wolves")
        with pytest.raises(ValueError, match=r"must have the same classes, got .*'wolves'"):
            image_folder(given, 8, **settings)

    def test_missing_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            image_folder(tmp_path / "nowhere", 8, [0.5] * 3, [0.5] * 3)
