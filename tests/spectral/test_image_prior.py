import math

import pytest
import torch

from flwr_leakage.records import InputSpec
from flwr_leakage.spectral.image_prior import ImagePrior, cosine_transform

SPECS = [InputSpec((3, 8, 6), 4, (0.4, 0.5, 0.6), (0.3, 0.2, 0.1)), InputSpec((1, 5, 7), 2)]


def draw(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("spec", SPECS)
def test_pull_is_the_transpose_of_push(spec):
    prior = ImagePrior.of(spec)
    s, g = draw(spec.shape), draw(spec.shape, seed=1)
    assert float((prior.push(s) * g).sum()) == pytest.approx(float((s * prior.pull(g)).sum()))
    torch.testing.assert_close(
        prior.single().push(s.float()), prior.push(s).float(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("spec", SPECS)
def test_grey_is_in_the_middle_and_samples_have_the_spread_of_images(spec):
    prior = ImagePrior.of(spec)
    pixels = spec.denormalize(prior.inputs(torch.zeros(spec.shape, dtype=torch.float64)))
    torch.testing.assert_close(pixels, torch.full_like(pixels, 0.5))
    samples = torch.stack([prior.inputs(draw(spec.shape, seed))[0] for seed in range(500)])
    pixels = spec.denormalize(samples)
    lightness = pixels.mean(1, keepdim=True) * pixels.shape[1] ** 0.5
    assert float(lightness.std()) == pytest.approx(0.25, rel=0.1)


def test_neighbours_and_colours_are_alike_in_samples():
    spec = SPECS[0]
    prior = ImagePrior.of(spec)
    samples = torch.stack([prior.inputs(draw(spec.shape, seed))[0] for seed in range(500)])
    red, green = (spec.denormalize(samples)[:, c] - 0.5 for c in (0, 1))

    def correlation(a, b):
        return float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt())

    assert correlation(red, green) > 0.7
    assert correlation(red[:, :, 1:], red[:, :, :-1]) > 0.5
    assert abs(correlation(red[:, 0, 0], red[:, -1, -1])) < 0.5


@pytest.mark.parametrize("spec", SPECS)
def test_coordinates_are_the_inverse_of_inputs(spec):
    prior, s = ImagePrior.of(spec), torch.stack([draw(spec.shape), 2 * draw(spec.shape)])
    inputs = prior.inputs(s)
    torch.testing.assert_close(prior.coordinates(inputs), s)
    assert torch.equal(prior.coordinates(inputs)[1:], prior.coordinates(inputs[1:]))


def test_a_fitted_prior_has_the_spectrum_of_the_image():
    spec = InputSpec((3, 32, 32), 2, (0.4, 0.5, 0.6), (0.3, 0.2, 0.1))
    prior = ImagePrior.of(spec)
    rough = 2 * prior.deviations.clamp_min(0.3)  # louder, and white from some frequency on
    image = prior.inputs(rough / prior.deviations * draw(spec.shape))
    fitted = prior.fitted(image)
    high = slice(4, None)  # rings of few coefficients are uncertain
    ratio = (fitted.deviations / rough)[:, high, high]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=0.4)
    assert float(fitted.coordinates(image).square().mean()) == pytest.approx(1, rel=0.2)
    torch.testing.assert_close(fitted.inputs(fitted.coordinates(image)), image)


def test_a_grey_image_has_a_spectrum_too():
    prior = ImagePrior.of(SPECS[0])
    assert bool((prior.fitted(prior.grey).deviations > 0).all())


def test_the_cosine_transform_is_orthonormal_and_has_the_known_entries():
    size = 7
    found = cosine_transform(size)
    torch.testing.assert_close(found @ found.T, torch.eye(size, dtype=torch.float64))
    place, frequency = torch.arange(size).double() + 0.5, torch.arange(size).double()[:, None]
    expected = torch.cos(torch.pi * place * frequency / size) * (2 / size) ** 0.5
    expected[0] /= 2**0.5
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("settings", "got"),
    [({"spread": 0.0}, "0.0, 0.1 and inf"), ({"fall": -1.0}, "0.25, 0.1 and -1.0")],
)
def test_a_prior_without_spread_or_fall_is_refused(settings, got):
    with pytest.raises(ValueError, match=f"above 0, got {got}"):
        ImagePrior.of(SPECS[0], **settings)


def test_natural_images_have_colours_and_fall_at_their_highest_frequencies():
    spec = InputSpec((3, 32, 32), 10)
    natural, plain = ImagePrior.natural(spec).deviations, ImagePrior.of(spec, chroma=1.0).deviations
    shares = (natural / plain).square()
    expected = torch.tensor([1.0, 0.1, 0.04], dtype=torch.float64)
    torch.testing.assert_close(shares[:, 0, 0], expected)
    # A fall of 0.75 of the highest frequency leaves 1/e at 24 of 32.
    torch.testing.assert_close(shares[:, 24, 0], expected / math.e)
    torch.testing.assert_close(shares[:, 0, 24], expected / math.e)
