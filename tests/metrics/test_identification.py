"""Whether a reconstruction points to its original."""

import torch

from flwr_leakage.metrics import Evaluator, Reference, identification_ranks
from flwr_leakage.records import Batch, InputSpec, Reconstruction

GENERATOR = torch.Generator().manual_seed(0)
TRUTH = torch.rand(4, 1, 12, 12, generator=GENERATOR)
OTHERS = torch.rand(101, 1, 12, 12, generator=GENERATOR)
REFERENCE = Reference(torch.full((1, 12, 12), 0.5), OTHERS)


def test_the_original_is_found_through_noise_and_low_contrast():
    noise = torch.randn(TRUTH.shape, generator=GENERATOR)
    faint = 0.5 + 0.1 * (TRUTH - 0.5) + 0.01 * noise
    ranks, counts = identification_ranks(faint, TRUTH, REFERENCE)
    assert ranks.tolist() == [1] * 4 and set(counts.tolist()) == {101}


def test_a_reconstruction_of_another_image_points_there():
    ranks, _ = identification_ranks(OTHERS[:4], TRUTH, REFERENCE)
    assert min(ranks.tolist()) > 1


def test_a_blind_guess_comes_last():
    guess = REFERENCE.guess.expand_as(TRUTH)
    ranks, counts = identification_ranks(guess, TRUTH, REFERENCE)
    assert ranks.tolist() == counts.tolist()


def test_random_answers_are_first_as_often_as_chance_says():
    truth = torch.rand(400, 1, 12, 12, generator=GENERATOR)
    answers = torch.rand(400, 1, 12, 12, generator=GENERATOR)
    small = Reference(REFERENCE.guess, OTHERS[:9])
    ranks, _ = identification_ranks(answers, truth, small)
    assert 15 <= (ranks == 1).sum() <= 70  # 40 expected


def test_the_original_in_the_pool_is_no_other_image():
    pool = torch.cat([OTHERS[:100], TRUTH[:1]])
    ranks, counts = identification_ranks(TRUTH, TRUTH, Reference(REFERENCE.guess, pool))
    assert ranks.tolist() == [1] * 4
    assert counts.tolist() == [101] * 4


def test_the_blind_guess_is_measured_beside_the_reconstruction():
    spec = InputSpec((1, 12, 12), 10)
    labels = torch.zeros(4, dtype=torch.int64)
    answer = Reconstruction(Batch(TRUTH, labels), 0.0)
    found = Evaluator().evaluate(answer, Batch(TRUTH, labels), spec, REFERENCE)
    by_name = {measured.name: measured for measured in found.measurements}
    mse = (TRUTH - 0.5).square().flatten(1).mean(1)
    expected = (-10 * mse.log10()).tolist()
    assert torch.allclose(torch.tensor(by_name["blind_psnr"].values), torch.tensor(expected))
    assert by_name["identification_rank"].values == (1.0,) * 4
    assert by_name["identification_rank"].notes[0] == "of 101 images"
    failed = Evaluator().evaluate(
        Reconstruction(None, 0.0, error="no"), Batch(TRUTH, labels), spec, REFERENCE
    )
    by_name = {measured.name: measured for measured in failed.measurements}
    assert None not in by_name["blind_psnr"].values
    assert by_name["identification_rank"].values == (None,) * 4


def test_up_to_brightness_a_faint_original_ranks_first_and_the_blind_guess_last():
    stream = torch.Generator().manual_seed(3)
    pool = torch.rand(20, 1, 8, 8, generator=stream).double()
    reference = Reference(pool.mean(0), pool)
    faint = 0.2 + 0.05 * pool[:4]
    ranks, counts = identification_ranks(faint, pool[:4], reference, up_to_brightness=True)
    assert ranks.tolist() == [1, 1, 1, 1] and counts.tolist() == [20] * 4
    blind = 0.3 + 0.5 * reference.guess.expand(4, -1, -1, -1)
    ranks, counts = identification_ranks(blind, pool[:4], reference, up_to_brightness=True)
    assert torch.equal(ranks, counts)
