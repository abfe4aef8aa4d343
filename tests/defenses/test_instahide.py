from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.defenses import InstaHide, MixUp, load_public_images
from flwr_leakage.defenses.instahide import flip_signs, instahide_batch
from flwr_leakage.defenses.mixing import Mixing
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch


@given(seed=st.integers(0, 1000), height=st.integers(1, 5))
def test_sign_flips_leave_the_absolute_value(seed: int, height: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3, 1, height, 3, generator=generator)
    flipped = flip_signs(inputs, Reproducible(generator))
    assert torch.equal(flipped.abs(), inputs.abs())


def test_half_of_the_signs_are_flipped() -> None:
    ones = torch.ones(10, 1, 32, 32)
    signs = flip_signs(ones, Reproducible(torch.Generator().manual_seed(0))).flatten()
    assert abs(float(signs.mean())) < 4 / 10_240**0.5
    # Neither neighbours nor the signs of one byte hang together.
    for lag in range(1, 17):
        assert abs(float((signs[lag:] * signs[:-lag]).mean())) < 4.5 / 10_240**0.5


def test_intra_is_mixup_up_to_signs() -> None:
    batch = Batch(torch.randn(8, 1, 4, 4), torch.arange(8) % 3)
    hidden = InstaHide(4).on_batch(batch, 3, Reproducible(torch.Generator().manual_seed(2)))
    mixed = MixUp(4).on_batch(batch, 3, Reproducible(torch.Generator().manual_seed(2)))
    assert torch.equal(hidden.inputs.abs(), mixed.inputs.abs())
    assert not torch.equal(hidden.inputs, mixed.inputs)
    torch.testing.assert_close(hidden.targets, mixed.targets)


def test_inter_mixes_two_private_and_public_images() -> None:
    public = torch.full((5, 1, 2, 2), 100.0)
    defense = InstaHide(4, "inter", public=public)
    mixing = defense.draw_mixing(6, Reproducible(torch.Generator().manual_seed(0)))
    assert bool((mixing.indices[:, :2] < 6).all()) and bool((mixing.indices[:, 2:] >= 6).all())
    assert all(len(set(row)) == 4 for row in mixing.indices.tolist())


def test_labels_are_those_of_private_images_only() -> None:
    batch = Batch(torch.zeros(2, 1, 1, 1), torch.tensor([0, 1]))
    mixing = Mixing(torch.tensor([[0, 1, 2]]), torch.tensor([[0.2, 0.3, 0.5]]))
    public = torch.full((1, 1, 1, 1), 8.0)
    encoded = instahide_batch(batch, mixing, 2, public)
    torch.testing.assert_close(encoded.inputs.flatten(), torch.tensor([4.0]))
    torch.testing.assert_close(encoded.targets, torch.tensor([[0.4, 0.6]]))


@pytest.mark.parametrize("shape", [(3, 4, 4), (3, 4, 4, 2)])
def test_public_sets_are_read_and_normalised(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = np.full(shape, 255, dtype=np.uint8)
    np.savez(tmp_path / "public.npz", images=images)
    channels = shape[3] if len(shape) == 4 else 1
    public = load_public_images(str(tmp_path / "public.npz"), [0.5] * channels, [0.25] * channels)
    assert public.shape == (3, channels, 4, 4)
    assert torch.equal(public, torch.full_like(public, 2.0))


def test_a_public_set_of_another_kind_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "public.npz", pictures=np.zeros((1, 2, 2), dtype=np.uint8))
    with pytest.raises(ValueError, match="must hold uint8 'images'"):
        load_public_images(str(tmp_path / "public.npz"))
