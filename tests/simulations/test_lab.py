"""What the benchmarks share: windows of images, what a server sees, measures, tables."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Reconstruction
from simulations.benchmarks import lab
from simulations.benchmarks.attacks import Outcome
from simulations.benchmarks.attacks_deep import affordable

SPEC = InputSpec((3, 4, 4), 3, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


def samples(count=4):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, *SPEC.shape, generator=generator)
    return Batch(images, torch.arange(count) % 3)


def linear_map(**settings):
    torch.manual_seed(0)
    return GradientMap(nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 3)), **settings)


def test_a_window_of_a_file_is_read(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 3), np.uint8)
    np.savez(tmp_path / "cifar10_test.npz", images=images, labels=np.arange(7))
    found = lab.load(tmp_path, "test", 2, 3)
    assert found.targets.tolist() == [2, 3, 4]
    np.testing.assert_allclose(found.inputs[1].permute(1, 2, 0).numpy() * 255, images[3], rtol=1e-6)
    assert len(lab.read_images(tmp_path / "cifar10_test.npz", 2)) == 5


@pytest.mark.parametrize(
    ("first", "count", "purpose"),
    [
        (0, 100, "(development)"),
        (100, 1, "(reporting)"),
        (99, 2, "(development and reporting)"),
    ],
)
def test_a_window_says_what_it_is_for(first, count, purpose):
    assert lab.describe_window("test", first, count).endswith(purpose)


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_what_a_server_sees(mode):
    gradient_map, batch = linear_map(batch_norm=mode), samples()
    seen = lab.observe(gradient_map, batch)
    gradient = gradient_map(gradient_map.params, batch, gradient_map.buffers)
    assert all(torch.equal(seen.update.delta[name], -g) for name, g in gradient.items())
    assert seen.update.schedule == LocalSchedule(1.0, 1, 4) and seen.update.num_examples == 4
    # A client in train mode moves its buffers; those that it was sent are not what it returns.
    assert bool(seen.update.buffers) == (mode == "running")

    schedule = LocalSchedule(1e-6, 2, 2)
    stepped = lab.observe(gradient_map, batch, schedule, client_id=3, num_examples=9)
    assert (stepped.client_id, stepped.update.num_examples) == (3, 9)
    after = {name: seen.params[name] + step for name, step in stepped.update.delta.items()}
    # So small a step is seen through the rounding of the parameters: adding it back is exact.
    for name, value in after.items():
        assert torch.equal(value - seen.params[name], stepped.update.delta[name])


def test_what_was_seen_stays_when_the_model_moves_on():
    gradient_map = linear_map()
    seen = lab.observe(gradient_map, samples())
    before = {name: value.clone() for name, value in seen.params.items()}
    for value in gradient_map.model.parameters():
        value.add_(1.0)
    assert all(torch.equal(seen.params[name], value) for name, value in before.items())


def test_psnr_is_the_evaluators():
    truth = samples(1)
    noise = torch.randn(truth.inputs.shape, generator=torch.Generator().manual_seed(1))
    found = SPEC.normalize(truth.inputs) + 0.3 * noise
    private = lab.normalize(truth, SPEC)
    reconstruction = Reconstruction(Batch(found, truth.targets), 0.0)
    expected = lab.evaluate(reconstruction, private, SPEC, Evaluator())["psnr"]
    assert lab.psnr(found, truth.inputs, SPEC) == pytest.approx(expected[0], abs=1e-4)
    assert lab.psnr(SPEC.normalize(truth.inputs), truth.inputs, SPEC) == pytest.approx(120, abs=20)
    assert lab.psnr(None, truth.inputs, SPEC) == 0
    failed = lab.evaluate(Reconstruction(None, math.nan, error="no"), private, SPEC, Evaluator())
    assert failed["psnr"] == []


def test_tables(capsys):
    lab.print_header("a", "b")
    lab.print_row(1, "x")
    assert capsys.readouterr().out == lab.markdown(["a", "b"], [[1, "x"]])
    assert lab.spread([1.0, 3.0], 1) == "2.0 (1.0 to 3.0, n = 2)" and lab.spread([], 1) == "–"


@pytest.mark.parametrize("count", [1, 4])
def test_a_budget_is_one_images_however_many_are_attacked(count):
    """An iteration takes 0.5 CPU seconds an image, and starting 2."""
    targets = lab.observe_each(linear_map(), samples(count))

    def attack(group, iterations):
        return Outcome([None] * len(group), [2 + 0.5 * iterations] * len(group), [])

    assert affordable(attack, targets, 50.0) == pytest.approx(96, abs=1)
