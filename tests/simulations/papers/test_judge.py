"""What decides a claim, how many values that takes, and what remains of a figure's claims."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from simulations.papers import Judgement
from simulations.papers.i2f import Initialisation, Noise
from simulations.papers.intervals import share_interval
from simulations.papers.judge import HALF, decide, figure_of, together
from simulations.papers.lavp_study import told
from simulations.papers.plan import plan


def test_the_needed_n_of_a_share_of_all_is_where_its_exact_interval_reaches_the_line():
    claim = decide("x", "all", share_interval(10, 10), 10, least=0.95)
    assert claim.judgement is Judgement.UNDECIDED and claim.needed == 72
    assert share_interval(71, 71)[1] < 0.95 <= share_interval(72, 72)[1]
    none = decide("x", "many", share_interval(0, 30), 30, least=0.1)
    assert none.needed == 36 and share_interval(0, 36)[2] < 0.1 <= share_interval(0, 35)[2]


def test_the_needed_n_decides_four_of_five_samples():
    claim = decide("x", "0.5", (0.4, 0.4 - HALF / 10**0.5, 0.4 + HALF / 10**0.5), 10, 0.0, size=0.5)
    n = claim.needed
    means = np.random.default_rng(0).normal(0.5, 1.0, size=(4000, n)).mean(1)
    assert 0.78 < np.mean(means - HALF / n**0.5 > 0) < 0.83


@pytest.mark.parametrize(
    ("found", "size", "expected"),
    [
        ((0.0, -0.1, 0.2), 0.5, Judgement.DOES_NOT_HOLD),
        ((0.0, -0.1, 0.2), 0.3, Judgement.UNDECIDED),
        ((0.0, -0.1, 0.2), None, Judgement.UNDECIDED),
        ((0.0, -0.1, 0.2), -0.5, Judgement.UNDECIDED),  # the paper's own number is against it
        ((0.1, 0.05, 0.2), 0.5, Judgement.HOLDS),  # the claim is of the sign
    ],
)
def test_an_interval_below_half_of_the_printed_size_speaks_against_the_claim(found, size, expected):
    assert decide("x", "y", found, 50, least=0.0, size=size).judgement is expected
    value, low, high = found
    turned = decide("x", "y", (-value, -high, -low), 50, most=0.0, size=size)
    assert turned.judgement is expected


def test_p_is_one_less_the_level_of_the_interval_that_ends_at_the_line():
    assert decide("x", "y", (0.5, 0.0, 0.7), 50, least=0.0).p == pytest.approx(0.05)
    assert decide("x", "y", share_interval(10, 10), 10, least=0.95).p == pytest.approx(1.0)
    assert decide("x", "y", share_interval(72, 72), 72, least=0.95).p == pytest.approx(0.0498, 1e-2)
    # Between two lines, both must be ruled out.
    assert decide("x", "y", (1.0, 0.5, 1.9), 9, 0.0, 2.0).p == pytest.approx(
        2 * (0.5 * math.erfc(HALF / 0.9 / 2**0.5)), 1e-3
    )


def test_claims_of_one_figure_are_tested_together():
    def claim(place, p):
        found = decide(f"It grows ({place}).", "y", (0.5, 0.1, 0.9), 50, least=0.0)
        return replace(found, p=p)

    claims = [claim("Fig. 2", 0.01), claim("Fig. 2", 0.04), claim("Fig. 2", 0.026)]
    assert together(claims) == [True, False, False]  # 0.01 ≤ 0.05/3, 0.026 > 0.05/2
    assert together([*claims[:2], claim("Fig. 3", 0.04)]) == [True, True, True]
    undecided = decide("x (Fig. 2).", "y", (0.5, -0.1, 0.9), 50, least=0.0)
    assert together([undecided, *claims[:1]]) == [None, True]
    assert figure_of("I_lb bounds (eq. 5): share") == "eq. 5"


def rows_of(error, strongest=None):
    more = {} if strongest is None else {"strongest mse": strongest}
    return [{"grey mse": 0.1, "L2 mse": error + 0.001 * i, **more} for i in range(4)]


def test_a_claim_says_by_whose_attack_it_is_judged():
    seen = {"A": rows_of(0.01), "B": rows_of(0.2)}
    assert told({"A": seen["A"]}, "L2") == ""
    assert told(seen, "L2") == "L2 attacks do no better than grey on B: judges them too"
    asked = {"A": seen["A"], "B": rows_of(0.2, 0.001), "C": rows_of(0.2, 0.3)}
    assert told(asked, "L2") == (
        "L2 attacks do no better than grey on B, C: judged by this project's strongest on B; "
        "left out: C"
    )


def test_ours_judges_where_neither_attack_of_the_paper_does_better_than_grey():
    noise = Noise([1e-6], 5, 0, [0])
    study = Initialisation(["mnist"], ["GS"], {"mnist": 1}, noise, ours="strongest")

    def table(mse):
        rows = [(s, i, m * (1 + 0.01 * i)) for s, m in mse.items() for i in range(5)]
        scheme, image, error = map(np.array, zip(*rows, strict=True))
        return {"scheme": scheme, "image": image, "mse": error}

    grey = table({"uniform": 1.5, "normal": 2.0})
    ours = table({"uniform": 0.01, "normal": 0.05})
    arguments = "normal", "uniform", 2.0
    alone = study._claim("x", grey, None, *arguments)
    assert alone.judgement is Judgement.NOT_COMPARABLE and "size=thorough" in alone.reason
    judged = study._claim("x", grey, ours, *arguments)
    assert judged.judgement is Judgement.HOLDS and judged.ours == pytest.approx(5)
    assert judged.reason.endswith("judged by strongest")
    assert study._claim("x", grey, grey, *arguments).reason.count("nor does strongest") == 1
    assert not study._claim("x", ours, grey, *arguments).reason


def test_the_plan_counts_what_experiments_share_once(tmp_path):
    open_claim = {"judgement": "undecided", "n": 10, "needed": 72}
    for name in ("i2f_bound", "i2f_damping", "huang_labels"):
        (tmp_path / name).mkdir()
        page = {"name": name, "size": "cpu", "claims": [open_claim], "cpu_seconds": 100.0}
        page["spent"] = {"a": 100.0} if name.startswith("i2f") else {"b": 100.0}
        (tmp_path / name / "findings.json").write_text(json.dumps(page))
    rows, hours = plan(tmp_path)
    assert [row["n needed"] for row in rows] == ["72"] * 3
    # 72 images in place of 10 and one seed in place of three; huang_labels needs no more.
    assert hours == pytest.approx(100 * 7.2 / 3 / 3600)
