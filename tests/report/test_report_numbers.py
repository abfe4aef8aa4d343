import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report.agreement import agreement_told, agreements
from flwr_leakage.report.attempts import attempts, fates
from flwr_leakage.report.budget import ended_by_time
from flwr_leakage.report.charts import rounds_chart, scatter_chart
from flwr_leakage.report.costs import costs_table
from flwr_leakage.report.drawing import thin_out
from flwr_leakage.report.grades import EXACT_DB, decided_by, grade
from flwr_leakage.report.header import (
    describe,
    facts,
    flatten,
    given_to_attacker,
    planned_rounds,
    withheld_from_attacker,
)
from flwr_leakage.report.identification import beyond_chance, by_chance, chance_told
from flwr_leakage.report.index import Index, count, label, number
from flwr_leakage.report.remedies import remedies, remedies_table
from flwr_leakage.report.score_tables import (
    client_scores_table,
    constants,
    left_out_by_plan,
    scores_table,
)
from flwr_leakage.report.story import sentences
from flwr_leakage.report.story_chart import BAND, Dot, Panel, story_chart
from flwr_leakage.report.tables import (
    attacks_table,
    classes_table,
    clients_table,
    events_table,
    missing,
    rounds_table,
)
from flwr_leakage.report.verdict import judge
from flwr_leakage.report.words import RANKED


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


def blind(server_round, client_id, sample, value=12.0):
    return metric(server_round, client_id, sample, value, "blind_psnr")


def with_blind(*records):
    """The records, with a blind guess of 12 dB for every sample."""
    keys = {(r.server_round, r.client_id, r.sample) for r in records}
    return Index([*records, *(blind(*key) for key in keys)])


def spared(server_round, client_id, images, reason):
    return LeakageRecord(
        "r", server_round, client_id, -1, "client", "not_attacked", images, "image", "", reason
    )


def test_a_grade_compares_with_the_blind_guess():
    assert grade(EXACT_DB, 12.0) == "exact" and grade(EXACT_DB - 0.1, 12.0) == "recognisable"
    assert [grade(12.0 + more, 12.0) for more in (5.0, 4.9, 1.5, 1.4, -3.0)] == [
        "recognisable", "partly", "partly", "nothing", "nothing",
    ]  # fmt: skip
    assert grade(12.5, 12.0, ssim=0.61, blind_ssim=0.1) == "recognisable"
    assert grade(12.5, 12.0, ssim=0.27, blind_ssim=0.1) == "partly"
    assert (
        grade(14.0, 12.0, lpips=0.05) == "recognisable" and grade(14.0, 12.0, lpips=0.5) == "partly"
    )


def test_a_grade_tells_what_decided_it_if_not_psnr():
    assert decided_by(20.0, 12.0, 0.9, 0.1, 0.01) == ""
    assert decided_by(9.0, 12.0, 0.9, 0.1) == ""  # nothing, by PSNR
    assert decided_by(12.5, 12.0, 0.27, -0.1) == "by SSIM 0.27 (blind −0.10)"
    assert decided_by(14.0, 12.0, 0.2, 0.1, 0.05) == "by LPIPS 0.05"


def test_three_decibels_below_the_blind_guess_is_nothing_however_structured():
    assert grade(9.0, 12.0, ssim=0.9, blind_ssim=0.1, lpips=0.01) == "nothing"


def test_without_a_blind_guess_only_an_exact_image_has_a_grade():
    assert grade(20.0, None) is None and grade(None, 12.0) is None
    assert grade(60.0, None) == "exact"


def test_verdict_counts_grades_and_names_who_is_most_at_risk():
    records = [metric(1, 0, 0, 20.0), metric(1, 0, 1, 11.0), metric(1, 1, 0, 60.0)]
    records += [metric(2, 1, 0, 61.0), metric(1, 2, 0, None), objective(1, 2, None, "it diverged.")]
    verdict = judge(with_blind(*records, objective(1, 1, 0.1)), [])
    assert verdict.sentence == (
        "Private images leak. 5 attempts (an image in a round) in 2 rounds, on 3 clients: "
        "2 exact, 1 recognisable, 1 nothing, 1 without result."
    )
    assert verdict.level == "leak"
    assert verdict.details[0].startswith(
        "Most at risk: client 1: 2 attempts, 2 exact; its worst case was an exact copy (on average "
        "off by less than one of 255 grey levels) in round 2."
    )
    assert verdict.details[1].startswith("Replay check not done: ")
    assert verdict.details[2] == (
        "Attack could not be applied, or gave no result, on 1 of 2 attacked updates (client 2): "
        "it diverged."
    )


