import pytest
import torch

from flwr_leakage.attacks.decode import consistent_signs, decode_instahide, decode_mixup
from flwr_leakage.defenses import InstaHide, MixUp
from flwr_leakage.defenses.instahide import flip_signs
from flwr_leakage.defenses.mixing import draw_mixing
from flwr_leakage.defenses.mixup import mixup_batch
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, InputSpec

SPEC = InputSpec((1, 6, 6), 10, (0.3,), (0.3,))


def smooth_images(n: int) -> torch.Tensor:
    """Images whose neighbouring pixels are similar, in [0, 1], normalised."""
    generator = torch.Generator().manual_seed(n)
    coarse = torch.rand(n, 1, 3, 3, generator=generator, dtype=torch.float64)
    images = torch.nn.functional.interpolate(coarse, size=(6, 6), mode="bilinear")
    return SPEC.normalize(images)


def encode(images: torch.Tensor, k: int, epochs: int, flip: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    batch = Batch(images, torch.arange(len(images)) % 10)
    encodings, weights = [], []
    for _ in range(epochs):
        mixing = draw_mixing(len(images), k, 0.65, Reproducible(generator))
        inputs = mixup_batch(batch, mixing, 10).inputs
        encodings.append(flip_signs(inputs, Reproducible(generator)) if flip else inputs)
        weights.append(mixing.matrix(len(images)))
    return torch.cat(encodings), torch.cat(weights)


def test_mixup_is_decoded_exactly() -> None:
    images = smooth_images(8)
    encodings, weights = encode(images, 4, 3, flip=False)
    torch.testing.assert_close(decode_mixup(encodings, weights), images, rtol=0, atol=1e-5)


def test_the_encodings_are_those_of_the_defense() -> None:
    images = smooth_images(8)
    batch = Batch(images, torch.arange(8))
    mixed = MixUp(4).on_batch(batch, 10, Reproducible(torch.Generator().manual_seed(3))).inputs
    mixing = draw_mixing(8, 4, 0.65, Reproducible(torch.Generator().manual_seed(3)))
    expected = (mixing.matrix(8).double() @ images.flatten(1)).reshape(images.shape)
    torch.testing.assert_close(mixed, expected, rtol=1e-6, atol=1e-6)
    hidden = InstaHide(4).on_batch(batch, 10, Reproducible(torch.Generator().manual_seed(3))).inputs
    torch.testing.assert_close(hidden.abs(), expected.abs(), rtol=1e-6, atol=1e-6)


def test_fewer_encodings_than_images_give_the_solution_of_least_norm() -> None:
    images = smooth_images(4)
    weights = torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)
    encodings = torch.einsum("mn,nchw->mchw", weights, images)
    decoded = decode_mixup(encodings, weights)
    torch.testing.assert_close(decoded[0], encodings[0])
    torch.testing.assert_close(decoded[1], encodings[0])
    assert not decoded[2:].any()


def test_noise_in_the_encodings_averages_out_over_epochs() -> None:
    images = smooth_images(8)
    errors = []
    for epochs in (2, 20):
        encodings, weights = encode(images, 4, epochs, flip=False)
        noise = torch.randn(
            encodings.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        decoded = decode_mixup(encodings + 0.1 * noise, weights)
        errors.append(float((decoded - images).square().mean().sqrt()))
    assert errors[1] < 0.4 * errors[0]


def test_instahide_is_decoded_with_the_right_signs() -> None:
    images = smooth_images(6)
    encodings, weights = encode(images, 3, 8, flip=True)
    found = decode_instahide(encodings, weights, SPEC, torch.Generator().manual_seed(0))
    assert found.residual < 1e-5
    torch.testing.assert_close(found.images, images, rtol=0, atol=1e-4)


def test_signs_of_a_smooth_field_are_restored() -> None:
    images = smooth_images(6).flatten(1)
    signs = (torch.rand(36, generator=torch.Generator().manual_seed(0)) < 0.5) * 2.0 - 1
    found = consistent_signs(images * signs, (1, 6, 6))
    assert torch.equal(found * found[0], signs.double() * signs[0])


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="same positive number of rows, got 0 and 0"):
        decode_mixup(torch.zeros(0, 1, 2, 2), torch.zeros(0, 2))
    with pytest.raises(ValueError, match="num_starts"):
        decode_instahide(
            torch.zeros(2, 1, 6, 6), torch.zeros(2, 2), SPEC, torch.Generator(), num_starts=0
        )
