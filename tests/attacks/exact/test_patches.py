"""One image off the gradient of a vision transformer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flwr_leakage
import flwr_leakage._torchvision

# isort: split
from torchvision.models import VisionTransformer

from flwr_leakage.attacks.exact.patches import Patches
from flwr_leakage.audit.structure import structure
from flwr_leakage.records import InputSpec, LocalSchedule

SPEC = InputSpec((3, 16, 16), 5, (0.5,) * 3, (0.25,) * 3)


class LinearPatches(nn.Module):
    """Patches cut by a reshape, a table of positions without a class token, and a mean."""

    def __init__(self, width=32, side=4):
        super().__init__()
        self.side = side
        self.embed = nn.Linear(3 * side * side, width)
        self.positions = nn.Embedding((16 // side) ** 2, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, images):
        side = self.side
        patches = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        tokens = self.embed(patches) + self.positions.weight
        return self.head(self.block(tokens).mean(1))


def torchvisions(width=48, patch=4, zero_head=False, dropout=0.0):
    model = VisionTransformer(
        16, patch, 2, 3, width, 2 * width, dropout=dropout, num_classes=5
    ).eval()
    if not zero_head:
        nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


def draw(seed, count=1):
    torch.manual_seed(seed)
    pixels = F.interpolate(torch.rand(count, 3, 6, 6), size=16, mode="bilinear")
    return SPEC.normalize(pixels), torch.randint(5, (count,))


def gradient(model, images, labels):
    return torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))


def decibels(found, images):
    error = SPEC.denormalize(found.batch.inputs) - SPEC.denormalize(images)
    return float(-10 * error.double().square().mean().log10())


@pytest.mark.parametrize("seed", [100, 101])
@pytest.mark.parametrize("make", [torchvisions, LinearPatches])
def test_an_image_is_exact_and_proven(make, seed):
    images, labels = draw(seed)
    model = make()
    found = flwr_leakage.attack(model, gradient(model, images, labels), spec=SPEC, preset="patches")
    assert decibels(found, images) > 100 and found.stats["verdicts"] == ("proven",)
    assert torch.equal(found.batch.targets, labels)


def test_it_comes_ahead_of_all_other_parts_and_ends_the_portfolio():
    images, labels = draw(102)
    model = torchvisions()
    found = flwr_leakage.attack(model, gradient(model, images, labels), spec=SPEC)
    first = next(part for part in found.parts if part.outcome != "refused")
    assert (first.name, first.outcome) == ("patches", "solved") and decibels(found, images) > 100


def test_the_identity_holds_over_local_steps_from_a_head_of_zeros():
    images, labels = draw(103)
    images, model = images.double(), torchvisions(zero_head=True).double()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    after = {name: value.detach().clone() for name, value in model.named_parameters()}
    model.load_state_dict(before)
    found = flwr_leakage.attack(
        model, flwr_leakage.ParameterChange(before, after), spec=SPEC, preset="patches",
        schedule=LocalSchedule(0.1, 4, 1),
    )  # fmt: skip
    assert decibels(found, images) > 100


def test_a_head_of_zeros_has_its_own_sentence():
    images, labels = draw(104)
    model = torchvisions(zero_head=True)
    found = flwr_leakage.attack(model, gradient(model, images, labels), spec=SPEC, preset="patches")
    assert "'heads.head.weight' is all zero" in found.error


@pytest.mark.parametrize(
    ("make", "count", "match"),
    [
        (torchvisions, 2, "it takes 1 sample without decay, got 2"),
        (lambda: torchvisions(width=12), 1, "16 patches are more than the width 12"),
        (lambda: torchvisions(width=18, patch=4), 1, None),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(784, 5)),
            1,
            "no trained table",
        ),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 5)), 1, "no trained layer takes"),
    ],
)
def test_what_it_does_not_take_is_named(make, count, match):
    images, labels = draw(105, count)
    model = make()
    found = flwr_leakage.attack(
        model, gradient(model, images, labels), spec=SPEC, preset="patches", num_examples=count
    )
    if match is None:
        assert found.batch is not None
    else:
        assert match in found.error


def test_patches_that_look_alike_are_sharpened_by_all_layers():
    images, labels = draw(107)
    images[..., 4:] = images[..., 4:].mean((2, 3), keepdim=True) + 3e-3 * images[..., 4:]
    model = LinearPatches(48)
    with torch.no_grad():
        model.positions.weight.mul_(1e-3)
    given = gradient(model, images, labels)
    sharp, rough = (
        flwr_leakage.attack(model, given, spec=SPEC, preset=Patches(iterations=iterations))
        for iterations in (100, 0)
    )
    assert "a step on all layers" in sharp.stats["stage"]
    assert "a step on all layers" not in rough.stats["stage"]
    assert decibels(sharp, images) > decibels(rough, images) + 3


def test_frozen_positions_are_refused():
    images, labels = draw(106)
    model = torchvisions()
    model.encoder.pos_embedding.requires_grad_(False)
    trained = [value for value in model.parameters() if value.requires_grad]
    given = torch.autograd.grad(F.cross_entropy(model(images), labels), trained)
    found = flwr_leakage.attack(model, given, spec=SPEC, preset="patches")
    assert "no trained table" in found.error


def test_the_structure_says_that_the_model_is_open():
    told = structure(torchvisions(), SPEC, max_products=8)
    assert told["patches"].verdict == "applies"
    told = structure(torchvisions(zero_head=True), SPEC, max_products=8)
    assert "is all zero" in told["patches"].reason