def test_verdict_says_what_the_client_at_risk_does_in_each_round():
    does = LeakageRecord("r", 1, 0, -1, "client", "images", 1.0, "image", "", "1 image, 1 step")
    details = judge(with_blind(metric(1, 0, 0, 20.0)), []).details
    assert details[0].startswith("Most at risk: client 0: ")
    details = judge(Index([metric(1, 0, 0, 20.0), blind(1, 0, 0), does]), []).details
    assert details[0].startswith("Most at risk: client 0 (each round: 1 image, 1 step): ")


def test_verdict_says_where_labels_were_wrong():
    def details(*right, threat=""):
        records = [metric(1, 0, i, value, "label_accuracy") for i, value in enumerate(right)]
        index = with_blind(metric(1, 0, 0, 11.0), *records)
        return judge(index, [], {"threat": threat}).details

    told = "Labels: the attack got the label right in 1 of 2 attempts. With a wrong label"
    assert any(text.startswith(told) for text in details(1.0, 0.0))
    assert not any("Labels" in text for text in details(1.0, 1.0, threat="labels known"))
    told = "Labels leak too: the attack got the label right in 2 of 2 attempts, from the update"
    assert any(text.startswith(told) for text in details(1.0, 1.0, threat="labels inferred"))


def image(server_round, client_id, sample, number):
    return LeakageRecord("r", server_round, client_id, sample, "client", "image", number)


def test_verdict_counts_images_where_the_truth_tells_them_apart():
    # Client 0 has one image, at another place in round 2; client 1 has another one.
    records = [metric(1, 0, 0, 60.0), metric(2, 0, 3, 20.0), metric(1, 1, 0, 11.0)]
    numbers = [image(1, 0, 0, 1.0), image(2, 0, 3, 1.0), image(1, 1, 0, 1.0)]
    verdict = judge(with_blind(*records, *numbers), [])
    assert verdict.sentence == (
        "Private images leak. 1 of the 2 attacked images can be seen (exact or recognisable). "
        "2 images of 2 clients, each by its worst round: 1 exact, 1 nothing."
    )
    assert verdict.details[0] == (
        "Over all 3 attempts (an image in a round) in 2 rounds: 1 exact, 1 recognisable, 1 nothing."
    )
    assert verdict.details[1] == (
        "Most at risk: client 0: 1 image, 1 exact; its worst case was an exact copy (on average "
        "off by less than one of 255 grey levels) in round 1, image 1. It leaks in rounds 1 and 2."
    )


def test_verdict_and_tables_name_the_same_client_first():
    # The worst grades are equal: client 1 leaks more often, client 0 has more decibels once.
    records = [metric(1, 0, 0, 90.0), metric(1, 0, 1, 8.0), metric(1, 1, 0, 60.0)]
    index = with_blind(*records)
    assert any("Most at risk: client 1:" in text for text in judge(index, []).details)
    assert column(clients_table(index, [], attempts(index), 10), "client") == ["1", "0"]


def test_verdict_below_the_blind_guess_is_nothing_and_warns_that_other_attacks_may_do_better():
    verdict = judge(with_blind(metric(1, 0, 0, 9.0), metric(1, 0, 1, 8.0)), [])
    assert verdict.sentence.startswith("This attack found nothing. 2 attempts")
    assert verdict.level == "quiet"
    assert "does not show that every attack would" in verdict.details[0]


def test_verdict_of_recognisable_images_at_20_db_is_a_leak():
    verdict = judge(with_blind(*(metric(1, 0, sample, 20.0) for sample in range(4))), [])
    assert "4 recognisable" in verdict.sentence and verdict.level == "leak"


