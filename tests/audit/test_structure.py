"""What an update is open to, before any training and without data."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import flwr_leakage
from flwr_leakage.attacks import AttackJob
from flwr_leakage.audit.structure import exact_attacks, structure, synthetic_batch
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.models import MLP, ConvNet, LeNet, initialize
from flwr_leakage.records import InputSpec, LocalSchedule, Observation, ThreatModel, Update

SPEC = InputSpec((1, 12, 12), 4, mean=(0.5,), std=(0.25,))


def lenet():
    return initialize(LeNet(SPEC.shape, 4), "uniform", torch.Generator().manual_seed(0))


def convnet(**settings):
    torch.manual_seed(0)
    return ConvNet(SPEC.shape, 4, 8, (1, 2, 2), **settings)


def mlp():
    torch.manual_seed(0)
    return MLP(SPEC.shape, 4, (100, 100))


def pooled():
    torch.manual_seed(0)
    stem = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, nn.Flatten(), nn.Linear(8 * 36, 4))


def averaged():
    """Channels grow as maps shrink, as in a residual network."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU()]
    layers += [nn.Conv2d(24, 48, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(48, 4))


def strided():
    return convnet(strides=(1, 2, 2), pool_after=(), use_batch_norm=False)


def no_bias():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 4, bias=False))


APPLIES, NOT, FEATURES = "applies", "does not apply", "features only"
CASES = {
    "sigmoid lenet": (lenet, 1, (NOT, APPLIES, NOT, FEATURES)),
    "strided relu": (strided, 1, (NOT, APPLIES, NOT, FEATURES)),
    "max pooling": (pooled, 1, (NOT, NOT, NOT, FEATURES)),
    "average pooling": (averaged, 1, (NOT, NOT, APPLIES, FEATURES)),
    "mlp, 1": (mlp, 1, (APPLIES, APPLIES, NOT, APPLIES)),
    "mlp, 8": (mlp, 8, (NOT, NOT, NOT, APPLIES)),
    "mlp, 64": (mlp, 64, (NOT, NOT, NOT, APPLIES)),
    "lenet, 8": (lenet, 8, (NOT, NOT, NOT, NOT)),
    "no bias": (no_bias, 1, (NOT, NOT, NOT, NOT)),
}


@pytest.mark.parametrize("name", CASES)
def test_which_attacks_apply(name):
    model, count, expected = CASES[name]
    found = structure(model(), SPEC, count, max_products=40)
    assert tuple(each.verdict for each in found.openings) == (*expected, NOT), str(found)
    assert all(each.reason for each in found.openings)


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_apply_is_what_the_attack_refuses(name):
    model, count, expected = CASES[name]
    gradient_map = GradientMap(model())
    batch = synthetic_batch(SPEC, count, 0)
    batch = type(batch)(batch.inputs.float(), batch.targets)
    schedule = LocalSchedule(1.0, 1, count)
    delta = local_update(gradient_map, gradient_map.params, batch, schedule)
    update = Update({k: v.detach() for k, v in delta.items()}, {}, schedule, count)
    seen = Observation(1, 0, gradient_map.params, {}, update)
    found = structure(model(), SPEC, count, max_products=40)
    for verdict, (key, attack) in zip((*expected, NOT), exact_attacks().items(), strict=True):
        if verdict == NOT:
            (result,) = attack(AttackJob(gradient_map, SPEC, [seen], ThreatModel()))
            assert result.batch is None
            assert result.error == found[key].reason


def test_texts_are_refused_in_words():
    with pytest.raises(ValueError, match="structure draws images, and these inputs are token ids"):
        structure(mlp(), InputSpec.text(9, 4, 4))


def test_reasons_name_what_is_in_the_way():
    assert "max_pool2d" in structure(pooled(), SPEC, max_products=9)["feature_matching"].reason
    found = structure(lenet(), SPEC, 8, max_products=9)
    assert "1 sample in 1 plain step, got 8 samples" in found["feature_matching"].reason
    decayed = LocalSchedule(0.1, 2, 1, weight_decay=0.1)
    found = structure(mlp(), SPEC, 1, decayed, max_products=9)
    assert "weight decay" in found["analytic"].reason
    normalised = convnet(strides=(1, 2, 2), pool_after=(), use_batch_norm=True)
    found = structure(normalised, SPEC, 4, batch_norm="batch", max_products=9)
    assert {each.verdict for each in found.openings} == {NOT}
    fixed = structure(normalised, SPEC, 1, max_products=9)
    assert fixed["feature_matching"].verdict == APPLIES


