import pytest
import torch
from torch import nn

from flwr_leakage.defenses import Chain, Clipping, Defense, GaussianNoise, GradientPruning
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Randomness, Reproducible
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Update

UPDATE = Update({"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}, {}, LocalSchedule(1.0), 1)


class Add(Defense):
    def on_batch(self, batch: Batch, num_classes: int, randomness: Randomness) -> Batch:
        return Batch(batch.inputs + 1, batch.targets)


class Double(Defense):
    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        raise ValueError("doubling is refused")

    def on_batch(self, batch: Batch, num_classes: int, randomness: Randomness) -> Batch:
        return Batch(batch.inputs * 2, batch.targets)


def test_order_is_kept_on_batches() -> None:
    batch = Batch(torch.ones(1, 1, 1, 1), torch.zeros(1, dtype=torch.int64))
    draws = Reproducible(torch.Generator())
    assert Chain([Add(), Double()]).on_batch(batch, 2, draws).inputs.item() == 4
    assert Chain([Double(), Add()]).on_batch(batch, 2, draws).inputs.item() == 3


def test_order_is_kept_on_updates() -> None:
    noise_last = Chain([GradientPruning(0.5), GaussianNoise(0.01)])
    noise_first = Chain([GaussianNoise(0.01), GradientPruning(0.5)])
    draws = Reproducible(torch.Generator().manual_seed(0))
    assert (noise_last.on_update(UPDATE, draws).delta["w"] != 0).all()
    assert (noise_first.on_update(UPDATE, draws).delta["w"] == 0).sum() == 2


def test_prune_then_clip_equals_hand_computation() -> None:
    released = Chain([GradientPruning(0.5), Clipping(1.0)]).on_update(
        UPDATE, Reproducible(torch.Generator())
    )
    torch.testing.assert_close(released.delta["w"], torch.tensor([0.0, 0.0, 0.6, 0.8]))


def test_chains_nest_and_validate_each() -> None:
    with pytest.raises(ValueError, match="doubling is refused"):
        Chain([Add(), Chain([Double()])]).validate(
            GradientMap(nn.Linear(1, 2)), InputSpec((1, 1, 1), 2), 1
        )


def test_a_defense_that_recomputes_comes_first() -> None:
    class Recompute(Defense):
        replaces_update = True

    Chain([Add(), Recompute(), GradientPruning(0.5)])
    with pytest.raises(ValueError, match="must come first"):
        Chain([GradientPruning(0.5), Recompute()])
    with pytest.raises(ValueError, match="must come first"):
        Chain([Chain([GradientPruning(0.5)]), Chain([Recompute()])])
