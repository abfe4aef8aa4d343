from dataclasses import replace

import pytest
import torch
from masked import known_of, masked_case

from flwr_leakage.attacks.exact.mask_equations import Hidden


def hidden_case(proven=7):
    """ReLUs of which the first few masks are proven, and the case they are from."""
    case = masked_case(smooth=True)
    first, second, *_ = case.chain
    hidden = Hidden.begin([first], second, case.behind, proof=1e-7)
    assert hidden.is_proven
    certain = torch.arange(12) < proven
    known = known_of(hidden.evidence.equations, hidden.known.mask.on, certain)
    return replace(hidden, known=known), case


def test_a_candidate_gives_new_hidden_relus_and_leaves_the_old_ones():
    hidden, case = hidden_case()
    before = hidden.known.mask.on.clone()
    refined = hidden.refine(case.truth)
    assert hidden.num_proven == 7
    assert refined.num_proven == 12
    assert torch.equal(hidden.known.mask.on, before)
    assert torch.equal(refined.known.mask.on, case.preactivations > 0)


def test_own_equations_are_those_of_the_masks_that_are_proven():
    hidden, case = hidden_case()
    refined = hidden.refine(case.truth)
    assert len(hidden.equations.own.rows) < len(refined.equations.own.rows)
    assert refined.equations.sum_of_squares(case.truth) < 1e-7


def test_nothing_is_proven_of_relus_without_evidence():
    case = masked_case(smooth=True)
    first, second, *_ = case.chain
    bare = Hidden.begin([first], second, case.behind, is_sought=False)
    assert bare.is_settled
    assert not bare.is_proven
    assert not bare.is_doubtful
    assert bare.refine(case.truth) is bare
    assert bare.equations.own is None
    assert bare.equations.sum_of_squares(case.truth) == pytest.approx(0, abs=1e-7)
