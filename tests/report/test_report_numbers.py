import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report.agreement import agreements
from flwr_leakage.report.charts import rounds_chart, scatter_chart, thin_out
from flwr_leakage.report.header import describe, facts, flatten, given_to_attacker, planned_rounds
from flwr_leakage.report.index import Index, count, label, number
from flwr_leakage.report.tables import (
    attacks_table,
    clients_table,
    costs_table,
    events_table,
    missing,
    rounds_table,
    scores_table,
)
from flwr_leakage.report.verdict import judge


def metric(server_round, client_id, sample, value, name="psnr", note=""):
    return LeakageRecord(
        "r", server_round, client_id, sample, "metric", name, value, "dB", "", note
    )


def score(server_round, client_id, sample, value, direction="larger leaks more", name="s"):
    return LeakageRecord("r", server_round, client_id, sample, "score", name, value, "1", direction)


def objective(server_round, client_id, value, note=""):
    return LeakageRecord(
        "r", server_round, client_id, -1, "attack", "objective", value, "1", "", note
    )


def column(table, name):
    return [row[table.columns.index(name)] for row in table.rows]


def test_verdict_counts_by_its_rule():
    records = [metric(1, 0, 0, 25.0), metric(1, 0, 1, 24.999), metric(1, 1, 0, 40.0)]
    records += [metric(1, 2, 0, None, note="diverged"), objective(1, 2, None), objective(1, 1, 0.1)]
    verdict = judge(Index(records), [], 25.0)
    assert verdict.sentence == "2 of 4 attacked images were recovered; the closest reached 40.0 dB."
    assert verdict.level == "leak"
    assert "at least 25 dB" in verdict.rule
    assert verdict.details == ("1 of 2 attacks gave no reconstruction.",)


def test_verdict_without_a_recovered_image_warns_that_other_attacks_may_do_better():
    verdict = judge(Index([metric(1, 0, 0, 12.0)]), [], 25.0)
    assert (
        verdict.sentence == "None of 1 attacked image was recovered; the closest reached 12.0 dB."
    )
    assert verdict.level == "quiet"
    assert "does not show that no attack would" in verdict.details[0]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "No attack was run and no score was computed."),
        ([score(1, 0, 0, 1.0)], "No attack was run; there are risk scores only."),
        ([objective(1, 0, 0.5)], "1 update was attacked, but without the originals"),
        ([metric(1, 0, 0, 0.5, "ssim")], "no PSNR is known"),
    ],
)
def test_verdict_without_outcome_says_what_is_missing(records, words):
    verdict = judge(Index(records), [], 25.0)
    assert words in verdict.sentence
    assert verdict.level == "unknown"


def test_a_failed_attack_is_not_counted_as_a_second_trouble():
    events = [
        RunEvent("r", 1, 2, "warning", "not recovered"),
        RunEvent("r", 1, 3, "error", "no reply"),
        RunEvent("r", 1, 3, "error", "again"),
        RunEvent("r", 1, 5, "info", "hello"),
        RunEvent("r", 1, -1, "warning", "server"),
    ]
    details = judge(Index([objective(1, 2, None)]), events, 25.0).details
    assert details[0] == "1 of 1 attack gave no reconstruction."
    assert details[1].startswith("In 1 case ") and len(details) == 2


def test_warnings_before_the_rounds_stand_by_the_verdict():
    events = [RunEvent("r", 0, -1, "warning", "read this"), RunEvent("r", 0, -1, "info", "hello")]
    assert judge(Index([metric(1, 0, 0, 30.0)]), events, 25.0).details == ("read this",)


def test_of_several_records_of_one_number_the_last_counts():
    index = Index([metric(1, 0, 0, 10.0), metric(1, 0, 0, 30.0)])
    assert judge(index, [], 25.0).sentence.startswith("1 of 1 attacked image was recovered")


def test_rounds_table():
    records = [metric(1, 0, 0, 20.0), metric(1, 0, 1, 30.0), metric(2, 0, 0, None, note="NaN")]
    records += [metric(1, 0, 0, 1.0, "label_accuracy"), metric(1, 0, 1, 0.0, "label_accuracy")]
    records += [LeakageRecord("r", 0, -1, -1, "utility", "test_accuracy", 0.125)]
    table = rounds_table(Index(records), 25.0)
    assert column(table, "round") == ["before", "1", "2"]
    assert column(table, "attacked") == ["–", "2", "1"]
    assert column(table, "recovered") == ["–", "1 of 2 (50 %)", "–"]
    assert column(table, "PSNR median, dB") == ["–", "25.0", "–"]
    assert column(table, "PSNR highest") == ["–", "30.0", "–"]
    assert column(table, "PSNR lowest") == ["–", "20.0", "–"]
    assert column(table, "label accuracy") == ["–", "50 %", "–"]
    assert column(table, "test accuracy") == ["12.5 %", "–", "–"]
    assert table.notes == ("PSNR: 1 of 3 missing (NaN).",)


