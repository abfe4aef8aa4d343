"""A proof of inputs is one of pixels unless the inputs speak against the told normalisation."""

import pytest
import torch
from attacked import observe
from portfolio import Answering
from torch import nn

from flwr_leakage.attacks import Analytic, AttackJob, ExactBatch, Strongest
from flwr_leakage.attacks.exact.batch_search import SearchSettings
from flwr_leakage.attacks.one_by_one import NORMALISATION, PROVEN_INPUTS, in_box
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.conventions import OFF_LEVELS, OUTSIDE
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Reconstruction, ThreatModel

TRAINED = InputSpec((1, 8, 8), 4, (0.5,), (0.5,))
FORGOTTEN = InputSpec((1, 8, 8), 4)
MNIST = InputSpec((1, 8, 8), 4, (0.1307,), (0.3081,))
OWN = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))
QUICK = SearchSettings(max_seconds=5)
NETWORKS = {
    "three layers": lambda: nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 60), nn.ReLU()),
        nn.Linear(60, 4),
    ),
    "two layers": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 4)
    ),
}


def run(attack, told, size, trained=TRAINED, network="three layers", levels=255, seed=5):
    """Attack a batch that was normalised as trained, by somebody who was told another spec."""
    torch.manual_seed(0)
    made = NETWORKS[network]().eval()
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(size, 1, 8, 8, generator=generator)
    pixels.flatten()[:2] = torch.tensor([0.0, 1.0])  # of one image
    pixels = (pixels * levels).round() / levels if levels else pixels
    truth = Batch(trained.normalize(pixels), torch.randint(4, (size,), generator=generator))
    gradient_map = GradientMap(made)
    seen = observe(gradient_map, truth, LocalSchedule(0.1, 1, size))
    (found,) = attack(AttackJob(gradient_map, told, [seen], ThreatModel()))
    return found, truth


def off(found, truth):
    """The largest error of a pixel, each image matched to the nearest."""
    ours, theirs = found.batch.inputs.flatten(1).double(), truth.inputs.flatten(1).double()
    return float(torch.cdist(ours, theirs, p=torch.inf).amin(1).max())


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("trained", [TRAINED, FORGOTTEN, MNIST], ids=["half", "none", "mnist"])
@pytest.mark.parametrize("told", [TRAINED, FORGOTTEN, MNIST], ids=["half", "none", "mnist"])
def test_a_batch_is_proven_under_the_right_normalisation_whatever_was_told(
    told, trained, size, network
):
    found, truth = run(ExactBatch(QUICK), told, size, trained, network)
    assert found.stats["verdicts"] == ("proven",) * size
    assert off(found, truth) < 1e-3
    if told == trained:
        assert (found.spec, found.stats[NORMALISATION]) == (None, "confirmed")
    else:
        assert (found.spec, found.stats[NORMALISATION]) == (trained, "read off")
        assert "is wrong: the values are levels of pixels" in found.stats["stage"]


@pytest.mark.parametrize("told", [TRAINED, FORGOTTEN, MNIST], ids=["half", "none", "mnist"])
def test_a_normalisation_of_nobodys_is_read_between_black_and_white(told):
    found, truth = run(ExactBatch(QUICK), told, 4, OWN)
    assert (found.spec, found.stats["verdicts"]) == (OWN, ("proven",) * 4)
    assert off(found, truth) < 1e-3


@pytest.mark.parametrize("size", [1, 4])
def test_what_lies_outside_of_the_box_and_on_no_levels_is_not_clamped_and_not_proven(size):
    found, truth = run(ExactBatch(QUICK), FORGOTTEN, size, levels=0)
    assert found.stats["verdicts"] == ("plausible",) * size
    assert (found.stats["proven"], found.stats[PROVEN_INPUTS]) == (0, size)
    assert OUTSIDE in found.stats["stage"] and found.spec is None
    assert off(found, truth) < 1e-3  # the network's inputs are right


def test_a_wider_box_that_holds_levels_of_another_grid_proves_nothing():
    wide = InputSpec((1, 8, 8), 4, (0.5,), (0.2,))
    found, truth = run(Analytic(), wide, 1, OWN)
    assert found.stats["verdicts"] == ("plausible",)
    assert OFF_LEVELS in found.stats["stage"]
    assert off(found, truth) < 1e-3


