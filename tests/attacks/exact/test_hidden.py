from dataclasses import replace

import pytest
import torch
from masked import masked_case

from flwr_leakage.attacks.exact.hidden import Hidden, OwnEquations
from flwr_leakage.attacks.exact.masks import MaskSearch


def hidden_case(proven=7):
    """ReLUs of which the first few masks are proven, and the case they are from."""
    case = masked_case(smooth=True)
    first, second, *_ = case.chain
    hidden = Hidden.begin([first], second, case.behind, MaskSearch(proof=1e-7), OwnEquations())
    assert hidden.is_proven
    masks = replace(hidden.masks, certain=torch.arange(12) < proven)
    return replace(hidden, masks=masks), case


def test_a_candidate_gives_new_hidden_relus_and_leaves_the_old_ones():
    hidden, case = hidden_case()
    proven, believed = hidden.num_proven, hidden.masks.active.clone()
    refined = hidden.refine(case.truth)
    assert hidden.num_proven == proven == 7
    assert refined.num_proven == 12
    assert torch.equal(hidden.masks.active, believed)
    right = (refined.masks.active == (case.preactivations > 0)).all(dim=1)
    assert bool(right[refined.masks.certain].all())


def test_own_equations_are_those_of_the_masks_that_are_proven():
    hidden, case = hidden_case()
    refined = hidden.refine(case.truth)
    before, after = hidden.equations.own, refined.equations.own
    assert len(before.rows) < len(after.rows)
    assert refined.equations.sum_of_squares(case.truth) < 1e-7
    alone = OwnEquations()(refined.link, refined.evidence.errors, refined.masks)
    torch.testing.assert_close(alone.in_units().rows, after.rows)


def test_nothing_is_proven_of_relus_without_evidence():
    hidden, case = hidden_case()
    bare = Hidden.unknown(hidden.before, hidden.link, case.behind, hidden.search, hidden.own)
    assert bare.is_settled
    assert not bare.is_proven
    assert not bare.is_doubtful
    assert bare.refine(case.truth) is bare
    assert bare.equations.own is None
    assert bare.equations.sum_of_squares(case.truth) == pytest.approx(0, abs=1e-7)