def test_an_attack_that_is_tried_shows_what_it_reaches():
    tried = {name: exact_attacks()[name] for name in ("analytic", "exact_batch")}
    assert structure(mlp(), SPEC, attacks=tried, attempt=True)["analytic"].verdict == "recovers"
    found = structure(mlp(), SPEC, 8, attacks=tried, attempt=True, max_products=9)
    assert found["exact_batch"].verdict == "recovers"
    assert "8 of 8 images above 40 dB" in found["exact_batch"].reason


def test_directions_of_one_sample_and_of_the_batch():
    alone = structure(no_bias(), SPEC)
    assert alone.one_sample.unseen == alone.together.unseen == (0, 0)
    # Four logits' errors sum to zero: 3 · 144 equations of 576 are independent.
    several = structure(no_bias(), SPEC, 8, tolerance=1e-10)
    assert several.one_sample.unseen == (0, 0)
    assert several.together.unknowns == 8 * 144 and several.together.equations == 576
    assert several.together.resolved and several.together.unseen[0] >= 8 * 144 - 432
    bounded = structure(no_bias(), SPEC, 8, max_products=100)
    assert not bounded.together.resolved
    assert bounded.together.unseen == (8 * 144 - 576, 8 * 144 - 64)
    assert "not resolved" in str(bounded)


def test_several_local_steps_are_seen_together():
    steps = structure(no_bias(), SPEC, 4, LocalSchedule(0.5, 2, 2))
    assert steps.together.resolved
    assert steps["exact_batch"].verdict == NOT
    assert "2 local steps" in str(steps)


def test_the_text_is_narrow_and_the_same_each_time():
    first, second = (str(flwr_leakage.structure(mlp(), SPEC, 2, max_products=9)) for _ in "ab")
    assert first == second
    assert max(map(len, first.splitlines())) <= 100
    assert first.startswith("MLP: 2 samples of 1×12×12, 1 local step; 25,004 equations for 288")


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: F.mse_loss(z, F.one_hot(y, 4).to(z)),
        lambda z, y: F.mse_loss(z, torch.zeros(len(y), 4).scatter_(1, y[:, None], 1.0).to(z)),
        nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0, 4.0])),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_losses_that_vmap_refuses_are_differentiated_one_by_one(loss, count):
    found = structure(mlp(), SPEC, count, loss=loss, max_products=9)
    assert found.not_computed == ""
    assert found.one_sample.unknowns == 144 and found.together.unknowns == count * 144
    assert found["analytic"].verdict == (APPLIES if count == 1 else NOT)


def test_a_rank_that_cannot_be_computed_is_told(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no derivative\nof this")

    monkeypatch.setattr("flwr_leakage.audit.structure.separate", refuse)
    found = structure(mlp(), SPEC)
    assert found.one_sample is None and found.together is None
    assert found.not_computed == "no derivative"
    assert found["analytic"].verdict == APPLIES
    assert "rank not computed: no derivative" in str(found)


def test_a_frozen_first_layer_is_open_to_nothing():
    for frozen in ("weight", "bias"):
        network = mlp()
        first = next(layer for layer in network.modules() if isinstance(layer, nn.Linear))
        getattr(first, frozen).requires_grad_(False)
        found = structure(network, SPEC, max_products=9)["analytic"]
        assert found.verdict == NOT
        assert "must be trained, got '" in found.reason and f".{frozen}' frozen" in found.reason


def test_dropout_in_eval_mode_is_left_out_and_draws_nothing():
    class Drops(nn.Sequential):
        def forward(self, x):
            return super().forward(F.dropout(x.flatten(1), 0.5)) * x.mean().sigmoid()

    torch.manual_seed(0)
    network = Drops(nn.Linear(144, 20), nn.ReLU(), nn.Linear(20, 4))
    state = torch.get_rng_state()
    first, second = (str(structure(network, SPEC, max_products=9)) for _ in "ab")
    assert first == second and "not computed" not in first
    assert "(test_structure.py:" in first and "dropout.py" not in first
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_arguments_of_a_structure_are_refused_in_words():
    with pytest.raises(ValueError, match=r"must take inputs of spec.shape \(1, 9, 9\)"):
        structure(mlp(), InputSpec((1, 9, 9), 4))
    with pytest.raises(ValueError, match=r"class ids \(B,\)"):
        structure(mlp(), SPEC, loss=nn.MSELoss())
    with pytest.raises(ValueError, match="num_examples must be a positive integer, got 0"):
        structure(mlp(), SPEC, 0)
