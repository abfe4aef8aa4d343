"""Intervals cover what they should, and repeated rows of an image count once."""

import json

import numpy as np
import pytest

from flwr_leakage.defenses import GaussianNoise, LaplacianNoise
from simulations.papers import Judgement
from simulations.papers.federated import _difference, _within_rounds
from simulations.papers.huang_claims import _grows
from simulations.papers.intervals import mean_interval
from simulations.papers.judge import by_difference
from simulations.papers.page import write_index


@pytest.mark.parametrize("count", [2, 4, 8])
def test_an_interval_of_few_values_covers_the_mean(count):
    draws = np.random.default_rng(0).normal(size=(500, count))
    covered = [low <= 0 <= high for _, low, high in map(mean_interval, draws.tolist())]
    assert 0.92 < np.mean(covered) < 0.98


def test_fewer_than_four_pairs_are_not_judged():
    claim = by_difference("x", 1.0, [1.0, 1.1, 1.2], [0.0, 0.0, 0.0])
    assert claim.judgement is Judgement.NOT_COMPARABLE
    assert claim.reason == "n = 3 is too few for an interval" and claim.ours == pytest.approx(1.1)
    four = by_difference("x", 1.0, [1.0, 1.1, 1.2, 1.1], [0.0] * 4)
    assert four.judgement is Judgement.HOLDS


def test_an_image_under_six_ratios_is_one_image():
    noise = np.random.default_rng(0).normal(size=8)
    claim = _grows(lambda name: (float(name.split()[1]) + noise).tolist(), 1)
    assert claim.n == 8 and claim.low < claim.ours < claim.high


def rows_of(defense, level, clients=5):
    return [
        {"strategy": "fedavg", "partition": "iid", "defense": defense, "seed": 100, "round": t}
        | {"client": c, "sample": s, "psnr": level + c + 0.1 * s, "gradient_norm": -(c + 0.1 * s)}
        for t in (1, 5)
        for c in range(clients)
        for s in range(2)
    ]


def test_a_client_in_several_rounds_is_one_client():
    claim = _difference("x", rows_of("pruning", 5.0), rows_of("none", 10.0))
    assert claim.n == 5 and claim.ours == pytest.approx(-5)
    assert claim.judgement is Judgement.HOLDS
    ranks = _within_rounds(rows_of("none", 10.0), "gradient_norm")
    assert len(ranks["score"]) == 20 and len(np.unique(ranks["client"])) == 5
    assert ranks["score"] + ranks["psnr"] == pytest.approx(1.0)


def test_trainings_under_two_defenses_have_two_entries(lab):
    for defense in (GaussianNoise(), LaplacianNoise()):
        lab.trained(
            network="LeNet", data="digits/2", epochs=0, num_images=2, seed=0, defense=defense
        )
    assert len(lab.part.spent) == 2


def test_the_index_counts_shared_parts_once(tmp_path):
    page = {"title": "T", "size": "cpu", "claims": []}
    for name, spent in (("a", {"x": 10.0, "y": 5.0}), ("b", {"x": 10.0}), ("c", None)):
        kept = {**page, "name": name, "cpu_seconds": 15.0 if spent is None else sum(spent.values())}
        (tmp_path / name).mkdir()
        text = json.dumps(kept if spent is None else {**kept, "spent": spent})
        (tmp_path / name / "findings.json").write_text(text)
    assert "CPU time 30 s;" in write_index(tmp_path).read_text()
