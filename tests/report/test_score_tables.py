"""Scores: whether they rank the leaks, how sure they are, what was left out."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from told import metric, objective, score, spared

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.figures import score_figures, score_pairs
from flwr_leakage.report.index import Index
from flwr_leakage.report.tables import (
    client_scores_table,
    constants,
    left_out_by_plan,
    missing,
    scores_table,
)


def test_what_the_plan_of_scoring_left_out_is_one_sentence():
    notes = ("29 of 30 samples not scored: budget", "1,119 of 1,120 samples not scored: budget")
    records = [score(1, i, 0, 1.0) for i in range(2)]
    records += [
        LeakageRecord("r", 1, i, -1, "score", "s", None, "1", "", note)
        for i, note in enumerate(notes)
    ]
    index = Index(records)
    [told] = left_out_by_plan(index)
    assert told.startswith("s: 1,148 of 1,150 samples (images of a client in a round) were left")
    assert "2 were scored" in told
    assert missing(index, "score") == ()


def paired(scores, outcomes, **named):
    records = [score(1, i, 0, value, **named) for i, value in enumerate(scores)]
    return Index(records + [metric(1, i, 0, value) for i, value in enumerate(outcomes)])


def figures_of(chart):
    return chart.figures.replace("\u00a0", " ").split(" · ")


@pytest.mark.parametrize(
    ("direction", "sign", "words"),
    [
        ("larger leaks more", 1, "It is: the score ranks"),
        ("larger leaks more", -1, "backwards"),
        ("larger is safer", -1, "It is: the score ranks"),
        ("larger is safer", 1, "backwards"),
        ("", 1, "claims no direction"),
    ],
)
def test_the_reading_follows_the_direction(direction, sign, words):
    values = np.arange(20.0)
    noisy = values + np.random.default_rng(0).normal(0, 3, 20)
    [entry] = score_figures(paired(list(values), list(sign * noisy), direction=direction))
    expected = stats.spearmanr(values, sign * noisy)
    rho, size, p_value = figures_of(entry)
    assert rho == f"ρ within rounds = {expected.statistic:+.2f}".replace("-", "−")
    assert size == "n = 20 images" and p_value.endswith(" × 10⁻⁴")
    assert words in entry.caption


def test_a_score_of_pure_chance_tells_nothing():
    rng = np.random.default_rng(1)
    [entry] = score_figures(paired(list(rng.normal(size=30)), list(rng.normal(size=30))))
    assert "this run does not tell" in entry.caption


def over_rounds(scores, outcomes, num_rounds, name="s"):
    """The same images in every round, with the same numbers."""
    records = []
    for server_round in range(1, num_rounds + 1):
        for i, (value, reached) in enumerate(zip(scores, outcomes, strict=True)):
            records += [score(server_round, i, 0, value, name=name)]
            records += [metric(server_round, i, 0, reached)]
            where = ("r", server_round, i, 0, "client", "image")
            records.append(LeakageRecord(*where, 1.0))
    return records


def test_five_images_in_three_rounds_are_five_and_not_fifteen():
    scores, outcomes = [1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 4.0, 3.0, 2.0, 1.0]
    records = over_rounds(scores, outcomes, 3)
    [alone] = score_figures(Index(records))
    assert figures_of(alone)[1:] == ["n = 5 images", "p = 0.017"]  # 2 / 5!
    assert "ranks the images backwards" in alone.caption  # a perfect order, of a single score
    more = over_rounds([2.0, 1.0, 3.0, 5.0, 4.0], outcomes, 3, "t")
    more += over_rounds([1.0, 5.0, 3.0, 2.0, 4.0], outcomes, 3, "u")
    found = score_figures(Index(records + more + over_rounds([2.0] * 5, outcomes, 3, "constant")))
    assert "backwards" in found[0].caption  # 3 · 2 / 5! is 5 %
    assert all("this run does not tell" in entry.caption for entry in found[1:])
    found = score_figures(
        Index(records + more + over_rounds([3.0, 1.0, 4.0, 2.0, 5.0], outcomes, 3, "v"))
    )
    assert found[0].caption.startswith(
        "Too few images to tell: 5 can be compared with others of a round. It takes 6: of fewer, "
        "chance alone puts them into a perfect order for one of 4 scores in more than 5 % of runs. "
        "Do not rely on it here."
    )


def test_a_drift_over_the_rounds_is_no_agreement():
    rng = np.random.default_rng(1)
    records = []
    for server_round in range(1, 11):
        for client in range(40):
            records.append(score(server_round, client, 0, 10.0 * server_round + rng.normal()))
            records.append(metric(server_round, client, 0, 10.0 * server_round + rng.normal()))
    [entry] = score_figures(Index(records))
    pairs = [(x, y) for _, _, x, y in score_pairs(Index(records), "s", "psnr")]
    assert stats.spearmanr(*zip(*pairs, strict=True)).statistic > 0.9
    assert "n = 40 images" in figures_of(entry)
    assert "this run does not tell" in entry.caption


def test_rmse_turns_the_expected_sign_round():
    records = [score(1, i, 0, float(i), "larger is safer") for i in range(9)]
    records += [metric(1, i, 0, i + 0.1 * (-1) ** i, "rmse") for i in range(9)]
    records += [metric(1, 3, 0, None)]  # a PSNR that is never there
    [entry] = score_figures(Index(records))
    assert "ρ with RMSE should be positive" in entry.caption
    assert "It is: the score ranks the images of a round" in entry.caption


def test_a_score_of_a_whole_client_meets_its_median_outcome():
    records = [score(1, c, -1, float(c)) for c in range(4)]
    records += [metric(1, c, s, 10.0 * c + s) for c in range(4) for s in range(3)]
    pairs = [(x, y) for _, _, x, y in score_pairs(Index(records), "s", "psnr")]
    assert pairs == [(0.0, 1.0), (1.0, 11.0), (2.0, 21.0), (3.0, 31.0)]


@pytest.mark.parametrize(
    ("scores", "outcomes", "words"),
    [
        ([], [], None),
        ([1.0, 2.0, 3.0], [2.0, 4.0, 3.0], "Too few images to tell: 3 can be compared"),
        ([1.0] * 9, [float(i) for i in range(9)], None),
        ([float(i) for i in range(9)], [1.0] * 9, "All images are equal"),
    ],
)
def test_no_rank_correlation_of_too_little(scores, outcomes, words):
    found = score_figures(paired([*scores, None], [*outcomes, 1.0]))
    if words is None:
        assert all(figures_of(entry) == ["n = 0 images"] for entry in found)
        return
    [entry] = found
    assert entry.caption.startswith(words)


def test_a_score_of_what_defenses_hide_says_why_it_is_zero_and_has_no_column():
    records = [
        replace(score(1, i, 0, 0.0, name="hidden"), note="δ = 0: nothing was hidden")
        for i in range(3)
    ]
    index = Index([*records, *(score(1, i, 0, float(i), name="moves") for i in range(3))])
    (told,) = constants(index)
    assert told.startswith("hidden: 0 for every sample, hence with neither chart nor column.")
    assert "The reason: δ = 0: nothing was hidden. δ is what a defense changed" in told
    assert client_scores_table(index, 9).columns == ("client", "moves")


def test_a_client_that_was_not_attacked_is_not_called_safe_by_its_score():
    records = [score(1, 0, 0, 1.0), score(1, 7, 0, 90.0), objective(1, 0, 0.1)]
    index = Index([*records, spared(1, 7, 90, "too many")])
    (told,) = client_scores_table(index, 9).notes
    assert told.startswith("Client 7 was not attacked: where a score makes it look safe")


def test_scores_stand_with_their_error_bars_and_states():
    def bar(sample, value, error, state):
        return LeakageRecord(
            "r", 1, 0, sample, "score", "lambda_max", value, "1", "", "", error, state
        )

    records = [
        bar(0, 2.0, 0.1, "within tolerance"),
        bar(1, 1.0, 0.3, "within tolerance"),
        bar(2, 4.0, None, "lower bound"),
        bar(3, None, None, "unresolved"),
        score(1, 0, 0, 3.0),
    ]
    table = scores_table(Index(records))
    assert table.rows == (
        ("λmax", "2.00 ± 0.10", "30 %", "2 within tolerance, 1 lower bound, 1 unresolved"),
    )
    only_bounds = scores_table(Index([bar(0, None, None, "upper bound")]))
    assert only_bounds.rows == (("λmax", "–", "–", "1 upper bound"),)