def test_missing_values_of_one_reason_share_a_sentence():
    records = [metric(1, 0, 0, None, name, "no weights") for name in ("lpips", "ssim")]
    records += [metric(1, 0, i, None, "mse", f"reason {i}") for i in range(5)]
    assert missing(Index(records), "metric") == (
        "LPIPS, SSIM: all missing (no weights).",
        "MSE: all missing (reason 0; reason 1; reason 2; 2 further reasons).",
    )


def test_attacks_table_counts_those_without_result():
    table = attacks_table(
        Index([objective(1, 0, 0.5), objective(1, 1, None), objective(2, 0, 1.5)])
    )
    assert column(table, "updates attacked") == ["2", "1"]
    assert column(table, "without result") == ["1", "0"]
    assert column(table, "objective median") == ["0.500", "1.50"]


def test_clients_are_ordered_by_their_worst_leak_and_capped():
    records = [metric(1, 0, 0, 10.0), metric(1, 1, 0, 30.0), metric(2, 1, 0, 20.0)]
    records += [metric(1, -1, 0, 15.0), score(1, 3, 0, 2.0)]
    events = [RunEvent("r", 1, 4, "error", "no reply")]
    table = clients_table(Index(records), events, 25.0, limit=10)
    assert column(table, "client") == ["1", "aggregate", "0", "3", "4"]
    assert column(table, "rounds attacked") == ["2", "1", "1", "0", "0"]
    assert column(table, "recovered")[:3] == ["1 of 2 (50 %)", "0 of 1 (0 %)", "0 of 1 (0 %)"]
    assert column(table, "errors, warnings") == ["0", "–", "0", "0", "1"]
    capped = clients_table(Index(records), events, 25.0, limit=2)
    assert column(capped, "client") == ["1", "aggregate"]
    assert capped.notes == ("3 further clients left out.",)


def test_events_come_by_severity_and_say_what_is_left_out():
    levels = ("info", "warning", "error", "info")
    events = [RunEvent("r", i, i - 1, level, str(i)) for i, level in enumerate(levels)]
    table = events_table(events, limit=3)
    assert [row[0] for row in table.rows] == ["error", "warning", "info"]
    assert table.rows[1] == ("warning", "1", "client 0", "1")
    assert table.notes == ("1 further event left out; all are in records.jsonl.",)


def test_costs_are_summed_over_clients_and_rounds():
    records = [
        LeakageRecord("r", r, c, -1, "cost", "train_cpu_seconds", 1.5, "s")
        for r in (1, 2)
        for c in (0, 1)
    ]
    table = costs_table(Index(records))
    assert table.columns == ("round", "train CPU, s")
    assert table.rows == (("1", "3.00"), ("2", "3.00"), ("total", "6.00"))


def paired(scores, outcomes, **named):
    records = [score(1, i, 0, value, **named) for i, value in enumerate(scores)]
    return Index(records + [metric(1, i, 0, value) for i, value in enumerate(outcomes)])


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
    [entry] = agreements(paired(list(values), list(sign * noisy), direction=direction))
    expected = stats.spearmanr(values, sign * noisy)
    assert entry.rho == pytest.approx(expected.statistic)
    assert entry.p_value == pytest.approx(expected.pvalue)
    assert entry.interval[0] < entry.rho < entry.interval[1]
    assert words in entry.reading


def test_a_score_of_pure_chance_tells_nothing():
    rng = np.random.default_rng(1)
    [entry] = agreements(paired(list(rng.normal(size=30)), list(rng.normal(size=30))))
    assert "this run does not tell" in entry.reading


def test_a_drift_over_the_rounds_is_no_ranking_within_one():
    rng = np.random.default_rng(0)
    records = []
    for server_round in range(1, 11):
        for client in range(40):
            records.append(score(server_round, client, 0, 10.0 * server_round + rng.normal()))
            records.append(metric(server_round, client, 0, 10.0 * server_round + rng.normal()))
    [entry] = agreements(Index(records))
    assert entry.rho > 0.9 and abs(entry.within_rounds) < 0.3
    assert "Within single rounds most of that is gone" in entry.reading


def test_rmse_turns_the_expected_sign_round():
    records = [score(1, i, 0, float(i), "larger is safer") for i in range(9)]
    records += [metric(1, i, 0, i + 0.1 * (-1) ** i, "rmse") for i in range(9)]
    records += [metric(1, 3, 0, None)]  # a PSNR that is never there
    [entry] = agreements(Index(records))
    assert entry.outcome == "rmse" and "should be positive" in entry.reading


def test_a_score_of_a_whole_client_meets_its_median_outcome():
    records = [score(1, c, -1, float(c)) for c in range(4)]
    records += [metric(1, c, s, 10.0 * c + s) for c in range(4) for s in range(3)]
    [entry] = agreements(Index(records))
    assert entry.pairs == ((0.0, 1.0), (1.0, 11.0), (2.0, 21.0), (3.0, 31.0))


@pytest.mark.parametrize(
    ("scores", "outcomes"),
    [([], []), ([1.0, 2.0, 3.0], [2.0, 4.0, 3.0]), ([1.0] * 9, [float(i) for i in range(9)])],
)
def test_no_rank_correlation_of_too_little(scores, outcomes):
    index = paired([*scores, None], [*outcomes, 1.0])
    [entry] = agreements(index)
    assert entry.rho is None and entry.interval is None and entry.p_value is None
    assert entry.reading.startswith("Too few pairs")