def test_interpolated_images_are_proven_up_to_the_normalisation_that_was_told():
    found, _ = run(ExactBatch(QUICK), TRAINED, 4, levels=0)
    assert found.stats["verdicts"] == ("proven",) * 4
    assert found.stats[NORMALISATION] == "as told"


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_table_is_proven_without_a_box_and_never_with_one(size):
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Flatten(), nn.Linear(13, 120), nn.ReLU(), nn.Linear(120, 60), nn.ReLU()),
        nn.Linear(60, 4),
    ).eval()
    rows = torch.randn(size, 1, 1, 13, generator=torch.Generator().manual_seed(3))
    truth = Batch(rows, torch.arange(size) % 4)
    gradient_map = GradientMap(network)
    seen = observe(gradient_map, truth, LocalSchedule(0.1, 1, size))
    right = InputSpec.table(13, 4)
    wide = InputSpec((1, 1, 13), 4, (0.5,), (0.05,))
    for told in (right, InputSpec((1, 1, 13), 4), wide):
        (found,) = ExactBatch(QUICK)(AttackJob(gradient_map, told, [seen], ThreatModel()))
        proven = "proven" if told is right else "plausible"
        assert found.stats["verdicts"] == (proven,) * size
        assert off(found, truth) < 1e-3


def test_a_portfolio_needs_no_further_attack_once_the_inputs_are_proven():
    attack = load_preset("strongest", ["max_seconds=3"])
    for told, levels, reason in (
        (TRAINED, 255, "proven"),
        (TRAINED, 0, "proven, up to the normalisation that was told"),
        (FORGOTTEN, 255, "is wrong"),
        (FORGOTTEN, 0, OUTSIDE),
    ):
        found, truth = run(attack, told, 4, levels=levels)
        part = {part.name: part for part in found.parts}["exact_batch"]
        assert part.outcome == "solved"
        assert part.reason == reason if reason.startswith("proven") else reason in part.reason
        assert off(found, truth) < 1e-3
        assert found.spec == (TRAINED if (told, levels) == (FORGOTTEN, 255) else None)


def answered(beyond, **stats):
    """The verdicts of a ramp from black to white and another, one with a pixel that is whiter."""
    inputs = torch.linspace(0, 255, 64, dtype=torch.float64).round().div(255).repeat(2, 1)
    inputs = inputs.reshape(2, 1, 8, 8)
    inputs[0, 0, -1, -1] += beyond
    stats = {"verdicts": ("proven", "plausible"), **stats}
    answer = Reconstruction(Batch(inputs, torch.zeros(2, dtype=torch.int64)), 0.0, stats)
    return in_box(FORGOTTEN, answer)


@pytest.mark.parametrize(
    ("beyond", "told", "proven"),
    [
        (5e-5, {}, True),  # rounding of float32
        (1e-2, {}, False),
        (1e-4, {"relative_errors": [1e-4, 0.0]}, True),  # one standard deviation
        (1e-2, {"relative_errors": [1e-4, 0.0]}, False),
        (1e-2, {"relative_errors": [0.0, 1e-4]}, False),  # the other's error is not its own
    ],
)
def test_a_proof_holds_as_far_as_the_answers_own_error_reaches(beyond, told, proven):
    found = answered(beyond, **told)
    assert found.stats["verdicts"] == ("proven" if proven else "plausible", "plausible")
    assert (found.batch.inputs.max() == 1) == proven
    assert in_box(FORGOTTEN, found) is found  # a second look changes nothing


def test_a_sample_that_was_not_proven_withdraws_no_proof_and_none_is_invented():
    found = answered(0.5, verdicts=("not", "proven"))
    assert found.stats[PROVEN_INPUTS] == 1
    assert found.stats["verdicts"] == ("not", "proven")
    assert in_box(FORGOTTEN, Reconstruction(None, 0.0)).batch is None
    plain = Reconstruction(Batch(torch.full((1, 1, 8, 8), 3.0), torch.tensor([0])), 0.0)
    assert in_box(FORGOTTEN, plain).stats == {}
    assert in_box(FORGOTTEN, plain).batch.inputs.max() == 1


def test_a_portfolio_brings_answers_into_the_box_before_it_judges_them():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).eval()
    truth = Batch(torch.rand(1, 1, 8, 8) * 2 - 1, torch.tensor([1]))
    seen = observe(GradientMap(network), truth, LocalSchedule(0.1))
    job = AttackJob(GradientMap(network), FORGOTTEN, [seen], ThreatModel())
    (result,) = Strongest({"unclamped": Answering(truth, {})})(job)
    assert [part.outcome for part in result.parts] == ["found"]
    assert torch.equal(result.batch.inputs, FORGOTTEN.clamp(truth.inputs))
