import math
from functools import partial

import pytest
import torch

from flwr_leakage.records import InputSpec
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.patch_prior import (
    ANGLES,
    COLOURFUL,
    CONTRASTS,
    PatchPrior,
    covariances,
)

COLOUR = InputSpec((3, 9, 6), 4, (0.4, 0.5, 0.6), (0.3, 0.2, 0.1))
SPECS = [COLOUR, InputSpec((1, 5, 7), 2), InputSpec((2, 3, 8), 2), InputSpec((1, 1, 1), 2)]
PLAIN = InputSpec((1, 8, 8), 2)


def images(spec, count=1, seed=0, size=0.2):
    draws = torch.randn(count, *spec.shape, generator=torch.Generator().manual_seed(seed))
    return spec.normalize(0.5 + size * draws.double())


def prior_of(spec, stride=2):
    return PatchPrior.of(ImagePrior.of(spec), stride)


def rows_apart(spec, top, bottom):
    pixels = torch.full((1, *spec.shape), top, dtype=torch.float64)
    pixels[..., spec.shape[1] // 2 :, :] = bottom
    return pixels


def energy(cost, inputs):
    about = inputs - cost.grey
    return float((about * cost.product(about)).sum())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_cost_is_that_of_every_patch(spec, stride):
    prior, inputs = prior_of(spec, stride), images(spec)
    cost = prior.at(inputs)
    about = (spec.denormalize(inputs) - 0.5)[0]
    side = min(4, *spec.shape[1:])
    sigma = covariances(spec.shape[0], side)
    total, seen, number = 0.0, torch.zeros(spec.shape), 0
    starts = [sorted({*range(0, size - side, stride), size - side}) for size in spec.shape[1:]]
    for top in starts[0]:
        for left in starts[1]:
            patch = about[:, top : top + side, left : left + side].flatten()
            seen[:, top : top + side, left : left + side] += 1
            kind = int(cost.kinds[0, number])
            total += float(patch @ torch.linalg.solve(sigma[kind], patch))
            densities = [
                float(-torch.logdet(each) - patch @ torch.linalg.solve(each, patch))
                for each in sigma
            ]
            assert densities[kind] == pytest.approx(max(densities))
            number += 1
    assert bool((seen > 0).all())
    share = about.numel() / (number * side**2 * spec.shape[0])
    assert energy(cost, inputs) == pytest.approx(share * total, rel=1e-6)


def test_the_product_is_that_of_a_symmetric_matrix():
    cost = prior_of(COLOUR).at(images(COLOUR))
    first, second = images(COLOUR, seed=1), images(COLOUR, seed=2)
    products = [float((a * cost.product(b)).sum()) for a, b in ((first, second), (second, first))]
    assert products[0] == pytest.approx(products[1])


def test_noise_has_the_covariance_of_the_cost():
    cost = prior_of(COLOUR).at(images(COLOUR))
    direction = images(COLOUR, seed=3) - images(COLOUR, seed=4)
    generator = torch.Generator().manual_seed(0)
    draws = [float((direction * cost.noise(generator)).sum()) for _ in range(2000)]
    variance = sum(draw**2 for draw in draws) / len(draws)
    assert variance == pytest.approx(float((direction * cost.product(direction)).sum()), rel=0.1)


def test_images_of_a_batch_have_their_own_kinds():
    prior, inputs = prior_of(COLOUR), torch.cat([images(COLOUR), images(COLOUR, 1, 1, 0.01)])
    both, each = prior.at(inputs), [prior.at(image[None]) for image in inputs]
    assert not torch.equal(each[0].kinds, each[1].kinds)
    torch.testing.assert_close(
        both.product(inputs),
        torch.cat([one.product(image[None]) for one, image in zip(each, inputs, strict=True)]),
    )
    single = prior.at(inputs.float())
    assert single.product(inputs.float()).dtype == torch.float32
    torch.testing.assert_close(
        single.product(inputs.float()).double(), both.product(inputs), rtol=1e-3, atol=1e-2
    )


def test_kinds_are_equal_in_flat_places_and_directed_along_an_edge():
    per_colour = 1 + ANGLES
    prior = prior_of(PLAIN, stride=1)
    noise = 0.002 * torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    flat = prior.at(PLAIN.normalize(torch.full((1, 1, 8, 8), 0.3).double() + noise)).kinds
    assert bool((flat // per_colour <= 1).all())  # of contrasts 0.003 and 0.007
    pixels = rows_apart(PLAIN, 0.2, 0.8)
    for edge, direction in ((pixels, ANGLES // 2), (pixels.mT, 0)):
        kinds = prior.at(PLAIN.normalize(edge)).kinds.reshape(5, 5)
        across = kinds[2] if direction else kinds[:, 2]
        assert bool((across % per_colour == 1 + direction).all())


def test_an_edge_costs_less_and_noise_more_than_under_one_law_of_all_images():
    image_prior = ImagePrior.of(PLAIN)
    prior = PatchPrior.of(image_prior)
    edge = PLAIN.normalize(rows_apart(PLAIN, 0.2, 0.8))
    noise = 0.02 * torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)).double()
    noisy = edge + noise / PLAIN.std[0]

    def excess(inputs):
        return float(image_prior.coordinates(inputs).square().sum())

    own = partial(energy, prior.at(edge))
    assert own(noisy) - own(edge) > 3 * (excess(noisy) - excess(edge)) > 0


def test_covariances_are_of_all_contrasts_colours_and_directions():
    plain, coloured = covariances(1, 4), covariances(3, 2)
    assert len(plain) == len(CONTRASTS) * (1 + ANGLES)
    assert len(coloured) == len(CONTRASTS) * len(COLOURFUL) * (1 + ANGLES)
    for each in (plain, coloured):
        torch.testing.assert_close(each, each.mT)
        assert bool((torch.linalg.eigvalsh(each) > 0).all())
    # What directions 0 and 90 degrees see is the same, turned by a right angle.
    turn = torch.arange(16).reshape(4, 4).T.flatten()
    torch.testing.assert_close(plain[1], plain[1 + ANGLES // 2][turn][:, turn])
    deviations = (plain[:, 0, 0] - 0.25**2).sqrt()
    assert float(deviations[-1]) == pytest.approx(math.sqrt(0.5**2 + 1 / 255**2 / 12))


def test_a_stride_of_none_is_refused():
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        prior_of(PLAIN, stride=0)
