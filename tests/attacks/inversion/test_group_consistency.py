from dataclasses import replace

import pytest
import torch
from attacked import observe

from flwr_leakage.attacks import Adam, AttackJob, GradientInversion, Normal, Restarts
from flwr_leakage.attacks.inversion.group_consistency import GroupConsistency, aligned
from flwr_leakage.records import Batch, LocalSchedule, ThreatModel


def nothing(points, rows):
    return points.new_zeros(len(points)), torch.zeros_like(points)


def test_the_penalty_is_the_distance_from_the_mean_of_the_targets_own_restarts():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    owner, labels = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([[0, 1]] * 5)
    evaluate = GroupConsistency(3.0).around(nothing, owner, labels, 2, 4)
    rows = torch.tensor([0, 2, 3])  # one restart of each target is finished
    values, gradients = evaluate(points[rows], rows)
    middle = (points[0, :4] + points[2, :4]) / 2
    expected = 3 * (points[0, :4] - middle).square().mean()
    torch.testing.assert_close(values, torch.stack([expected, expected, 0 * expected]))
    torch.testing.assert_close(gradients[0, :4], 6 * (points[0, :4] - middle) / 4)
    assert bool((gradients[:, 4:] == 0).all())
    assert bool((gradients[2] == 0).all())


@pytest.mark.parametrize("labels", [torch.tensor([[2, 2, 5]] * 2), None])
def test_samples_of_one_label_are_brought_into_the_same_order(labels):
    first = torch.tensor([[0.0], [10.0], [20.0]])
    second = torch.tensor([[11.0], [1.0], [19.0]])
    ordered, orders = aligned(torch.stack([first, second]), labels)
    assert ordered[1].flatten().tolist() == [1, 11, 19]
    assert orders.tolist() == [[0, 1, 2], [1, 0, 2]]


def test_labels_are_never_mixed():
    first = torch.tensor([[0.0], [10.0]])
    ordered, _ = aligned(torch.stack([first, first.flip(0)]), torch.tensor([[0, 1]] * 2))
    assert ordered[1].flatten().tolist() == [10, 0]
    swapped, _ = aligned(torch.stack([first, first.flip(0)]), torch.tensor([[0, 1], [1, 0]]))
    assert swapped[1].flatten().tolist() == [0, 10]


def test_gradients_lead_permuted_restarts_together():
    points = torch.tensor([[0.0, 10.0], [12.0, 1.0]], dtype=torch.float64)
    labels = torch.tensor([[0, 0]] * 2)
    evaluate = GroupConsistency(1.0).around(nothing, torch.zeros(2).long(), labels, 2, 2)
    _, gradients = evaluate(points, torch.arange(2))
    assert gradients.tolist() == [[-0.5, -1.0], [1.0, 0.5]]


def test_batched_equals_one_by_one(gradient_map, spec, images):
    schedule = LocalSchedule(0.1, batch_size=2)
    observations = [
        observe(gradient_map, Batch(images[i : i + 2], torch.tensor([1, 1])), schedule, client_id=i)
        for i in range(2)
    ]
    attack = GradientInversion(
        group=GroupConsistency(0.1),
        initialisation=Normal(),
        optimizer=Adam(iterations=10),
        dtype="float64",
        batching="vmap",
    )

    def solve(chosen, batching):
        attacker = Restarts(replace(attack, batching=batching), 3)
        return attacker(AttackJob(gradient_map, spec, chosen, ThreatModel()))

    together = solve(observations, "vmap")
    for observation, result in zip(observations, together, strict=True):
        (alone,) = solve([observation], "loop")
        torch.testing.assert_close(result.batch.inputs, alone.batch.inputs, atol=1e-6, rtol=0)
        assert result.objective == pytest.approx(alone.objective)
    with pytest.raises(ValueError, match="weight"):
        GroupConsistency(-1.0)