def test_identification_is_compared_with_chance():
    ranks = [metric(1, 0, i, 1.0, "identification_rank", "of 101 candidates") for i in range(4)]
    verdict = judge(with_blind(*(metric(1, 0, i, 11.0) for i in range(4)), *ranks), [])
    assert any(
        "4 of 4 attempts point to the original among it and 100 others" in text
        and "something leaks that no grade shows" in text
        for text in verdict.details
    )


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "No attack was run and no score was computed."),
        ([score(1, 0, 0, 1.0)], "No attack was run; there are risk scores only."),
        ([objective(1, 0, 0.5)], "1 update was attacked, but without the originals"),
        ([metric(1, 0, 0, 0.5, "ssim")], "no PSNR is known"),
        ([metric(1, 0, 0, 20.0)], "no blind guess to compare with was recorded"),
        ([objective(1, 0, None, "no")], "The attack could not be applied: 1 update was attacked"),
        ([spared(1, 0, 9, "no attack is configured")], "No update was attacked"),
    ],
)
def test_verdict_without_outcome_says_what_is_missing(records, words):
    verdict = judge(Index(records), [])
    assert words in verdict.sentence
    assert verdict.level == "unknown"


def test_what_was_not_attacked_is_told_with_its_reason():
    many = "images, more than the 8 that are attacked at most"
    rests = "attacks run every 2 rounds from round 1 on"
    records = [metric(1, 0, 0, 20.0), objective(1, 0, 0.1)]
    records += [spared(1, 3, 30, f"30 {many}"), spared(1, 4, 1200, f"1,200 {many}")]
    records += [spared(2, client, 30, rests) for client in (0, 3, 4)]
    details = judge(with_blind(*records), []).details
    expected = "Not attacked: clients 3 and 4 (30 to 1,200 images, more than the 8 that are"
    assert any(text.startswith(expected) for text in details)
    assert f"Not attacked: round 2 ({rests})." in details


def test_a_failed_attack_is_not_counted_as_a_second_trouble():
    events = [
        RunEvent("r", 1, 2, "warning", "not recovered"),
        RunEvent("r", 1, 3, "error", "no reply"),
        RunEvent("r", 1, 3, "error", "again"),
        RunEvent("r", 1, 5, "info", "hello"),
        RunEvent("r", 1, -1, "warning", "server"),
    ]
    details = judge(Index([objective(1, 2, None)]), events).details
    assert "on 1 of 1 attacked update (client 2)" in details[1]
    assert details[2].startswith("In 1 case ") and len(details) == 3


def test_warnings_before_the_rounds_stand_by_the_verdict():
    events = [RunEvent("r", 0, -1, "warning", "read this"), RunEvent("r", 0, -1, "info", "hello")]
    assert judge(with_blind(metric(1, 0, 0, 30.0)), events).details[-1] == "read this"


def test_of_several_records_of_one_number_the_last_counts():
    index = Index([metric(1, 0, 0, 10.0), metric(1, 0, 0, 30.0), blind(1, 0, 0)])
    assert "1 recognisable" in judge(index, []).sentence


def test_a_what_if_is_measured_on_the_same_attempts():
    def under(name, value):
        return LeakageRecord("r", 1, 0, 0, "what_if", f"pruning/{name}", value)

    records = [metric(1, 0, 0, 60.0), metric(1, 5, 0, 60.0), under("psnr", 11.0)]
    records += [under("blind_psnr", 12.0)]
    records += [LeakageRecord("r", 1, 0, -1, "what_if", "pruning/relative_change", 0.5)]
    metadata = {"config": {"what_if": {"pruning": {"_target_": "x.Pruning", "prune_ratio": 0.9}}}}
    [remedy] = remedies(with_blind(*records[:2], *records[2:]), metadata)
    assert remedy.defense == "pruning (Pruning, prune ratio 0.9)"
    assert remedy.sentence.startswith(
        "On the same 1 attempt, 1 exact (median PSNR 60.0 dB) would have become 1 nothing (median "
        "PSNR 11.0 dB). It would have changed an update by 50 % of its size (Euclidean norm, "
        "median). Whether a time limit ended attacks under it was not recorded."
    )
    assert [attempt.key for attempt in remedy.before] == [(1, 0, 0)]
    assert remedies_table([remedy]).rows == (
        ("client 0", "as it was sent", "1", "1 exact", "60.0", "60.0", "–"),
        ("client 0", "under pruning", "1", "1 nothing", "11.0", "11.0", "–"),
    )
    assert remedies(Index(records[:2]), {}) == []


