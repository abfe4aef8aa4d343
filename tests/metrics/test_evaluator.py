import math

import pytest
import torch

from flwr_leakage.metrics import Evaluator, Lpips
from flwr_leakage.records import Batch, InputSpec, Reconstruction

SPEC = InputSpec((1, 12, 12), 10, mean=(0.13,), std=(0.31,))
PIXELS = torch.rand(4, 1, 12, 12, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([3, 1, 4, 1])
TRUTH = Batch(SPEC.normalize(PIXELS), LABELS)


def reconstruct(pixels, labels):
    return Reconstruction(Batch(SPEC.normalize(pixels), labels), objective=0.1)


def by_name(evaluation):
    return {measurement.name: measurement for measurement in evaluation.measurements}


def test_a_shuffled_and_noisy_reconstruction_is_measured_in_the_truth_s_order():
    order = torch.tensor([2, 0, 3, 1])
    noisy = PIXELS + torch.tensor([0.0, 0.01, 0.02, 0.03]).reshape(4, 1, 1, 1)
    labels = torch.tensor([3, 7, 4, 1])
    result = Evaluator().evaluate(reconstruct(noisy[order], labels[order]), TRUTH, SPEC)
    assert torch.equal(order[result.assignment], torch.arange(4))
    assert result.matched.dtype == torch.float64
    torch.testing.assert_close(result.matched.float(), noisy.clamp(0, 1), atol=1e-6, rtol=0)
    measured = by_name(result)
    expected = (noisy.clamp(0, 1) - PIXELS).square().flatten(1).mean(1)
    assert measured["mse"].values == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-12)
    assert measured["rmse"].values == pytest.approx(expected.sqrt().tolist(), rel=1e-3, abs=1e-6)
    assert measured["psnr"].values[1:] == pytest.approx(
        (-10 * expected[1:].log10()).tolist(), rel=1e-3
    )
    assert measured["label_accuracy"].values == (1.0, 0.0, 1.0, 1.0)
    assert measured["ssim"].values[0] == pytest.approx(1, abs=1e-6)
    assert measured["psnr"].direction == "larger leaks more"
    assert measured["mse"].direction == "larger is safer"


def test_exact_match_is_capped_and_says_so():
    result = by_name(Evaluator().evaluate(reconstruct(PIXELS, LABELS), TRUTH, SPEC))
    assert result["psnr"].values == (120.0,) * 4
    assert result["psnr"].notes == ("at least 120 dB; capped",) * 4
    assert result["mse"].notes == ("",) * 4


def test_pixels_are_clamped_before_they_are_compared():
    over = torch.where(PIXELS > 0.5, PIXELS + 10, PIXELS)
    result = Evaluator().evaluate(reconstruct(over, LABELS), TRUTH, SPEC)
    assert result.matched.max() == 1 and result.matched.min() >= 0
    clamped = reconstruct(over.clamp(0, 1), LABELS)
    expected = by_name(Evaluator().evaluate(clamped, TRUTH, SPEC))["mse"].values
    assert by_name(result)["mse"].values == pytest.approx(expected, rel=1e-5)


def test_soft_labels_count_by_their_largest_entry():
    soft = torch.nn.functional.one_hot(LABELS, 10) * 0.6 + 0.04
    evaluator = Evaluator()
    for truth in (TRUTH, Batch(TRUTH.inputs, soft)):
        for labels in (LABELS, soft):
            result = by_name(evaluator.evaluate(reconstruct(PIXELS, labels), truth, SPEC))
            assert result["label_accuracy"].values == (1.0,) * 4


NAMES = ["mse", "rmse", "psnr", "ssim", "affine_psnr", "label_accuracy"]


