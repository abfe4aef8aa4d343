import torch
from torch import nn

from flwr_leakage.defenses import Censor, LocalRound
from flwr_leakage.defenses.censor import orthogonal_noise
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.params import add, scale
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, LocalSchedule, Update


def seeded(seed: int) -> Reproducible:
    return Reproducible(torch.Generator().manual_seed(seed))


def make_round(model: nn.Module) -> tuple[Update, LocalRound]:
    generator = torch.Generator().manual_seed(5)
    gradient_map = GradientMap(model.double())
    batch = Batch(torch.randn(8, 6, generator=generator).double(), torch.arange(8) % 3)
    schedule = LocalSchedule(0.1, 1, 8)
    delta = local_update(gradient_map, gradient_map.params, batch, schedule, {})
    around = LocalRound(gradient_map, gradient_map.params, {}, batch, batch)
    return Update(delta, {}, schedule, 8), around


def test_noise_is_orthogonal_and_as_long() -> None:
    delta = {"w": torch.randn(5, 4).double(), "zero": torch.zeros(3), "one": torch.ones(1)}
    noise = orthogonal_noise(delta, seeded(0))
    assert abs(float((noise["w"] * delta["w"]).sum())) < 1e-12
    torch.testing.assert_close(noise["w"].norm(), delta["w"].norm())
    assert not noise["zero"].any() and not noise["one"].any()


def test_sends_the_draw_of_the_lowest_loss() -> None:
    torch.manual_seed(0)
    update, around = make_round(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)))
    defense, draws = Censor(trials=30, step=3.0), seeded(2)
    candidates = [orthogonal_noise(update.delta, draws) for _ in range(30)]
    losses = []
    for delta in [scale(update.delta, 0.0), *candidates]:
        moved = add(around.params, scale(delta, 30.0))
        losses.append(float(around.gradient_map.loss_value(moved, around.defended)))
    best = min(range(31), key=losses.__getitem__)
    sent = defense.on_update(update, seeded(2), around).delta
    expected = update.delta if best == 0 else candidates[best - 1]
    torch.testing.assert_close(sent, expected)


def test_sends_the_update_itself_where_no_draw_lowers_the_loss() -> None:
    """The loss of a linear model is convex: nothing orthogonal to its gradient goes downhill."""
    torch.manual_seed(0)
    update, around = make_round(nn.Sequential(nn.Linear(6, 3, bias=False)))
    sent = Censor(step=0.1).on_update(update, seeded(0), around).delta
    torch.testing.assert_close(sent, update.delta, rtol=0, atol=0)