def test_the_story_is_told_in_sentences():
    def images(client, count, note):
        return LeakageRecord("r", 1, client, -1, "client", "images", count, "image", "", note)

    records = [images(0, 1, "1 image, 1 step"), images(1, 300, "300 images, 30 steps")]
    records += [objective(1, 0, 0.1), spared(1, 1, 300, "too many")]
    for server_round, value in ((0, 0.1), (1, 0.9)):
        records.append(LeakageRecord("r", server_round, -1, -1, "utility", "test_accuracy", value))
    metadata = {"model": "lenet", "dataset": "digits", "defense": "none", "attack": "best",
                "threat": "labels known"}  # fmt: skip
    index = Index(records)
    told = sentences(index, metadata, fates(index), 1)
    assert told == [
        "2 clients with 1 to 300 images trained a small convolutional network (LeNet) on digits "
        "for 1 round; test accuracy rose from 10 % to 90 %. No defense was used.",
        "What a client does in a round: client 0: 1 image, 1 step; client 1: 300 images, 30 steps.",
        "The server kept to the protocol and attacked what it received (“honest but curious”) "
        "with the attack “best”: the updates of client 0 in round 1.",
        "Besides the updates and the model it was given: the true labels.",
    ]


def test_a_run_without_an_attack_says_so():
    index = Index([spared(1, 0, 3, "no attack is configured")])
    told = sentences(index, {}, fates(index), 1)
    assert any(text.startswith("No attack was configured") for text in told)


def test_rounds_table():
    records = [metric(1, 0, 0, 20.0), metric(1, 0, 1, 11.0), metric(2, 0, 0, None, note="NaN")]
    records += [metric(1, 0, 0, 1.0, "label_accuracy"), metric(1, 0, 1, 0.0, "label_accuracy")]
    records += [metric(1, 0, 0, None, "lpips_alex", "no weights")]
    records += [blind(1, 0, 0), blind(1, 0, 1), blind(2, 0, 0)]
    records += [LeakageRecord("r", 0, -1, -1, "utility", "test_accuracy", 0.125)]
    index = Index(records)
    table = rounds_table(index, attempts(index))
    assert column(table, "round") == ["before", "1", "2"]
    assert column(table, "attempts") == ["–", "2", "1"]
    assert column(table, "recognisable") == ["–", "1", "–"]
    assert column(table, "nothing") == ["–", "1", "–"]
    assert column(table, "PSNR median, dB") == ["–", "15.5", "–"]
    assert column(table, "PSNR highest") == ["–", "20.0", "–"]
    assert column(table, "PSNR lowest") == ["–", "11.0", "–"]
    assert column(table, "blind guess median, dB") == ["–", "12.0", "12.0"]
    assert column(table, "label accuracy") == ["–", "50 %", "–"]
    assert column(table, "test accuracy") == ["12.5 %", "–", "–"]
    assert not any("LPIPS" in name for name in table.columns)
    assert "PSNR: 1 of 3 missing (NaN)." in table.notes


def test_classes_are_ordered_by_their_worst_leak():
    def label_of(client, name):
        return LeakageRecord("r", 1, client, 0, "client", "class", 0.0, "", "", name)

    records = [metric(1, 0, 0, 11.0), metric(1, 1, 0, 60.0), label_of(0, "cat"), label_of(1, "dog")]
    table = classes_table(attempts(with_blind(*records)))
    assert column(table, "class") == ["dog", "cat"] and column(table, "exact") == ["1", "0"]
    assert column(table, "where")[0] == "round 1, client 1"


