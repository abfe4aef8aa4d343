from itertools import product

import pytest

from flwr_leakage.attacks.exact.fading_stages import Outcome, Stage, first_stage, next_stage

NOTHING = Outcome(met=False, has_proven=False, is_settled=False, is_doubtful=False)


def walk(*outcomes, is_settled=False):
    stages = [first_stage(is_settled)]
    for outcome in outcomes:
        stages.append(next_stage(stages[-1], outcome))
    return stages


def outcome(**facts):
    return Outcome(**{**vars(NOTHING), **facts})


def test_candidates_that_prove_masks_lead_to_a_deep_fading_that_meets_the_equations():
    proven = outcome(has_proven=True)
    all_proven = outcome(has_proven=True, is_settled=True)
    assert walk(proven, proven, all_proven, outcome(met=True, is_settled=True)) == [
        Stage.ROUGH,
        Stage.MIDDLE,
        Stage.MIDDLE,
        Stage.DEEP,
        Stage.MET,
    ]


def test_two_candidates_in_a_row_that_prove_nothing_lead_deep_and_then_to_grey():
    assert walk(outcome(has_proven=True), NOTHING, NOTHING, NOTHING, NOTHING) == [
        Stage.ROUGH,
        Stage.MIDDLE,
        Stage.LONGER,
        Stage.DEEP,
        Stage.DEEP_FROM_GREY,
        Stage.EXHAUSTED,
    ]


def test_a_proof_begins_again_even_after_deep_fadings():
    proven = outcome(has_proven=True)
    assert walk(NOTHING, NOTHING, proven)[-2:] == [Stage.DEEP, Stage.MIDDLE]
    assert walk(NOTHING, NOTHING, NOTHING, proven)[-2:] == [Stage.DEEP_FROM_GREY, Stage.MIDDLE]
    assert walk(NOTHING, proven)[-2:] == [Stage.LONGER, Stage.MIDDLE]


def test_without_one_proven_mask_nothing_fades_deeply():
    doubtful = outcome(is_doubtful=True)
    assert walk(doubtful, doubtful) == [Stage.ROUGH, Stage.LONGER, Stage.DOUBTFUL]


def test_with_all_masks_known_at_the_start_one_fading_from_grey_decides():
    settled = outcome(is_settled=True)
    assert walk(settled, is_settled=True) == [Stage.DEEP_FROM_GREY, Stage.EXHAUSTED]
    met = outcome(is_settled=True, met=True)
    assert walk(met, is_settled=True) == [Stage.DEEP_FROM_GREY, Stage.MET]


def test_only_deep_fadings_are_asked_to_meet_the_equations():
    for stage in (Stage.ROUGH, Stage.MIDDLE, Stage.LONGER):
        assert next_stage(stage, outcome(met=True)) is not Stage.MET
        assert not stage.is_deep


def test_every_stage_has_a_successor_until_an_end_and_proofs_are_the_only_way_back():
    outcomes = [Outcome(*facts) for facts in product([False, True], repeat=4)]
    order = [Stage.ROUGH, Stage.MIDDLE, Stage.LONGER, Stage.DEEP, Stage.DEEP_FROM_GREY]
    for stage, each in product(Stage, outcomes):
        if stage.is_end:
            with pytest.raises(ValueError, match="no stage follows"):
                next_stage(stage, each)
        elif not each.has_proven:
            following = next_stage(stage, each)
            assert following.is_end or order.index(following) > order.index(stage)
