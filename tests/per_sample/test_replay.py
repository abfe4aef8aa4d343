"""One number says whether the training that is scored explains the update."""

import pytest
import torch
from scored import make_exposure, small_network
from torch import nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.per_sample import explain_update
from flwr_leakage.records import Batch, Exposure, LocalSchedule, Update

SCHEDULE = LocalSchedule(0.1, 3, 2, momentum=0.5)


def batch(count=4):
    inputs = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    return Batch(inputs, torch.arange(count) % 4)


def trained(network, optimizer=torch.optim.SGD, loss=nn.functional.cross_entropy, **options):
    """The round of a client that trains with torch's own loop."""
    gradient_map = GradientMap(network)
    before = gradient_map.params
    used, samples = optimizer(network.parameters(), **options), batch()
    for window in SCHEDULE.slices(4):
        used.zero_grad()
        loss(network(samples[window].inputs), samples[window].targets).backward()
        used.step()
    delta = {name: value.detach() - before[name] for name, value in network.named_parameters()}
    update = Update(delta, {}, SCHEDULE, 4)
    return Exposure(before, gradient_map.buffers, samples, samples, update, update)


def test_the_training_that_took_place_is_explained():
    network = small_network()
    gradient_map = GradientMap(network)
    found = explain_update(gradient_map, trained(network, lr=0.1, momentum=0.5))
    assert found.distance < 1e-5 and not found.fails
    assert found.sentence.startswith("the scored model explains the update to ")


@pytest.mark.parametrize(
    "other",
    [
        {"optimizer": torch.optim.Adam, "lr": 0.1},
        {"lr": 0.2, "momentum": 0.5},
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.5},
        {"lr": 0.1, "momentum": 0.5, "loss": nn.CrossEntropyLoss(reduction="sum")},
        {"lr": 0.1, "momentum": 0.5, "loss": nn.CrossEntropyLoss(torch.rand(4))},
    ],
    ids=["Adam", "learning rate", "momentum", "weight decay", "sum", "class weights"],
)
def test_another_training_is_not(other):
    network = small_network()
    gradient_map = GradientMap(network)
    found = explain_update(gradient_map, trained(network, **other))
    assert found.distance > 0.01 and found.fails
    assert "does not explain the update" in found.sentence


@pytest.mark.parametrize("kind", ["batch norm", "dropout", "frozen"])
def test_another_mode_is_not(kind):
    network = small_network(batch_norm=kind == "batch norm").train()
    if kind == "dropout":
        network.insert(2, nn.Dropout(0.5))
    gradient_map = GradientMap(network)
    if kind == "frozen":
        network[0].requires_grad_(False)
    found = explain_update(gradient_map, trained(network, lr=0.1, momentum=0.5))
    assert found.fails
    if kind == "batch norm":
        right = GradientMap(small_network(batch_norm=True), batch_norm="batch")
        fresh = small_network(batch_norm=True).train()
        assert not explain_update(right, trained(fresh, lr=0.1, momentum=0.5)).fails


def test_what_cannot_be_replayed_is_said():
    gradient_map = GradientMap(small_network())
    whole = make_exposure(gradient_map, batch(), SCHEDULE)
    part = Exposure(
        whole.params, whole.buffers, whole.private[:2], whole.defended[:2], whole.raw,
        whole.released,
    )  # fmt: skip
    found = explain_update(gradient_map, part)
    assert found.distance is None and not found.fails
    assert "of its 4 samples 2 were kept" in found.sentence


def test_an_update_of_nothing_is_not_explained_by_training():
    gradient_map = GradientMap(small_network())
    whole = make_exposure(gradient_map, batch(), SCHEDULE)
    zero = {name: torch.zeros_like(value) for name, value in whole.raw.delta.items()}
    still = Update(zero, {}, SCHEDULE, 4)
    lazy = Exposure(whole.params, whole.buffers, batch(), batch(), still, still)
    assert explain_update(gradient_map, lazy).fails
