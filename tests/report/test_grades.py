"""A grade compares with the blind guess, and says what decided it."""

from flwr_leakage.report.grades import EXACT_DB, decided_by, grade


def test_a_grade_compares_with_the_blind_guess():
    assert grade(EXACT_DB, 12.0) == "exact" and grade(EXACT_DB - 0.1, 12.0) == "recognisable"
    assert [grade(12.0 + more, 12.0) for more in (5.0, 4.9, 1.5, 1.4, -3.0)] == [
        "recognisable", "partly", "partly", "nothing", "nothing",
    ]  # fmt: skip
    assert grade(12.5, 12.0, ssim=0.61, blind_ssim=0.1) == "recognisable"
    assert grade(12.5, 12.0, ssim=0.27, blind_ssim=0.1) == "partly"
    assert (
        grade(14.0, 12.0, lpips=0.05) == "recognisable" and grade(14.0, 12.0, lpips=0.5) == "partly"
    )


def test_a_grade_tells_what_decided_it_if_not_psnr():
    assert decided_by(20.0, 12.0, 0.9, 0.1, 0.01) == ""
    assert decided_by(9.0, 12.0, 0.9, 0.1) == ""  # nothing, by PSNR
    assert decided_by(12.5, 12.0, 0.27, -0.1) == "by SSIM 0.27 (blind −0.10)"
    assert decided_by(14.0, 12.0, 0.2, 0.1, 0.05) == "by LPIPS 0.05"


def test_three_decibels_below_the_blind_guess_is_nothing_however_structured():
    assert grade(9.0, 12.0, ssim=0.9, blind_ssim=0.1, lpips=0.01) == "nothing"


def test_without_a_blind_guess_only_an_exact_image_has_a_grade():
    assert grade(20.0, None) is None and grade(None, 12.0) is None
    assert grade(60.0, None) == "exact"


def test_an_image_is_recognisable_up_to_brightness_and_contrast_by_ten_decibels_only():
    known = {"blind_psnr": 12.0, "ssim": 0.2, "blind_ssim": 0.1, "blind_affine_psnr": 14.1}
    assert grade(9.0, affine_psnr=41.2, **known) == "recognisable"
    assert grade(9.0, affine_psnr=24.0, **known) == "nothing"
    told = decided_by(9.0, affine_psnr=41.2, **known)
    assert told == "by 41.2 dB up to brightness and contrast (blind 14.1)"
    assert decided_by(20.0, affine_psnr=41.2, **known) == ""
