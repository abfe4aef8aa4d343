import pytest
import torch

from flwr_leakage.data import ImageDataset


def make(images=None, labels=None, names=("a", "b"), mean=(0.25, 0.5), std=(0.5, 0.1)):
    images = torch.zeros(3, 2, 4, 5, dtype=torch.uint8) if images is None else images
    labels = torch.tensor([0, 1, 1]) if labels is None else labels
    return ImageDataset("toy", images, labels, names, mean, std)


def test_batch_is_normalised_and_denormalises_to_the_bytes():
    images = torch.randint(0, 256, (3, 2, 4, 5), dtype=torch.uint8)
    data = make(images)
    batch = data.batch([2, 0])
    assert batch.inputs.dtype == torch.float32 and batch.inputs.shape == (2, 2, 4, 5)
    assert batch.targets.tolist() == [1, 0]
    expected = (images[2, 1, 3, 4].item() / 255 - 0.5) / 0.1
    assert batch.inputs[0, 1, 3, 4].item() == pytest.approx(expected, abs=1e-5)
    restored = (data.spec.denormalize(batch.inputs) * 255).round().to(torch.uint8)
    assert torch.equal(restored, images[[2, 0]])


def test_spec_says_what_is_public():
    spec = make().spec
    assert spec.shape == (2, 4, 5) and spec.num_classes == 2 and spec.mean == (0.25, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"images": torch.zeros(3, 2, 4, 5)}, r"uint8 \(N, C, H, W\), got torch.float32"),
        ({"images": torch.zeros(3, 4, 5, dtype=torch.uint8)}, r"got torch.uint8 \(3, 4, 5\)"),
        ({"labels": torch.tensor([0, 1])}, r"int64 \(3,\), got torch.int64 \(2,\)"),
        ({"labels": torch.tensor([0, 1, 5])}, r"must lie in 0 … 1, got \[5\]"),
        ({"labels": torch.tensor([0, 1, -1])}, r"must lie in 0 … 1, got \[-1\]"),
        ({"mean": (0.5,) * 3}, "one entry for each of 2 channels"),
        ({"std": (0.5, 0.0)}, "std must be positive"),
    ],
)
def test_what_does_not_fit_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
