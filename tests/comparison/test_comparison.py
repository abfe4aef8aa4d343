"""Runs beside each other: grouped by what differs, averaged over seeds, written for others."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.comparison import compare, export, frontier, outcome, write_comparison
from flwr_leakage.comparison.compare import format_spread, run_folders
from flwr_leakage.comparison.export import export_records
from flwr_leakage.comparison.outcome import SAID
from flwr_leakage.comparison.price import prices
from flwr_leakage.measurements import DEFENDED_BY
from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking import JsonlTracker, read_run, write_metadata


def write_run(folder, psnr, accuracy=0.5, close=True, seed=0, choices=None, **config):
    """A run folder with some images of given PSNR, ``None`` for a failed attack."""
    tracker = JsonlTracker(folder)
    for sample, value in enumerate(psnr):
        for name, number in (("psnr", value), ("blind_psnr", 12.0)):
            tracker.log(
                LeakageRecord(
                    "run", 1, 0, sample, "metric", name, number, "dB", "larger leaks more"
                )
            )
    for server_round in (0, 1):
        tracker.log(
            LeakageRecord(
                "run", server_round, -1, -1, "utility", "test_accuracy",
                accuracy if server_round else 0.1, "1", "larger is safer",
            )
        )  # fmt: skip
    if close:
        tracker.close()
    write_metadata(folder, {**config, "choices": choices or {}}, seed)
    return folder


@pytest.fixture
def sweep(tmp_path):
    """Two defenses, two seeds each."""
    number = 0
    for defense, psnr in (("none", 40.0), ("pruning", 12.0)):
        for seed in (0, 1):
            write_run(
                tmp_path / str(number), [psnr + 2 * seed, 8.0], 0.9 - 0.1 * seed, seed=seed,
                choices={"defense": defense}, defense={"_target_": defense},
            )  # fmt: skip
            number += 1
    return tmp_path


def test_runs_of_equal_settings_are_averaged_over_their_seeds(sweep):
    found = compare([sweep])
    assert found.settings == ("defense",)
    assert [group.settings["defense"] for group in found.groups] == ["none", "pruning"]
    best = found.groups[0]
    assert best.mean("psnr_best") == 41.0
    assert best.deviation("psnr_best") is None
    assert best.mean("leaked") == 0.5
    assert best.mean("test_accuracy") == pytest.approx(0.85)
    assert "41.0 (40.0 to 42.0, n = 2)" in str(found) and "±" not in str(found)


def test_lpips_is_found_under_the_name_of_its_network(tmp_path):
    folder = write_run(tmp_path / "run", [20.0])
    tracker = JsonlTracker(folder, resume=True)
    tracker.log(LeakageRecord("run", 1, 0, 0, "metric", "lpips_squeeze", 0.3))
    tracker.close()
    assert outcome(read_run(folder)).values["lpips_median"] == 0.3


def test_below_five_seeds_a_range_and_their_number_stand_for_a_deviation(tmp_path):
    for seed, psnr in enumerate((60.0, 20.0, 60.0, 20.0, 40.0)):
        write_run(tmp_path / str(seed), [psnr], seed=seed)
    three = compare([tmp_path / str(seed) for seed in range(3)])
    assert "46.7 (20.0 to 60.0, n = 3)" in str(three)
    assert three.groups[0].deviation("psnr_best") is None
    [row] = three.to_pandas().to_dict("records")
    assert (row["psnr_best_n"], row["psnr_best_low"], row["psnr_best_high"]) == (3, 20.0, 60.0)
    assert math.isnan(row["psnr_best_sd"] or math.nan)
    five = compare([tmp_path])
    assert "40.0 ± 20.0" in str(five)
    assert five.groups[0].deviation("psnr_best") == pytest.approx(20.0)


def test_runs_without_a_config_are_no_repetitions_of_each_other(tmp_path):
    for name, psnr in (("plain", 60.0), ("pruned", 20.0)):
        write_run(tmp_path / name, [psnr])
        (tmp_path / name / "run.json").unlink()
    found = compare([tmp_path])
    assert [group.name for group in found.groups] == ["run=plain", "run=pruned"]


def test_a_setting_within_an_option_counts_where_that_option_was_run_with_several(tmp_path):
    for number, (option, ratio) in enumerate([("none", None), ("pruning", 0.5), ("pruning", 0.9)]):
        defense = {"_target_": option, **({} if ratio is None else {"prune_ratio": ratio})}
        choices = {"defense": option, "engine": str(number)}
        folder = tmp_path / str(number)
        write_run(folder, [1.0], choices=choices, defense=defense, run_dir=str(folder))
    found = compare([tmp_path])
    assert found.settings == ("defense", "defense.prune_ratio")
    assert [group.settings["defense.prune_ratio"] for group in found.groups] == ["–", "0.5", "0.9"]


def test_runs_that_differ_in_many_settings_are_named_by_their_folders(tmp_path):
    for name, value in (("bare", 1), ("0", 2)):
        write_run(tmp_path / name, [40.0], client={f"key_{n}": value for n in range(7)})
    found = compare([tmp_path / "bare", tmp_path / "0"])
    assert len(found.settings) == 7 and found.labels == ("run",)
    headings, rows = found.cells()
    sweep = f"{tmp_path.name}/0"
    assert headings[:2] == ["run", "runs"] and [row[0] for row in rows] == ["bare", sweep]
    page = write_comparison(found, tmp_path / "page.html").read_text()
    assert "differ in 7 settings" in page and 'data-column="bare">1</td>' in page
    assert f'data-column="{sweep}">2</td>' in page
    assert list(found.to_pandas()["client.key_6"]) == ["1", "2"]


def test_failed_attacks_count_as_attacked_and_unfinished_runs_are_told(tmp_path):
    write_run(tmp_path / "a", [30.0, None, None, None], close=False)
    run = outcome(read_run(tmp_path / "a"))
    assert (run.values["attempts"], run.values["leaked"]) == (4, 0.25)
    assert run.values["partly"] == 0.0 and run.status == "not finished"
    assert "not finished" in compare([tmp_path]).problems[0]


def test_images_of_which_parts_leak_are_told_beside_those_recognised(tmp_path):
    found = compare([write_run(tmp_path / "a", [14.0, 11.0])])
    headings, [cells] = found.cells()
    shown = dict(zip(headings, cells, strict=True))
    assert (shown["recognised"], shown["partly"]) == ("0%", "50%")


def test_a_run_without_numbers_has_none(tmp_path):
    JsonlTracker(tmp_path / "a").close()
    found = compare([tmp_path / "a"])
    assert found.runs[0].status == "no attack was graded"
    assert found.runs[0].values["leaked"] is None
    with pytest.raises(ValueError, match="no group has both"):
        frontier(found)


def test_a_seed_that_occurs_twice_is_told(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, [1.0], seed=3)
    assert any("a seed occurs twice" in problem for problem in compare([tmp_path]).problems)


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        compare([tmp_path])


def test_folders_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("10", "9", "b", "a"):
        write_run(tmp_path / name, [1.0])
    assert [path.name for path in run_folders(tmp_path)] == ["a", "b", "9", "10"]


def test_the_price_of_a_defense_is_told_beside_the_same_runs_without_one(tmp_path):
    number = 0
    for model in ("lenet", "mlp"):
        for defense, psnr, accuracy in (("none", 40.0, 0.9), ("pruning", 12.0, 0.7)):
            if (model, defense) != ("mlp", "none"):
                choices = {"defense": defense, "model": model}
                write_run(tmp_path / str(number), [psnr, 8.0], accuracy, choices=choices)
            number += 1
    found = compare([tmp_path])
    assert prices(found) == [
        "With defense=pruning, model=lenet (1 run) 0% of the attempts are recognised, without a "
        "defense (1 run) 50%. Test accuracy is 70.0% instead of 90.0%: a price of 20.0 points."
    ]
    assert prices(found)[0] in write_comparison(found, tmp_path / "page.html").read_text()


def test_a_price_tells_which_attacks_were_cut_off(tmp_path):
    for defense in ("none", "noise"):
        folder = write_run(tmp_path / defense, [11.0], choices={"defense": defense})
        tracker = JsonlTracker(folder, resume=True)
        for name in ("objective", "stopped_by_budget")[: 1 + (defense == "noise")]:
            tracker.log(LeakageRecord("run", 1, 0, -1, "attack", name, 1.0))
        tracker.close()
    found = compare([tmp_path])
    assert [group.mean("cut_off") for group in found.groups] == [1.0, 0.0]
    (told,) = prices(found)
    assert told.endswith("The time limit ended 100% of the attacks with this defense: with more "
                         "time more may be recognised.")  # fmt: skip


def with_members(folder, p_of_members, p_of_others):
    """Add the tests of records, whose truth is known, to a run; ``None`` says nothing."""
    tracker = JsonlTracker(folder, resume=True)
    tested = [(p, 1.0) for p in p_of_members] + [(p, 0.0) for p in p_of_others]
    for sample, (p, truth) in enumerate(tested):
        for name, value in (("p_value", p), ("truth", truth)):
            tracker.log(
                LeakageRecord("run", 1, 0, sample, "membership", f"membership_{name}", value)
            )
    tracker.close()
    return folder


def test_members_found_are_counted_at_a_rate_of_false_alarms_over_all_seeds(tmp_path):
    others = [(i + 1) / 200 for i in range(200)]
    for defense, found in (("none", [0.001] * 8), ("noise", [0.001, 0.012, 0.016, 0.3, None])):
        for seed in (0, 1):
            folder = tmp_path / f"{defense}-{seed}"
            write_run(folder, [40.0], seed=seed, choices={"defense": defense})
            with_members(folder, found, others)
    made = compare([tmp_path])
    # Two of 200 others may lie below the threshold, which is then the third, 0.015.
    headings, [noise, none] = made.cells()
    assert noise[headings.index("members found at 1% FPR")] == "40% (12% to 74%, n = 10)"
    assert none[headings.index("members found at 1% FPR")] == "100% (79% to 100%, n = 16)"
    assert "members found at 0.1% FPR" not in headings  # of 200 others none may lie below
    [row] = [row for row in made.to_pandas().to_dict("records") if row["defense"] == "noise"]
    assert row["members_found_at_0.01_mean"] == pytest.approx(0.4)
    assert "at 1% of false alarms, without a defense 100%" in prices(made)[0]


@pytest.mark.parametrize(
    ("accuracy", "words"), [(0.9, "90.0% instead of 90.0%: no price."), (0.95, "5.0 points more.")]
)
def test_a_defense_may_cost_nothing(tmp_path, accuracy, words):
    for defense, value in (("none", 0.9), ("noise", accuracy)):
        write_run(tmp_path / defense, [40.0], value, choices={"defense": defense})
    (told,) = prices(compare([tmp_path]))
    assert told.endswith(words)


def test_a_price_takes_both_numbers_of_both_runs(tmp_path, sweep):
    for defense in ("none", "noise"):
        write_run(tmp_path / "failed" / defense, [], choices={"defense": defense})
    assert prices(compare([tmp_path / "failed"])) == []
    assert prices(compare([sweep / "2"])) == []


def test_the_page_tells_no_home_folder(tmp_path):
    for seed in (0, 1):
        folder = write_run(
            tmp_path / str(seed), [1.0], close=False, dataset={"root": f"/home/jo/{seed}"}
        )
    page = write_comparison(compare([tmp_path]), tmp_path / "page.html").read_text()
    assert folder.is_dir() and "dataset.root=~/1" in page and "/home/jo" not in page


def test_the_frontier_joins_what_nothing_beats(sweep):
    (axes,) = frontier(compare([sweep])).axes
    joined = axes.lines[0].get_xydata().tolist()
    assert joined == [[13.0, pytest.approx(85.0)]]  # equal accuracy, less leakage
    assert axes.get_ylim() == (0, 100)


def test_tables_say_the_same_in_every_format(sweep, tmp_path):
    found = compare([sweep])
    per_group = pd.read_csv(export(found, tmp_path / "a.csv"))
    assert per_group["psnr_best_mean"].tolist() == [41.0, 13.0]
    per_run = pd.read_csv(export(found, tmp_path / "b.csv", per_run=True))
    assert per_run["psnr_best"].tolist() == [40.0, 42.0, 12.0, 14.0]
    assert "41.0 (40.0 to 42.0, n = 2)" in export(found, tmp_path / "a.tex").read_text()
    assert "| none | 2 |" in export(found, tmp_path / "a.md").read_text()
    assert (tmp_path / "a.csv").stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match=r"must end in one of .*, got 'a\.xlsx'"):
        export(found, tmp_path / "a.xlsx")
    with pytest.raises(ValueError, match="per_run"):
        export(found, tmp_path / "a.md", per_run=True)


def test_records_are_a_table(sweep, tmp_path):
    frame = read_run(sweep / "0").to_pandas()
    assert frame[frame.name == "psnr"].value.tolist() == [40.0, 8.0]
    every = pd.read_csv(export_records([sweep], tmp_path / "all.csv"))
    assert len(every) == 4 * len(frame)
    assert every.folder.nunique() == 4


def test_the_page_escapes_settings_and_links_to_reports(tmp_path):
    for seed, name in enumerate(["<script>x</script>", "plain"]):
        folder = write_run(tmp_path / str(seed), [1.0], dataset={"name": name})
    (folder / "report.html").write_text("report")
    page = write_comparison(compare([tmp_path]), tmp_path / "page.html").read_text()
    assert "<script>" not in page
    assert "<a " not in page  # a report that was sent may be any page
    page = write_comparison(compare([tmp_path]), tmp_path / "page.html", True).read_text()
    assert 'href="1/report.html"' in page
    assert page.count("<svg ") == 2  # for a screen and for a phone


@given(st.lists(st.floats(-1e3, 1e3), max_size=8))
def test_a_number_is_written_with_its_spread_or_as_a_dash(numbers):
    text = format_spread(numbers, ".1f")
    assert (text == "–") == (not numbers)
    assert (" ± " in text) == (len(numbers) >= 5)
    assert text.endswith(f"n = {len(numbers)})") == (2 <= len(numbers) < 5)


def test_a_spreadsheet_finds_numbers_and_no_formula(tmp_path):
    for seed, value in enumerate(["=1+1", "-0.5", "+1e-3", "-cmd|x", "a;@b", "plain"]):
        write_run(tmp_path / str(seed), [-1.5], seed=seed, dataset={"name": value})
    table = export(compare([tmp_path]), tmp_path / "a.csv", per_run=True).read_text().splitlines()
    settings = [row.partition(",")[0] for row in table[1:]]
    assert settings == ["'=1+1", "-0.5", "+1e-3", "'-cmd|x", "'a @b", "plain"]
    assert table[0].startswith("dataset.name,")
    assert all(",-1.5," in row for row in table[1:])
    assert pd.read_csv(tmp_path / "a.csv")["psnr_best"].tolist() == [-1.5] * 6
    records = pd.read_csv(export_records([tmp_path], tmp_path / "b.csv"))
    assert records[records.name == "psnr"].value.tolist() == [-1.5] * 6


def test_markdown_and_tex_hold_no_link_and_no_command(tmp_path):
    for seed, value in enumerate(["[a](b) <i> $x$ a|b", "\\input{x}"]):
        write_run(tmp_path / str(seed), [1.0], seed=seed, dataset={"name": value})
    found = compare([tmp_path])
    assert "| \\[a\\](b) &lt;i&gt; \\$x\\$ a\\|b |" in str(found)
    assert "\\textbackslash input\\{x\\}" in export(found, tmp_path / "a.tex").read_text()


def test_one_folder_is_compared_by_its_name(sweep):
    assert str(compare(str(sweep))) == str(compare([sweep])) == str(compare(sweep))


def own_app_run(folder, defense=""):
    """A run folder of a user's own app: no config, no seed."""
    tracker = JsonlTracker(folder)
    tracker.log(LeakageRecord("leakage", 1, 0, 0, "metric", "psnr", 20.0, "dB"))
    if defense:
        said = f"client 0 says: {DEFENDED_BY} {defense}."
        tracker.event(RunEvent("leakage", 1, 0, "info", said))
    tracker.close()
    return folder


def test_runs_of_an_own_app_are_told_apart_though_their_folders_have_one_name(tmp_path):
    plain = own_app_run(tmp_path / "t1" / "leakage")
    pruned = own_app_run(tmp_path / "p2" / "leakage", "GradientPruning")
    made = compare([plain, pruned])
    assert [len(group.runs) for group in made.groups] == [1, 1]
    assert [group.settings["run"] for group in made.groups] == ["t1/leakage", "p2/leakage"]
    assert [group.settings[SAID] for group in made.groups] == ["–", "GradientPruning"]
    assert not [problem for problem in made.problems if "seed" in problem]


def test_runs_that_differ_in_a_defense_that_only_clients_tell_are_not_averaged(tmp_path):
    for name, defense in {"a": "", "b": "GaussianNoise"}.items():
        own_app_run(tmp_path / name, defense)
        write_metadata(tmp_path / name, {"rounds": 3}, 0)
    made = compare(tmp_path)
    assert made.settings == (SAID,)
    assert [len(group.runs) for group in made.groups] == [1, 1]