@given(st.floats(-1e300, 1e300))
def test_number_keeps_three_digits(value):
    written = number(value).replace("−", "-").replace(",", "")
    if "×" in written:
        mantissa, power = written.split(" × 10")
        power = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
        written = f"{mantissa}e{power}"
    if abs(value) > 1e-300:  # denormal numbers have fewer digits than three
        assert float(written) == pytest.approx(value, rel=5.1e-3)


@pytest.mark.parametrize(
    ("value", "written"),
    [(None, "–"), (math.nan, "–"), (0.0, "0"), (9.999, "10.0"), (0.00012, "1.20 × 10⁻⁴"),
     (-3.14159, "−3.14"), (123456.0, "123,456"), (1.5e7, "1.50 × 10⁷")],
)  # fmt: skip
def test_number_examples(value, written):
    assert number(value) == written


def test_label_and_count():
    assert label("lambda_max") == "λmax"
    assert label("train_cpu_seconds") == "train CPU seconds"
    assert label("some_new_score") == "some new score"
    assert (count(1, "reply", "replies"), count(2, "reply", "replies")) == ("1 reply", "2 replies")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(2, 20))
def test_thinned_out_dots_keep_both_ends(values, limit):
    kept = thin_out(values, limit)
    assert len(kept) == min(limit, len(values))
    assert (kept[0], kept[-1]) == (min(values), max(values))
    assert set(kept) <= set(values)


def test_charts_follow_the_page_and_repeat_exactly():
    by_round = {1: [1.0, 2.0, 1000.0], 2: [5.0]}
    first = rounds_chart(by_round, "a", 'what "it" <shows>', threshold=25.0, highest=True)
    assert first == rounds_chart(by_round, "a", 'what "it" <shows>', threshold=25.0, highest=True)
    assert "var(--accent)" in first and "var(--leak)" in first and "#0" not in first
    assert "&lt;shows&gt;" in first and "<metadata" not in first and "<script" not in first
    assert 'id="a-' in first and "url(#a-" in first
    assert "mathdefault" not in first  # labels of a logarithmic axis are plain text


@pytest.mark.parametrize("rounds", [[1], [1, 3], list(range(40))])
def test_rounds_on_the_axis_are_whole_numbers(rounds):
    chart = rounds_chart({server_round: [20.0, 30.0] for server_round in rounds}, "a", "d")
    written = re.findall(r'id="a-xtick_.*?<text[^>]*>([^<]*)<', chart, flags=re.DOTALL)
    assert written and all(int(tick) in [-1, *rounds, 40] for tick in written)


@pytest.mark.parametrize("pairs", [[(1.0, 1.0)], [(0.0, 0.0)] * 2, [(-1.0, 2.0), (1e9, -3.0)]])
def test_scatter_chart_draws_degenerate_data(pairs):
    assert scatter_chart(pairs, "a", "d").startswith("<svg")


def test_facts_name_what_was_run():
    metadata = {
        "defense": "pruning",
        "seed": 3,
        "config": {
            "dataset": "mnist",
            "defense": {"_target_": "x.y.GradientPruning", "prune_ratio": 0.9, "_x": 1},
            "attack": {
                "_target_": "x.Inversion",
                "objective": {"_target_": "z.Cosine"},
                "tv": True,
            },
            "model": None,
        },
    }
    found = {fact.term: (fact.value, fact.settings) for fact in facts(metadata)}
    assert found == {
        "dataset": ("mnist", ""),
        "defense": ("pruning", "prune ratio 0.9"),
        "attack": ("Inversion", "objective Cosine, tv yes"),
        "seed": ("3", ""),
    }


@pytest.mark.parametrize("metadata", [{}, {"config": None}, {"config": [1]}, {"seed": "x"}])
def test_facts_of_odd_metadata(metadata):
    assert facts(metadata) == []
    assert planned_rounds(metadata) is None
    assert given_to_attacker(metadata) == []


def test_what_the_attacker_is_given_is_told_in_words():
    given = given_to_attacker({"threat": "labels known, batch norm none, something new"})
    assert given == ["the true labels", "no BatchNorm statistics", "something new"]


def test_planned_rounds_are_found_at_the_top_or_in_a_group():
    assert planned_rounds({"config": {"num_rounds": 5}}) == 5
    assert planned_rounds({"config": {"strategy": {"num_rounds": 7}}}) == 7


def test_flatten_names_every_leaf_as_an_override():
    config = {"a": {"b": [1, {"c": None}], "d": {}}, "e": True, "f": 1e-05}
    assert flatten(config) == [
        ("a.b.0", "1"), ("a.b.1.c", "null"), ("a.d", "{}"), ("e", "true"), ("f", "1e-05"),
    ]  # fmt: skip


def test_describe_of_nothing():
    assert describe(None) == ("", "")
    assert describe({"_target_": 3}) == ("", "")


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
