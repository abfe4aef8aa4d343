"""A proof is given after the last step that changes the answer: clamping to the box of pixels."""

import pytest
import torch
from attacked import observe
from portfolio import Answering
from torch import nn

from flwr_leakage.attacks import Analytic, AttackJob, ExactBatch, SearchSettings, Strongest
from flwr_leakage.attacks.exact.pixel_box import OUTSIDE, in_box
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Reconstruction, ThreatModel

TRAINED = InputSpec((1, 8, 8), 4, (0.5,), (0.5,))
FORGOTTEN = InputSpec((1, 8, 8), 4)
QUICK = SearchSettings(max_seconds=5)


def run(attack, told, size, low=0.0):
    """Attack a batch that was normalised as TRAINED says, by somebody who was told another spec."""
    torch.manual_seed(0)
    network = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 60), nn.ReLU()),
        nn.Linear(60, 4),
    ).eval()
    generator = torch.Generator().manual_seed(5)
    pixels = low + (1 - low) * torch.rand(size, 1, 8, 8, generator=generator)
    pixels.flatten()[:2] = torch.tensor([low, 1.0])  # of one image
    truth = Batch(TRAINED.normalize(pixels), torch.randint(4, (size,), generator=generator))
    gradient_map = GradientMap(network)
    seen = observe(gradient_map, truth, LocalSchedule(0.1, 1, size))
    (found,) = attack(AttackJob(gradient_map, told, [seen], ThreatModel()))
    return found


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_batch_is_proven_under_the_right_normalisation_only(size):
    right, wrong = (run(ExactBatch(QUICK), told, size) for told in (TRAINED, FORGOTTEN))
    assert right.stats["verdicts"] == ("proven",) * size
    assert right.stats["proven"] == size
    assert right.objective < 1e-9
    assert wrong.stats["verdicts"] == ("plausible",) * size
    assert wrong.stats["proven"] == 0
    assert wrong.stats["stage"].endswith(OUTSIDE)
    assert wrong.objective > 1e-3  # that of the clamped answer
    assert torch.equal(wrong.batch.inputs, FORGOTTEN.clamp(wrong.batch.inputs))


def test_one_image_is_proven_under_the_right_normalisation_only():
    right, wrong = (run(Analytic(), told, 1) for told in (TRAINED, FORGOTTEN))
    assert right.stats["verdicts"] == ("proven",)
    assert wrong.stats["verdicts"] == ("plausible",)
    assert wrong.stats["stage"] == f"all pixels. {OUTSIDE}"


def test_one_sample_outside_of_the_box_withdraws_the_proofs_of_all():
    """Under a wrong normalisation the pixels of those inside are wrong, too."""
    told = InputSpec((1, 8, 8), 4, (0.4,), (0.601,))  # white alone lies outside, of one image
    found = run(ExactBatch(QUICK), told, 4, low=0.4)
    touched = (found.batch.inputs > 0.9983).flatten(1).any(1)
    assert touched.sum() == 1
    assert found.stats["verdicts"] == ("plausible",) * 4


def test_a_portfolio_does_not_take_what_lies_outside_for_solved():
    attack = load_preset("strongest", ["max_seconds=3"])
    right, wrong = (run(attack, told, 4) for told in (TRAINED, FORGOTTEN))
    part = {part.name: part for part in right.parts}["exact_batch"]
    assert (part.outcome, part.reason) == ("solved", "proven")
    part = {part.name: part for part in wrong.parts}["exact_batch"]
    assert part.outcome == "found"
    assert OUTSIDE in part.reason
    assert all(part.outcome != "solved" for part in wrong.parts)


def answered(beyond, **stats):
    """The verdicts of a sample and another, white but for a pixel that is whiter."""
    inputs = torch.ones(2, 1, 8, 8, dtype=torch.float64)
    inputs[0, 0, 0, 0] += beyond
    stats = {"verdicts": ("proven", "plausible"), **stats}
    answer = Reconstruction(Batch(inputs, torch.zeros(2, dtype=torch.int64)), 0.0, stats)
    return in_box(FORGOTTEN, answer)


@pytest.mark.parametrize(
    ("beyond", "told", "proven"),
    [
        (5e-5, {}, True),  # rounding of float32
        (2e-4, {}, False),
        (1e-4, {"relative_errors": [1e-4, 0.0]}, True),  # one standard deviation
        (5e-4, {"relative_errors": [1e-4, 0.0]}, True),
        (2e-3, {"relative_errors": [1e-4, 0.0]}, False),  # twenty
        (2e-3, {"relative_errors": [0.0, 1e-4]}, False),  # the other's error is not its own
    ],
)
def test_a_proof_holds_as_far_as_the_answers_own_error_reaches(beyond, told, proven):
    found = answered(beyond, **told)
    assert found.stats["verdicts"] == ("proven" if proven else "plausible", "plausible")
    assert found.stats.get("stage", OUTSIDE if proven else None) == OUTSIDE
    assert found.batch.inputs.max() == 1


def test_a_sample_that_was_not_proven_withdraws_no_proof_and_none_is_invented():
    found = answered(0.5, verdicts=("not", "proven"))
    assert found.stats["verdicts"] == ("not", "proven")
    assert in_box(FORGOTTEN, Reconstruction(None, 0.0)).batch is None
    plain = Reconstruction(Batch(torch.full((1, 1, 8, 8), 3.0), torch.tensor([0])), 0.0)
    assert in_box(FORGOTTEN, plain).stats == {}
    assert in_box(FORGOTTEN, plain).batch.inputs.max() == 1


def test_a_portfolio_brings_any_attacks_answer_into_the_box_before_it_judges_it():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).eval()
    truth = Batch(torch.rand(1, 1, 8, 8) * 2 - 1, torch.tensor([1]))
    seen = observe(GradientMap(network), truth, LocalSchedule(0.1))
    job = AttackJob(GradientMap(network), FORGOTTEN, [seen], ThreatModel())
    for stats in ({}, {"verdicts": ("proven",)}):
        (result,) = Strongest({"unclamped": Answering(truth, stats)})(job)
        assert [part.outcome for part in result.parts] == ["found"]
        assert torch.equal(result.batch.inputs, FORGOTTEN.clamp(truth.inputs))
