"""Huang et al. 2021: the formula of Table 3 and the printed cells."""

import pytest

from flwr_leakage.papers.huang_claims import PAPER
from flwr_leakage.papers.huang_cost import PRINTED, InstaHideCost
from flwr_leakage.papers.huang_table2 import DEFENSES


@pytest.mark.parametrize(("images", "hours"), PRINTED.items())
def test_the_papers_constants_give_the_papers_cells(images, hours):
    assert round(InstaHideCost().total(images), 2) == hours


def test_decoding_is_quadratic_and_inversion_linear():
    cost = InstaHideCost(similarity_encodings=0, similarity_hours=0.0)
    assert cost.inversion(20_000) == 2 * cost.inversion(10_000)
    assert cost.decoding(20_000) == 4 * cost.decoding(10_000)


def test_every_row_has_its_defense_and_its_cells():
    assert list(DEFENSES) == list(PAPER) and len(PAPER) == 13
    assert PAPER["InstaHide 4 + prune 0.9"].lpips[32] == 0.73
