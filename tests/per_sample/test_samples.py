"""Samples on their own, of a whole round and of a part of it."""

from dataclasses import replace

import pytest
import torch
from scored import make_exposure, small_network

from flwr_leakage.defenses import LocalRound
from flwr_leakage.defenses.spectrum import sample_jacobian
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel
from flwr_leakage.per_sample import ClientSamples, separate, update_perturbation
from flwr_leakage.records import Batch, LocalSchedule


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return Batch(torch.rand(4, 1, 6, 6, generator=generator), torch.tensor([0, 3, 1, 1]))


def test_a_part_of_a_round_keeps_weights_and_batch_statistics_of_the_whole(batch):
    gradient_map = GradientMap(small_network(batch_norm=True), batch_norm="batch")
    exposure = make_exposure(gradient_map, batch, LocalSchedule(0.1, 3, 3), noise_std=1e-2)
    part = exposure.select([1, 3]).select([1])
    assert part.indices == (3,) and part.whole is exposure and len(part.private) == 1
    assert part.sample_weights().tolist() == [exposure.sample_weights()[3]]
    (whole,) = ClientSamples(gradient_map, exposure).problems()
    (alone,) = ClientSamples(gradient_map, part).problems()
    torch.testing.assert_close(alone.gradients, whole.gradients[3:])
    torch.testing.assert_close(alone.deltas, whole.deltas[3:])
    torch.testing.assert_close(alone.start(0.1), whole.start(0.1)[3:])


def test_what_a_part_of_a_round_cannot_be_is_refused(batch):
    exposure = make_exposure(GradientMap(small_network()), batch)
    with pytest.raises(ValueError, match=r"indices must lie in 0 … 3, got \(4,\)"):
        exposure.select([4])
    with pytest.raises(ValueError, match="same number of samples, got 4, 2 and 4"):
        replace(exposure, defended=batch[:2])


def test_at_the_private_point_a_part_replays_the_training_of_the_whole(batch):
    gradient_map = GradientMap(small_network())
    encoded = Batch(0.9 * batch.inputs, batch.targets)
    exposure = make_exposure(gradient_map, batch, defended=encoded)
    part = exposure.select([2])
    expected = update_perturbation(gradient_map, exposure, "private")
    assert expected.any()
    torch.testing.assert_close(update_perturbation(gradient_map, part, "private"), expected)


def test_gradients_add_up_to_the_update(batch):
    gradient_map = GradientMap(small_network(batch_norm=True))
    params, buffers = gradient_map.params, gradient_map.buffers
    weights = LocalSchedule(1.0, 1, 4).sample_weights(4)
    samples = separate(gradient_map, params, buffers, batch, weights, torch.float64)
    mean = ravel(gradient_map(params, batch, buffers))
    torch.testing.assert_close((samples.weights @ samples.gradients()).float(), mean)
    assert len(samples[1:]) == 3 and samples.inputs.dtype == torch.float64


def test_scores_and_defenses_look_at_the_same_jacobian(batch):
    """With a limit of samples, too: BatchNorm keeps the statistics of all that were kept."""
    gradient_map = GradientMap(small_network(batch_norm=True), batch_norm="batch")
    exposure = make_exposure(gradient_map, batch)
    (problem,) = ClientSamples(gradient_map, exposure).problems()
    local_round = LocalRound(gradient_map, exposure.params, exposure.buffers, batch, batch)
    operator, weights = sample_jacobian(local_round, exposure.raw.schedule, max_samples=2)
    v = torch.rand(4, 36, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(operator.matvec(v[:2]), problem.operator.matvec(v)[:2])
    assert weights.tolist() == [0.25, 0.25]
