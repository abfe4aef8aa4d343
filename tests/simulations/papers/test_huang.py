"""Huang et al. 2021: the formula of Table 3 and the printed cells."""

import pytest
import torch

from flwr_leakage.metrics import Lpips
from flwr_leakage.records import Batch, InputSpec
from simulations.papers.huang_claims import PAPER
from simulations.papers.huang_cost import PRINTED, InstaHideCost
from simulations.papers.huang_table2 import DEFENSES
from simulations.papers.victims import Measures


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


def test_lpips_has_one_name_whatever_its_backbone(tmp_path):
    spec = InputSpec((3, 8, 8), 2)
    batch = Batch(torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    measures = Measures(Lpips("squeeze", str(tmp_path / "nowhere.pth")))
    rows = measures.in_batches(batch.inputs, batch, 1, spec, defense="none")
    assert [row["sample"] for row in rows] == [0, 1]
    assert all("lpips" in row and row["psnr"] == 120.0 for row in rows)
