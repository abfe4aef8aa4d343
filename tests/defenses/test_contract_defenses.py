"""One table of all defenses: what each of them must keep to."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn

from flwr_leakage import defenses as d
from flwr_leakage.defenses.units import NoiseUnit
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Update
from flwr_leakage.schedules import UntoldSchedule
from flwr_leakage.values import require_option

SPEC = InputSpec((1, 4, 4), 3)
PUBLIC = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(9))
SCHEDULE = LocalSchedule(learning_rate=0.5, num_steps=3, batch_size=4)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(16, 12), nn.Sigmoid(), nn.BatchNorm1d(12), nn.Linear(12, 3)
    ).double()


def make_round() -> tuple[Update, d.LocalRound]:
    generator = torch.Generator().manual_seed(5)
    gradient_map = GradientMap(make_model())
    batch = Batch(
        torch.randn(8, 1, 4, 4, dtype=torch.float64, generator=generator),
        torch.randint(3, (8,), generator=generator),
    )
    params, buffers = gradient_map.params, gradient_map.buffers
    delta = local_update(gradient_map, params, batch, SCHEDULE, buffers)
    return (
        Update(delta, buffers, SCHEDULE, len(batch)),
        d.LocalRound(gradient_map, params, buffers, batch, batch),
    )


DEFENSES = {
    "none": d.NoDefense(),
    "pruning": d.GradientPruning(0.8),
    "pruning per layer": d.GradientPruning(0.8, per_layer=True),
    "gaussian": d.GaussianNoise(0.1),
    "laplacian": d.LaplacianNoise(0.1, relative_to="norm"),
    "clipping": d.Clipping(0.01),
    "withhold buffers": d.WithholdBuffers(),
    "mixup": d.MixUp(3),
    "instahide": d.InstaHide(3),
    "instahide inter": d.InstaHide(4, "inter", public=PUBLIC),
    "dp sgd": d.DPSGD(0.5, 0.3),
    "soteria": d.Soteria(0.4),
    "influence noise": d.InfluenceNoise(0.05),
    "target risk": d.TargetRisk(0.3),
    "target risk by pruning": d.TargetRisk(0.05, "pruning"),
    "percentile privacy": d.PercentilePrivacy(50.0, 0.005),
    "svt privacy": d.SVTPrivacy(),
    "censor": d.Censor(),
    "random subset": d.RandomSubset(0.5, is_unbiased=True),
    "qsgd": d.QSGD(4, 32),
    "sign sgd": d.SignSGD(),
    "truncated svd": d.TruncatedSVD(0.5),
    "chain": d.Chain([d.GradientPruning(0.5), d.GaussianNoise(0.1, "update")]),
    "error feedback": d.ErrorFeedback([d.GradientPruning(0.5)]),
    "chain of both": d.Chain([d.MixUp(3), d.DPSGD(0.5, 0.3), d.GradientPruning(0.5)]),
}
ZERO_STRENGTH = {
    "none": d.NoDefense(),
    "pruning": d.GradientPruning(0.0),
    "gaussian": d.GaussianNoise(0.0),
    "laplacian": d.LaplacianNoise(0.0),
    "clipping": d.Clipping(math.inf),
    "mixup": d.MixUp(1),
    "instahide": d.InstaHide(1, random_signs=False),
    "dp sgd": d.DPSGD(math.inf, 0.0),
    "soteria": d.Soteria(0.0),
    "influence noise": d.InfluenceNoise(0.0),
    "target risk": d.TargetRisk(0.0),
    "percentile privacy": d.PercentilePrivacy(0.0, math.inf),
    "random subset": d.RandomSubset(1.0),
    "truncated svd": d.TruncatedSVD(1.0),
    "chain": d.Chain([d.GradientPruning(0.0), d.GaussianNoise(0.0)]),
}
CHANGES_BATCH = {"mixup", "instahide", "instahide inter", "chain of both"}
CHANGES_DELTA = set(DEFENSES) - {
    "none",
    "withhold buffers",
    "mixup",
    "instahide",
    "instahide inter",
}
NEEDS_LOCAL_ROUND = {
    "dp sgd",
    "soteria",
    "chain of both",
    "influence noise",
    "target risk",
    "censor",
}


def seeded(seed: int) -> Reproducible:
    return Reproducible(torch.Generator().manual_seed(seed))


class Strange(d.Defense):
    """A defense of somebody who read nothing of how the report speaks."""


@pytest.mark.parametrize("defense", [*DEFENSES.values(), Strange()], ids=[*DEFENSES, "strange"])
def test_the_report_can_say_what_it_does(defense: d.Defense) -> None:
    told = defense.in_words()
    assert told[0].islower() and told[-1].isalnum()  # as it stands inside a sentence
    for part in getattr(defense, "defenses", [defense]):
        assert part.in_words() in told
        assert (type(part).__name__ in told) == (defense is part and isinstance(part, Strange))


def test_the_report_says_how_much_pruning_keeps() -> None:
    assert DEFENSES["chain"].in_words() == (
        "only the largest 50 % of the update’s numbers are sent; then random noise is added to "
        "every number of the update"
    )


@pytest.mark.parametrize("name", DEFENSES)
def test_same_seed_same_result(name: str) -> None:
    update, local_round = make_round()
    first, second = (DEFENSES[name].on_update(update, seeded(1), local_round) for _ in range(2))
    assert torch.equal(ravel(first.delta), ravel(second.delta))
    batches = [DEFENSES[name].on_batch(local_round.private, 3, seeded(1)) for _ in range(2)]
    assert torch.equal(batches[0].inputs, batches[1].inputs)
    assert torch.equal(batches[0].targets, batches[1].targets)


@pytest.mark.parametrize("name", DEFENSES)
def test_acts_where_it_says(name: str) -> None:
    update, local_round = make_round()
    released = DEFENSES[name].on_update(update, seeded(1), local_round)
    assert torch.equal(ravel(released.delta), ravel(update.delta)) == (name not in CHANGES_DELTA)
    encoded = DEFENSES[name].on_batch(local_round.private, 3, seeded(1))
    same = torch.equal(encoded.inputs, local_round.private.inputs)
    assert same == (name not in CHANGES_BATCH)


@pytest.mark.parametrize("name", DEFENSES)
def test_inputs_stay_as_they_are(name: str) -> None:
    update, local_round = make_round()
    fresh, fresh_round = make_round()
    DEFENSES[name].on_batch(local_round.private, 3, seeded(1))
    DEFENSES[name].on_update(update, seeded(1), local_round)
    for value, expected in (
        (update.delta, fresh.delta),
        (update.buffers, fresh.buffers),
        (local_round.params, fresh_round.params),
    ):
        assert all(torch.equal(value[key], expected[key]) for key in expected)
    assert torch.equal(local_round.private.inputs, fresh_round.private.inputs)
    assert torch.equal(local_round.private.targets, fresh_round.private.targets)


@pytest.mark.parametrize("name", DEFENSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_dtypes_and_keys_are_kept(name: str, dtype: torch.dtype) -> None:
    update, local_round = make_round()
    update = Update(
        {k: v.to(dtype) for k, v in update.delta.items()}, update.buffers, update.schedule, 8
    )
    released = DEFENSES[name].on_update(update, seeded(1), local_round)
    assert list(released.delta) == list(update.delta)
    for key, value in update.delta.items():
        assert released.delta[key].shape == value.shape
        assert released.delta[key].dtype == value.dtype
        assert not released.delta[key].requires_grad
    assert released.schedule == update.schedule
    assert released.num_examples == update.num_examples
    if name != "withhold buffers":
        assert list(released.buffers) == list(update.buffers)
    batch = DEFENSES[name].on_batch(local_round.private, 3, seeded(1))
    assert batch.inputs.shape == local_round.private.inputs.shape
    assert batch.inputs.dtype == local_round.private.inputs.dtype
    if name in CHANGES_BATCH:
        torch.testing.assert_close(batch.targets.sum(1), torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("name", DEFENSES)
def test_says_whether_it_encodes_batches(name: str) -> None:
    assert DEFENSES[name].encodes_batches == (name in CHANGES_BATCH)


@pytest.mark.parametrize("name", sorted(NEEDS_LOCAL_ROUND))
def test_a_missing_local_round_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="needs local_round"):
        DEFENSES[name].on_update(make_round()[0], seeded(1))


@pytest.mark.parametrize("name", ZERO_STRENGTH)
def test_strength_zero_is_the_identity(name: str) -> None:
    update, local_round = make_round()
    released = ZERO_STRENGTH[name].on_update(update, seeded(1), local_round)
    torch.testing.assert_close(released.delta, update.delta, rtol=1e-12, atol=1e-15)
    encoded = ZERO_STRENGTH[name].on_batch(local_round.private, 3, seeded(1))
    assert torch.equal(encoded.inputs, local_round.private.inputs)


@pytest.mark.parametrize("name", sorted(CHANGES_DELTA | {"withhold buffers"}))
@pytest.mark.parametrize(
    ("delta", "message"),
    [
        ({}, "at least one entry"),
        ({"w": torch.zeros(0)}, "at least one entry"),
        ({"w": torch.ones(3, dtype=torch.int64)}, "floating point"),
    ],
)
def test_bad_updates_are_rejected(name: str, delta: dict, message: str) -> None:
    _, local_round = make_round()
    with pytest.raises(ValueError, match=message):
        DEFENSES[name].on_update(Update(delta, {}, SCHEDULE, 8), seeded(1), local_round)


@pytest.mark.parametrize("name", DEFENSES)
def test_validation_accepts_good_data(name: str) -> None:
    DEFENSES[name].validate(GradientMap(make_model()), SPEC, 8)


@pytest.mark.parametrize(
    ("defense", "num_examples"),
    [
        (d.MixUp(4), 3),
        (d.InstaHide(4), 3),
        (d.InstaHide(4, "inter", public=PUBLIC), 1),
        (d.InstaHide(3, "inter", public=PUBLIC[:, :, :2]), 8),
        (d.Chain([d.NoDefense(), d.MixUp(4)]), 3),
    ],
)
def test_data_that_cannot_be_encoded_is_rejected_before_training(
    defense: d.Defense, num_examples: int
) -> None:
    with pytest.raises(ValueError):
        defense.validate(GradientMap(make_model()), SPEC, num_examples)


def integer_weights() -> nn.Module:
    model = make_model()
    model[1].weight = nn.Parameter(torch.zeros(12, 16, dtype=torch.int64), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("defense", "gradient_map", "message"),
    [
        (d.GaussianNoise(0.1), GradientMap(integer_weights()), "floating point, got torch.int64"),
        (d.DPSGD(), GradientMap(make_model(), batch_norm="batch"), "gradients of single samples"),
        (d.Soteria(0.5, layer="2"), GradientMap(make_model()), "linear layer of the model"),
        (d.Soteria(0.5), GradientMap(nn.Conv2d(1, 1, 1)), "got one without"),
    ],
)
def test_models_that_cannot_be_defended_are_rejected_before_training(
    defense: d.Defense, gradient_map: GradientMap, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        defense.validate(gradient_map, SPEC, 8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: d.GradientPruning(1.0), r"prune_ratio must lie in \[0, 1\), got 1.0"),
        (lambda: d.GradientPruning(-0.1), "prune_ratio"),
        (lambda: d.GradientPruning(math.nan), "prune_ratio"),
        (lambda: d.GaussianNoise(-1.0), "noise_std"),
        (lambda: d.GaussianNoise(math.inf), "noise_std"),
        (lambda: d.LaplacianNoise(math.nan), "noise_std"),
        (lambda: d.Clipping(0.0), "max_norm must be positive"),
        (lambda: d.MixUp(0), "k must be at least 1"),
        (lambda: d.MixUp(2, 0.5), "max_coefficient"),
        (lambda: d.MixUp(4, 1.1), "max_coefficient"),
        (lambda: d.InstaHide(4, max_coefficient=0.2), "max_coefficient"),
        (lambda: d.InstaHide(4, "inter"), "needs a public set"),
        (lambda: d.InstaHide(2, "inter", 0.65, public=PUBLIC), "at least 3"),
        (lambda: d.InstaHide(8, "inter", public=PUBLIC), "at least k"),
        (lambda: d.load_public_images(None), "needs a public set"),
        (lambda: d.load_public_images("missing.npz"), "needs a public set"),
        (lambda: d.DPSGD(0.0), "max_norm"),
        (lambda: d.DPSGD(1.0, -1.0), "noise_multiplier"),
        (lambda: d.DPSGD(delta=1.0), "delta must lie in"),
        (lambda: d.DPSGD(math.inf, 1.0), "noise_multiplier must be 0"),
        (lambda: d.Soteria(1.0), "prune_ratio"),
        (lambda: d.InfluenceNoise(-0.1), "noise_std"),
        (lambda: d.InfluenceNoise(0.1, prior_std=0.0), "prior_std"),
        (lambda: d.InfluenceNoise(0.1, max_samples=0), "max_samples"),
        (lambda: d.InfluenceNoise(0.1, num_steps=0), "num_steps"),
        (lambda: d.TargetRisk(-1.0), "target_rmse"),
        (lambda: d.TargetRisk(0.1, max_noise_std=0.0), "max_noise_std"),
        (lambda: d.TargetRisk(0.1, relative_damping=0.0), "relative_damping"),
        (lambda: d.Soteria(0.1, max_samples=0), "max_samples"),
        (lambda: d.PercentilePrivacy(101.0), "percentile"),
        (lambda: d.PercentilePrivacy(gamma=0.0), "gamma must be positive"),
        (lambda: d.SVTPrivacy(fraction=0.0), "fraction"),
        (lambda: d.SVTPrivacy(noise_var=0.0), "noise_var must be positive"),
        (lambda: d.Censor(0), "trials"),
        (lambda: d.Censor(step=0.0), "step must be positive"),
        (lambda: d.RandomSubset(0.0), r"share must lie in \(0, 1\], got 0.0"),
        (lambda: d.QSGD(0), "levels must be at least 1"),
        (lambda: d.QSGD(4, 0), "bucket_size must be at least 1"),
        (lambda: d.SignSGD(0.0), "step must be positive or None"),
        (lambda: d.TruncatedSVD(1.1), "energy"),
        (lambda: d.Chain([]), "at least one defense"),
    ],
)
def test_settings_out_of_range_are_rejected(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# The runtime type check of the tests refuses these first; without it, the code's own check does.
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: d.GaussianNoise(0.1, "gradients"), "relative_to"),
        (lambda: d.LaplacianNoise(0.1, "x"), "relative_to"),
        (lambda: d.Clipping(1.0, "norm"), "relative_to"),
        (lambda: d.InfluenceNoise(0.1, allotment="fair"), "allotment"),
        (lambda: d.TargetRisk(0.1, "noise"), "mechanism"),
        (lambda: d.InstaHide(4, "extra"), "partners"),
        (lambda: d.Chain(["pruning"]), "Defense"),
    ],
)
def test_settings_of_a_wrong_kind_are_rejected(build, message: str) -> None:
    with pytest.raises((ValueError, TypeCheckError), match=message):
        build()


def test_unknown_units_are_named() -> None:
    with pytest.raises(ValueError, match=r"relative_to must be one of .*, got 'gradients'"):
        require_option(SimpleNamespace(relative_to="gradients"), "relative_to", NoiseUnit)


ALONE = (
    "none", "pruning", "pruning per layer", "laplacian", "clipping", "withhold buffers",
    "random subset", "qsgd", "sign sgd", "truncated svd", "mixup", "instahide", "instahide inter",
    "chain", "error feedback",
)  # fmt: skip
"""The defenses whose ``on_update`` needs the update alone."""


@pytest.mark.parametrize("name", DEFENSES)
def test_a_defense_that_needs_the_training_never_takes_an_untold_one(name):
    update, _ = make_round()
    untold = replace(update, schedule=UntoldSchedule("the optimizer is Adam"))
    defense = DEFENSES[name]
    if name not in ALONE:
        with pytest.raises(ValueError, match=r"the optimizer is Adam|needs local_round"):
            defense.on_update(untold, Reproducible.from_seed(0))
        return
    told, got = (defense.on_update(each, Reproducible.from_seed(0)) for each in (update, untold))
    assert all(torch.equal(told.delta[key], got.delta[key]) for key in told.delta)
