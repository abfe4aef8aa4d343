from dataclasses import replace

import pytest
import torch
from masked import SPEC, equations_of_case

from flwr_leakage.attacks.exact.known import single
from flwr_leakage.attacks.exact.relu_fit import (
    Fading,
    Stage,
    approximate,
    eigenvalues_kept,
    fade,
    fading_of,
    least_squares,
    next_stage,
)
from flwr_leakage.attacks.solve.damped import damped_gauss_newton
from flwr_leakage.spectral.image_prior import ImagePrior


@pytest.mark.parametrize("proven", [12, 9])
def test_fading_leads_from_grey_to_where_gauss_newton_finds_the_input(proven):
    equations, truth, _ = equations_of_case(torch.arange(12) < proven, smooth=True)
    prior = ImagePrior.of(SPEC)
    fading = Fading(10.0, 1e-7, 0.5, 1.5, 60, sharpens=True)
    inputs, value = fade(equations, prior.grey, fading, prior, eigenvalues_kept())
    assert value == pytest.approx(equations.sum_of_squares(inputs))
    assert float((inputs - truth).abs().max()) < 0.05
    *_, found = damped_gauss_newton(lambda x: least_squares(equations, x), inputs, 20)
    assert float((found - truth).abs().max()) < 1e-4


def test_fading_ends_where_it_is_enough():
    equations, *_ = equations_of_case()
    prior = ImagePrior.of(SPEC)
    fading = Fading(10.0, 1e-7, 0.5, 1.5, 60, enough=1e9)

    def value(fading):
        return fade(equations, prior.grey, fading, prior, eigenvalues_kept())[1]

    assert value(fading) == value(replace(fading, last=9.0, enough=0.0))
    assert value(fading) > value(replace(fading, enough=0.0))


def test_the_blur_falls_with_the_weight_and_ends_where_the_fading_sharpens():
    fading = Fading(100.0, 1e-3, 0.1, 0.8, 60)
    assert fading.blur_at(100.0) == pytest.approx(0.8)
    assert fading.blur_at(100.0 / 16) == pytest.approx(0.4)
    assert fading.blur_at(1e-2) > 0
    assert replace(fading, sharpens=True).blur_at(1e-2) == 0
    assert replace(fading, sharpens=True).blur_at(1.1e-2) > 0


def test_eigenvalues_are_computed_after_a_slow_step_and_serve_the_next_ones():
    equations, *_ = equations_of_case(smooth=True)
    prior, kept = ImagePrior.of(SPEC), eigenvalues_kept(many=20)
    fading = Fading(1e-2, 1e-7, 0.3, 0.8, 200)
    fade(equations, prior.grey, replace(fading, last=9e-3), prior, kept)
    assert kept.made is None
    slow, kept.is_due = kept.served, True
    fade(equations, prior.grey, replace(fading, last=9e-3), prior, kept)
    assert kept.made is not None
    assert kept.served < 0.7 * slow


def test_the_approximation_has_the_matrixs_largest_eigenvalues():
    equations, truth, _ = equations_of_case(smooth=True)
    prior = ImagePrior.of(SPEC)
    found = approximate(single(equations), prior.grey, 0.3, prior.single(), rank=truth.numel())
    units = torch.eye(truth.numel()).double().reshape(-1, *truth.shape[1:])
    jacobian = equations.linearise(prior.grey, 0.3).push(prior.push(units))
    expected = torch.linalg.eigvalsh(jacobian @ jacobian.T).flip(0)[:5]
    torch.testing.assert_close(found.values[:5].double(), expected, rtol=1e-3, atol=0)


def test_deep_fadings_share_their_end():
    deep = fading_of(Stage.DEEP)
    assert fading_of(Stage.LONGER) == replace(fading_of(Stage.MIDDLE), last=1e-4)
    assert fading_of(Stage.DEEP_FROM_GREY) == replace(deep, first=10.0, blur=1.5)
    assert fading_of(Stage.FITTED) == replace(deep, first=1e-4, enough=1e-5)


def stages(*fadings, first=Stage.ROUGH):
    """The stages that follow fadings, each with some facts about its candidate."""
    found = [first]
    for facts in fadings:
        found.append(next_stage(found[-1], **facts))
    return found[1:]


PROVED, NOTHING, MET = {"has_proven": True}, {}, {"is_met": True}


def test_candidates_that_prove_nothing_lead_deep_and_then_to_grey():
    assert stages(PROVED, *[NOTHING] * 4) == [
        *(Stage.MIDDLE, Stage.LONGER, Stage.DEEP, Stage.DEEP_FROM_GREY, Stage.EXHAUSTED),
    ]
    assert stages({**PROVED, "is_settled": True}) == [Stage.DEEP]
    assert stages(*[{"is_doubtful": True}] * 2)[-1] is Stage.DOUBTFUL


def test_a_proof_begins_again_even_after_deep_fadings():
    assert stages(NOTHING, NOTHING, PROVED)[-2:] == [Stage.DEEP, Stage.MIDDLE]
    assert stages(NOTHING, NOTHING, NOTHING, PROVED)[-2:] == [Stage.DEEP_FROM_GREY, Stage.MIDDLE]


def test_only_deep_fadings_are_asked_to_meet_the_equations():
    for stage in Stage:
        if not stage.is_last:
            assert (stages(MET, first=stage) == [Stage.FITTED]) is stage.is_deep
