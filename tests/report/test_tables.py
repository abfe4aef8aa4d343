"""The tables of the page."""

from dataclasses import replace

from told import blind, column, metric, objective, score, spared, with_blind

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report.attempts import attempts
from flwr_leakage.report.index import RANKED, RANKED_CLIENTS, Index
from flwr_leakage.report.remedies import remedies, remedies_table
from flwr_leakage.report.tables import (
    attacks_table,
    classes_table,
    clients_table,
    costs_table,
    events_table,
    missing,
    rounds_table,
    unattacked_table,
)


def test_a_what_if_is_measured_on_the_same_attempts():
    def under(name, value):
        return LeakageRecord("r", 1, 0, 0, "what_if", f"pruning/{name}", value)

    records = [metric(1, 0, 0, 60.0), metric(1, 5, 0, 60.0), under("psnr", 11.0)]
    records += [under("blind_psnr", 12.0)]
    records += [LeakageRecord("r", 1, 0, -1, "what_if", "pruning/relative_change", 0.5)]
    metadata = {"config": {"what_if": {"pruning": {"_target_": "x.Pruning", "prune_ratio": 0.9}}}}
    [remedy] = remedies(with_blind(*records[:2], *records[2:]), metadata)
    assert (remedy.setting, remedy.change, remedy.ended) == (" (prune ratio 0.9)", 0.5, {})
    assert [attempt.key for attempt in remedy.before] == [(1, 0, 0)]
    assert remedies_table([remedy]).rows == (
        ("0", "as it was sent", "1", "1 exact", "60.0", "60.0", "–"),
        ("0", "under pruning", "1", "1 nothing", "11.0", "11.0", "–"),
    )
    assert remedies(Index(records[:2]), {}) == []


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


def test_attacks_table_counts_those_without_result():
    table = attacks_table(
        Index([objective(1, 0, 0.5), objective(1, 1, None), objective(2, 0, 1.5)]), []
    )
    assert column(table, "updates attacked") == ["2", "1"]
    assert column(table, "without result") == ["1", "0"]
    assert column(table, "objective median") == ["0.500", "1.50"]


def test_attacked_clients_are_ordered_by_their_worst_leak_and_others_stand_apart():
    records = [metric(1, 0, 0, 10.0), metric(1, 1, 0, 30.0), metric(2, 1, 0, 20.0)]
    records += [metric(1, -1, 0, 15.0), score(1, 3, 0, 2.0), spared(1, 3, 9, "too many")]
    records += [metric(1, 1, 0, 1.0, "identification_rank", "of 101 images")]
    events = [RunEvent("r", 1, 4, "error", "no reply")]
    index = with_blind(*records)
    found = attempts(index)
    table = clients_table(index, events, found, limit=10)
    assert column(table, "client") == ["1", "aggregate", "0"]
    assert column(table, "attempts") == ["2", "1", "1"]
    assert column(table, "recognisable") == ["2", "0", "0"]
    assert column(table, "identified")[0] == "1 of 1 (100 %)"
    assert column(table, "errors, warnings") == ["0", "–", "0"]
    assert "not attacked, because" not in table.columns
    others = unattacked_table(index, events, found, limit=10)
    assert others.columns == ("client", "not attacked, because", "errors, warnings")
    assert others.rows == (("3", "too many", "0"), ("4", "–", "1"))
    assert "not attacked, because" in others.texts
    capped = clients_table(index, events, found, limit=2)
    assert column(capped, "client") == ["1", "aggregate"]
    assert capped.notes == ("1 further client left out.", RANKED, RANKED_CLIENTS)
    capped = unattacked_table(index, events, found, limit=1)
    assert capped.notes == ("1 further client left out.",)


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


def test_missing_weights_are_told_without_paths_or_errors_of_the_system():
    why = "no trained backbone is at hand (it could not be fetched: <urlopen error>); put x into /r"
    lacking = LeakageRecord("r", 1, 0, 0, "metric", "lpips_squeeze", None, note=why)
    assert missing(Index([lacking]), "metric") == (
        "LPIPS was not measured: its weights could not be fetched (no network).",
    )
    other = replace(lacking, note="the image is too small")
    assert "too small" in missing(Index([other]), "metric")[0]
