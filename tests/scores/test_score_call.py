import copy
import inspect
import math
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from scored import small_network
from torch.nn import functional as F

from flwr_leakage.operators import Budget
from flwr_leakage.records import LocalSchedule, Measurement
from flwr_leakage.scores import (
    LAVP,
    GradientNorm,
    InversionInfluence,
    LambdaMax,
    default_scores,
    score,
)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(3, 1, 6, 6, generator=generator), torch.tensor([0, 3, 1])


def test_one_call_gives_every_default_score_with_direction(data):
    model = small_network()
    before = copy.deepcopy(model.state_dict())
    found = score(model, *data)
    assert list(found) == list(default_scores())
    for name, result in found.items():
        assert result.measurements[0].name.startswith(name) and not result.error
        assert result.unit and result.direction and len(result.values) == 3
        assert None not in result.values
    probe = found["influence_krylov_bound"]["unit_noise_influence_bound_rmse"]
    assert all(value > 0 for value in probe.values)
    torch.testing.assert_close(model.state_dict(), before)


def test_soft_targets_of_one_class_are_hard_ones(data):
    inputs, targets = data
    hard = score(small_network(), inputs, targets)
    soft = score(small_network(), inputs, F.one_hot(targets, 4).float())
    for name, result in hard.items():
        assert soft[name].values == pytest.approx(result.values, rel=1e-4)
    spread = score(small_network(), inputs, torch.full((3, 4), 0.25))
    assert spread["gradient_norm"].values != hard["gradient_norm"].values


def test_the_default_set_is_that_of_the_config():
    path = Path(__file__).parents[2] / "conf" / "score" / "default.yaml"
    assert instantiate(OmegaConf.load(path), _convert_="all") == default_scores()


def test_noise_scales_the_influence(data):
    chosen = {"i2f": InversionInfluence((1e-6,), precision="float64")}
    values = [
        score(small_network(), *data, chosen, noise_std=std)["i2f"].values for std in (1e-3, 1e-2)
    ]
    for small, large in zip(*values, strict=True):
        assert large == pytest.approx(10 * small, rel=2e-2)


def test_a_perturbation_is_the_same_as_that_noise(data):
    model = small_network()
    change = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    chosen = [InversionInfluence((1e-6,), precision="float64")]
    schedule = LocalSchedule(0.5, 1, 3)
    one = score(model, *data, chosen, perturbation=change)
    two = score(model, *data, chosen, perturbation=change, schedule=schedule)
    # The pseudo-gradient does not depend on the learning rate of a single step.
    name = "InversionInfluence"
    assert one[name].values == pytest.approx(two[name].values, rel=1e-2)


def test_one_call_passes_the_budget_and_the_batch_norm_mode(data):
    model = small_network(batch_norm=True).train()
    found = score(model, *data, batch_norm="batch", budget=Budget(products=4))
    assert None not in found["gradient_norm"].values
    assert "budget" in found["lambda_max"].notes[0] and "budget" in found["lambda_max"].error
    assert int(model[1].num_batches_tracked) == 0


def test_wrong_calls_are_reasons_or_errors(data):
    inputs, targets = data
    model = small_network()
    with pytest.raises(ValueError, match="noise_std"):
        score(model, inputs, targets, noise_std=-1.0)
    with pytest.raises(ValueError, match="noise_std"):
        score(model, inputs, targets, noise_std=math.nan)
    with pytest.raises(ValueError, match=r"entries \[.*weight.*got \['nothing'\]"):
        score(model, inputs, targets, perturbation={"nothing": torch.ones(1)})
    with pytest.raises(ValueError, match="number of samples"):
        score(model, inputs, targets[:2])
    found = score(model, inputs, torch.tensor([0, 9, 1]), [GradientNorm()])
    assert "0 … 3" in found["GradientNorm"].notes[0]
    found = score(model, (255 * inputs).long(), targets, [GradientNorm()])
    assert "floating-point" in found["GradientNorm"].notes[0]
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    found = score(model, inputs, targets, [GradientNorm()])
    assert "NaN" in found["GradientNorm"].notes[0]


@pytest.mark.parametrize("scores", [{"norm": "gradient_norm"}, [GradientNorm]])
def test_what_is_no_score_is_refused(data, scores):
    unchecked = inspect.unwrap(score)  # as users call it, without the tests' type checker
    with pytest.raises(ValueError, match=r"such as GradientNorm\(\), got .*(gradient_n|GradientN)"):
        unchecked(small_network(), *data, scores)


def test_a_sample_that_is_not_a_number_costs_the_others_nothing(data):
    inputs, targets = data
    spoiled = inputs.clone()
    spoiled[1, 0, 2, 2] = math.nan
    found = score(small_network(), spoiled, targets, noise_std=1e-3)
    clean = score(small_network(), inputs, targets, noise_std=1e-3)
    assert found.keys() == clean.keys()
    for name, result in found.items():
        assert result.values[1] is None
        assert result.notes[1] == "the gradient of this sample is not finite"
        for sample in (0, 2):
            assert result.values[sample] == pytest.approx(clean[name].values[sample], rel=1e-3)


def test_a_perturbation_that_is_not_a_number_is_named(data):
    model = small_network()
    change = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    next(iter(change.values())).view(-1)[0] = math.inf
    found = score(model, *data, perturbation=change)["influence_krylov_bound"]
    assert found.values == (None,) * 3
    assert all("released minus the raw update, is not finite" in note for note in found.notes)


def test_two_scores_of_one_measurement_stand_apart(data):
    scores = {"rough": LambdaMax(tolerance=0.3), "lavp": LAVP(("angular_max", "lambda_max"))}
    found = score(small_network(), *data, scores)
    assert list(found) == ["rough", "lavp"]
    assert found["rough"]["lambda_max"].values == found["rough"].values
    assert found["lavp"].values == found["lavp"]["angular_max"].values
    assert found["lavp"]["lambda_max"].values != found["rough"].values
    assert [measured.name for measured in found["lavp"]] == ["angular_max", "lambda_max"]
    with pytest.raises(KeyError, match=r"no measurement 'lambda_min', only \['angular_max"):
        found["lavp"]["lambda_min"]


def test_scores_of_one_class_in_a_sequence_are_numbered(data):
    found = score(small_network(), *data, [GradientNorm(), LAVP(("lambda_max",)), GradientNorm()])
    assert list(found) == ["GradientNorm", "LAVP", "GradientNorm 2"]


def test_a_score_that_failed_is_there_with_its_reason(data):
    inputs, _ = data
    found = score(small_network(), inputs, torch.tensor([0, 9, 1]))
    failed = found["influence_krylov_bound"]
    assert failed.values == (None,) * 3
    assert "0 … 3" in failed.error and failed.notes == (failed.error,) * 3
    assert failed["influence_krylov_bound_rmse"].notes == failed.notes


def test_what_returns_another_number_of_values_is_refused(data):
    def short(client, seed):
        return [Measurement("short", (1.0,), "1", "larger leaks more")]

    def nothing(client, seed):
        return []

    found = score(small_network(), *data, {"short": short, "nothing": nothing})
    assert "one value for each of 3 samples, got 1" in found["short"].error
    assert "no measurement" in found["nothing"].error