def test_a_class_that_leaks_less_often_but_worse_comes_first():
    def label_of(sample, name):
        return LeakageRecord("r", 1, 0, sample, "client", "class", 0.0, "", "", name)

    psnr = {0: 20.0, 1: 30.0, 2: 11.0, 3: 13.6, 4: 14.0}  # cat: all of it; dog: half of it
    names = ("cat", "dog", "dog", "ant", "bee")
    records = [metric(1, 0, sample, value) for sample, value in psnr.items()]
    table = classes_table(
        attempts(with_blind(*records, *(label_of(*each) for each in enumerate(names))))
    )
    assert column(table, "class") == ["dog", "cat", "bee", "ant"]


def test_missing_values_of_one_reason_share_a_sentence():
    records = [metric(1, 0, 0, None, name, "no weights") for name in ("lpips", "ssim")]
    records += [metric(1, 0, i, None, "mse", f"reason {i}") for i in range(5)]
    assert missing(Index(records), "metric") == (
        "LPIPS, SSIM: all missing (no weights).",
        "MSE: all missing (reason 0; reason 1; reason 2; 2 further reasons).",
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


def test_attacks_table_counts_those_without_result():
    table = attacks_table(
        Index([objective(1, 0, 0.5), objective(1, 1, None), objective(2, 0, 1.5)]), []
    )
    assert column(table, "updates attacked") == ["2", "1"]
    assert column(table, "without result") == ["1", "0"]
    assert column(table, "objective median") == ["0.500", "1.50"]


def test_clients_are_ordered_by_their_worst_leak_and_capped():
    records = [metric(1, 0, 0, 10.0), metric(1, 1, 0, 30.0), metric(2, 1, 0, 20.0)]
    records += [metric(1, -1, 0, 15.0), score(1, 3, 0, 2.0), spared(1, 3, 9, "too many")]
    records += [metric(1, 1, 0, 1.0, "identification_rank", "of 101 candidates")]
    events = [RunEvent("r", 1, 4, "error", "no reply")]
    index = with_blind(*records)
    found = attempts(index)
    table = clients_table(index, events, found, limit=10)
    assert column(table, "client") == ["1", "aggregate", "0", "3", "4"]
    assert column(table, "attempts") == ["2", "1", "1", "–", "–"]
    assert column(table, "recognisable")[:3] == ["2", "0", "0"]
    assert column(table, "identified")[0] == "1 of 1 (100 %)"
    assert column(table, "not attacked, because")[3] == "too many"
    assert column(table, "errors, warnings") == ["0", "–", "0", "0", "1"]
    capped = clients_table(index, events, found, limit=2)
    assert column(capped, "client") == ["1", "aggregate"]
    assert capped.notes == ("3 further clients left out.", RANKED)


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
    assert table.rows == (("total", "6.00"), ("1", "3.00"), ("2", "3.00"))


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
    first = rounds_chart(by_round, "a", 'what "it" <shows>', "dB")
    assert first == rounds_chart(by_round, "a", 'what "it" <shows>', "dB")
    assert "var(--accent)" in first and "#0" not in first
    assert "&lt;shows&gt;" in first and "<metadata" not in first and "<script" not in first
    assert 'id="a-' in first and "url(#a-" in first
    assert "mathdefault" not in first  # labels of a logarithmic axis are plain text


def test_values_near_each_other_stand_in_full_at_the_axis():
    chart = rounds_chart({1: [2.30501], 2: [2.30503], 3: [2.30502]}, "a", "d")
    written = re.findall(r'id="a-ytick_.*?<text[^>]*>([^<]*)<', chart, flags=re.DOTALL)
    assert written and all(tick.startswith("2.305") for tick in written)
    assert not any("+" in text for text in re.findall(r"<text[^>]*>([^<]*)<", chart))


def test_the_story_chart_shares_its_rounds_and_shows_accuracy_as_percentages():
    panels = [
        Panel(
            0, {1: [Dot(100.0, "exact")], 3: [Dot(90.0, "exact")]}, {"a": {1: [14.0]}}, {1: [12.0]}
        ),
        Panel(1, {1: [Dot(20.0, "recognisable"), Dot(13.0, "")]}, {"b<": {1: [13.0]}}, {1: [12.0]}),
    ]
    chart = story_chart({0: [0.1], 1: [0.5]}, panels, "s", "d")
    texts = re.findall(r"<text[^>]*>([^<]*)<", chart)
    assert {"0", "25", "50", "75", "100", "accuracy, %", "client 0", "client 1"} <= set(texts)
    assert {"blind guess, median", "median if a", "median if b", "round of training"} <= set(texts)
    assert texts.count("round of training") == 1
    bands = [text for text in texts if text == "exact" or text.startswith("blind +")]
    assert bands == ["exact", "blind +5 dB", "blind +1.5 dB", *bands[1:3]]
    assert "hollow: ended by its time limit" not in texts
    ended = story_chart({}, [Panel(0, {1: [Dot(20.0, "partly", ended=True)]})], "s", "d")
    assert "hollow: ended by its time limit" in ended and "image graded partly" in ended
    pooled = story_chart({}, [Panel(None, {1: [Dot(20.0, "")]})], "s", "d")
    assert "all clients" in pooled and "recognisable<" not in pooled


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


@pytest.mark.parametrize("decibels", [48.2, 120.0])
def test_whatever_is_exact_is_drawn_at_one_height(decibels):
    def heights(psnr):
        panel = Panel(0, {1: [Dot(psnr, "exact")]}, {}, {1: [12.0]})
        return re.findall(r'<use [^>]*y="([\d.]+)"', story_chart({}, [panel], "s", "d"))

    assert heights(decibels) == heights(48.1308036086791 + BAND / 2)


@pytest.mark.parametrize("unit", ["<script>", "$x^$", "dB", "1", ""])
def test_no_foreign_sign_enters_a_chart(unit):
    chart = rounds_chart({1: [1.0]}, "a", "d", unit)
    written = re.findall(r"<text[^>]*>([^<]*)<", chart)
    assert not any(sign in text for text in written for sign in "<>$^&")


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


@pytest.mark.parametrize(
    ("server", "attack", "told"),
    [
        (
            {"attack_max_seconds": 4.0},
            {"max_seconds": 120.0},
            "at most 4 CPU seconds for an update (of server.attack_max_seconds=4 and "
            "attack.max_seconds=120 the smaller one holds)",
        ),
        (
            {"attack_max_seconds": None},
            {"max_seconds": 9.5},
            "at most 9.5 CPU seconds for an update",
        ),
        ({"attack_max_seconds": None}, {"max_seconds": None}, ""),
        ({"attack_max_seconds": 4.0, "attack_later": True}, {"max_seconds": 120.0}, ""),
    ],
)
def test_the_attack_is_told_with_the_time_that_it_had(server, attack, told):
    metadata = {"config": {"server": server, "attack": {"_target_": "x.Strongest", **attack}}}
    assert [(fact.value, fact.settings) for fact in facts(metadata)] == [("Strongest", told)]


def test_the_verdict_names_the_time_budget_and_whom_it_stopped():
    def stopped(server_round, client):
        where = ("r", server_round, client, -1)
        return LeakageRecord(*where, "attack", "stopped_by_budget", 1.0)

    hit = [(1, 1), (3, 1), (5, 1), (2, 0), (2, 2), *((r, r) for r in (3, 4, 6))]
    records = [record for each in hit for record in (stopped(*each), objective(*each, 0.1))]
    metadata = {"config": {"server": {"attack_max_seconds": 4.0}}}
    assert judge(Index(records), [], metadata).details[1:] == (
        "The time limit of 4 CPU seconds ended the attack on 8 of 8 updates (clients 0 and 2 in "
        "round 2; client 1 in rounds 1, 3 and 5; client 3 in round 3; 2 further clients): more "
        "time may find more, and what was found there depends on the speed of the machine. "
        "That less is found in later rounds is no sign of safety where the limit ended the attack.",
    )
    assert judge(Index(records), []).details[1].startswith("The time limit ended the attack on 8")


def test_more_time_cannot_find_more_than_an_exact_or_solved_update():
    stopped = LeakageRecord("r", 1, 0, -1, "attack", "stopped_by_budget", 1.0)
    other = LeakageRecord("r", 1, 1, -1, "attack", "stopped_by_budget", 1.0)

    def told(*records):
        index = with_blind(*records, metric(1, 0, 0, 60.0), metric(1, 1, 0, 11.0))
        return ended_by_time(index, fates(index), attempts(index), None)

    assert told(stopped) == ()
    (found,) = told(stopped, other, objective(1, 0, 0.1), objective(1, 1, 0.1))
    assert "on 1 of 2 updates (client 1 in round 1): more time may find more" in found
    note = (
        "labels known; a + finish chosen: a stopped 0.2 (x); a + finish {} 0.1 in 0.5 s; b refused"
    )
    assert told(other, objective(1, 1, 0.1, note.format("solved"))) == ()
    assert told(other, objective(1, 1, 0.1, note.format("stopped")))


def test_missing_weights_are_told_without_paths_or_errors_of_the_system():
    why = "no trained backbone is at hand (it could not be fetched: <urlopen error>); put x into /r"
    lacking = LeakageRecord("r", 1, 0, 0, "metric", "lpips_squeeze", None, note=why)
    assert missing(Index([lacking]), "metric") == (
        "LPIPS was not measured: its weights could not be fetched (no network).",
    )
    other = replace(lacking, note="the image is too small")
    assert "too small" in missing(Index([other]), "metric")[0]


@pytest.mark.parametrize(("first", "beyond"), [(0, False), (1, False), (2, True)])
def test_more_originals_than_chance_are_those_that_it_reaches_in_one_run_of_twenty(first, beyond):
    # Of 15 attempts among 101 a guess finds one or more with 14 %, two or more with 1 %.
    records = [metric(1, 0, i, 11.0) for i in range(15)]
    for i in range(15):
        rank, note = 1.0 if i < first else 7.0, "of 101 candidates"
        where = ("r", 1, 0, i, "metric", "identification_rank")
        records.append(LeakageRecord(*where, rank, note=note))
    found = attempts(with_blind(*records))
    assert by_chance(found) == 1 and beyond_chance(found) is beyond
    assert "with 15 attempts as here at most 1; more" in chance_told(found)
    told = " ".join(judge(with_blind(*records), []).details)
    assert "once in 101, so 0.15 times in 15." in told


def test_scores_are_told_apart_by_whether_they_rank_the_leaks():
    noise = np.random.default_rng(0).normal(0, 3, 20)
    records = [metric(1, i, 0, i + noise[i]) for i in range(20)]
    records += [score(1, i, 0, float(i), "larger leaks more", "good") for i in range(20)]
    records += [score(1, i, 0, -float(i), "larger leaks more", "bad") for i in range(20)]
    told = agreement_told(agreements(Index(records)))
    assert told == ("Yes, as they claim: good. No, backwards: bad. Rely on no other here.")
    assert agreement_told(agreements(Index(records[:20] + records[40:]))).endswith(
        "Rely on none of them here."
    )


def test_a_client_that_was_not_attacked_is_not_called_safe_by_its_score():
    records = [score(1, 0, 0, 1.0), score(1, 7, 0, 90.0), objective(1, 0, 0.1)]
    index = Index([*records, spared(1, 7, 90, "too many")])
    (told,) = client_scores_table(index, 9).notes
    assert told.startswith("Client 7 was not attacked: where a score makes them look safe")


@pytest.mark.parametrize("metadata", [{}, {"config": None}, {"config": [1]}, {"seed": "x"}])
def test_facts_of_odd_metadata(metadata):
    assert facts(metadata) == []
    assert planned_rounds(metadata) is None
    assert given_to_attacker(metadata) == []


def test_what_the_attacker_is_given_is_told_in_words():
    given = given_to_attacker({"threat": "labels known, batch norm none, something new"})
    assert given == ["the true labels", "something new"]
    withheld = withheld_from_attacker({"threat": "labels inferred, batch norm none"})
    assert withheld[0].startswith("the labels (") and withheld[1:] == [
        "statistics of batch normalisation"
    ]


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