@pytest.mark.parametrize(
    ("reconstruction", "reason"),
    [
        (Reconstruction(None, math.nan, error="the update holds NaN"), "the update holds NaN"),
        (Reconstruction(None, math.nan), "the attack gave no reconstruction"),
        (
            Reconstruction(Batch(torch.rand(4, 3, 12, 12), LABELS), 0.0),
            "reconstruction has shape (4, 3, 12, 12), expected (B, 1, 12, 12)",
        ),
        (
            Reconstruction(Batch(TRUTH.inputs * math.nan, LABELS), 0.0),
            "no finite reconstruction was left for this sample",
        ),
        (
            Reconstruction(Batch(TRUTH.inputs, torch.rand(4, 2, 2)), 0.0),
            "reconstruction has targets (4, 2, 2), expected (B,) or (B, K)",
        ),
        (
            Reconstruction(Batch(TRUTH.inputs[:0], LABELS[:0]), 0.0),
            "no finite reconstruction was left for this sample",
        ),
    ],
    ids=["failed", "silent", "shape", "nan", "targets", "empty"],
)
def test_a_failed_reconstruction_has_reasons_in_place_of_numbers(reconstruction, reason):
    result = Evaluator().evaluate(reconstruction, TRUTH, SPEC)
    assert [measurement.name for measurement in result.measurements] == NAMES
    for measurement in result.measurements:
        assert measurement.values == (None,) * 4
        assert measurement.notes == (reason,) * 4
    assert result.assignment.tolist() == [-1] * 4
    assert result.matched.shape == (4, 1, 12, 12) and result.matched.isnan().all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_one_broken_sample_spoils_only_itself(broken):
    pixels = PIXELS.clone()
    pixels[2, 0, 5, 5] = broken
    result = Evaluator().evaluate(reconstruct(pixels, LABELS), TRUTH, SPEC)
    assert result.assignment.tolist() == [0, 1, -1, 3]
    assert result.matched[2].isnan().all() and result.matched[[0, 1, 3]].isfinite().all()
    for measurement in result.measurements:
        assert [value is None for value in measurement.values] == [False, False, True, False]
        assert "no finite reconstruction" in measurement.notes[2]


def test_ssim_of_tiny_images_is_missing_with_its_reason():
    spec = InputSpec((1, 8, 8), 10)
    truth = Batch(torch.rand(2, 1, 8, 8), LABELS[:2])
    result = by_name(Evaluator().evaluate(Reconstruction(truth, 0.0), truth, spec))
    assert result["ssim"].values == (None, None)
    assert "at least 11×11" in result["ssim"].notes[0]
    assert result["mse"].values == (0.0, 0.0)


def test_lpips_without_a_backbone_is_missing_with_its_reason(tmp_path):
    lpips = Lpips("squeeze", str(tmp_path / "nowhere.pth"))
    result = by_name(Evaluator(lpips=lpips).evaluate(reconstruct(PIXELS, LABELS), TRUTH, SPEC))
    assert result["lpips_squeeze"].values == (None,) * 4
    assert "cannot read the backbone" in result["lpips_squeeze"].notes[0]
    assert result["lpips_squeeze"].direction == "larger is safer"
    assert None not in result["psnr"].values


def test_lpips_says_how_images_were_prepared(tmp_path):
    from torchvision.models import squeezenet1_1

    torch.save(squeezenet1_1(weights=None).state_dict(), tmp_path / "weights.pth")
    evaluator = Evaluator(lpips=Lpips("squeeze", str(tmp_path / "weights.pth")))
    one = reconstruct(PIXELS[:1], LABELS[:1])
    result = by_name(evaluator.evaluate(one, TRUTH, SPEC))["lpips_squeeze"]
    assert result.values[0] == pytest.approx(0, abs=1e-4) and result.values[1:] == (None,) * 3
    assert "enlarged bilinearly from 12×12 to 64×64, grey repeated" in result.notes[0]
    assert "no finite reconstruction" in result.notes[1]


def test_inputs_are_unchanged_and_settings_checked():
    reconstruction = reconstruct(PIXELS + 5, LABELS)
    before = reconstruction.batch.inputs.clone(), TRUTH.inputs.clone()
    Evaluator().evaluate(reconstruction, TRUTH, SPEC)
    assert torch.equal(before[0], reconstruction.batch.inputs)
    assert torch.equal(before[1], TRUTH.inputs)
    with pytest.raises(ValueError, match=r"truth must have shape \(B, 1, 12, 12\)"):
        Evaluator().evaluate(reconstruction, Batch(torch.rand(4, 3, 12, 12), LABELS), SPEC)
