import base64
import hashlib
import json
import re
from itertools import pairwise

import pytest
from report_page import Page, fill, report
from typer.testing import CliRunner

from flwr_leakage.cli.app import app
from flwr_leakage.measurements import ENDED_EARLY
from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report import write_report
from flwr_leakage.tracking import JsonlTracker, write_metadata


def test_the_whole_page(run_folder):
    _, page = report(run_folder)
    for words in (
        "Contains private training images",
        "Private images leak. 12 attempts (an image in a round) in 2 rounds, on 3 clients: "
        "6 recognisable, 4 nothing, 2 without result.",
        "recognisable 6 5 dB nearer to the original than the blind guess, or SSIM 0.5 "
        "above it; or 10 dB nearer once each has the brightness and contrast that suit the "
        "original best",
        "recognisable or exact 243 88 % 96 % 98 % 0 %",
        "May training go on? Not as it is: the server can see private images, from clients 1 and",
        "Replay check not done: nothing shows that what was attacked",
        "Attack could not be applied, or gave no result, on 1 of 6 attacked updates (client 2)",
        "it was given: the true labels; each client’s update on its own.",
        "What is not covered",
        "This run tried no defense on copies of its updates",
        "PSNR: 2 of 12 missing (no reason was recorded).",
        "ρ within rounds =",
        "no reply",
        "On top: how good the trained model is. Below: each dot is one image in one round",
        "By attacked client, most at risk first",
        "PSNR tells in decibels (dB) how near a reconstruction is to its original",
        "the share of labels that the attack got right.",
        "LeNet",
        "model.width= 1",
        "10 of 10 shown",
        "2 further samples without a reconstruction.",
    ):
        assert words in page.text, words
    assert "Unfinished" not in page.text


def test_the_first_screen_is_the_answer_four_numbers_and_a_map(run_folder):
    html, page = report(run_folder)
    head = Page(re.search(r"<header>.*</header>", html, flags=re.DOTALL)[0]).text
    assert "The run ended after 2 rounds." in head and head.endswith(
        "from clients 1 and 2. Next: Stop, or leave out who is seen. What to do"
    )
    seen = page.visible
    for words in (
        "attempts 6 of 10 seen blind guess: 0",
        "labels inferred not tested given records: was each used? not tested",
        "test accuracy after round 2 50.0 % blind guess not known",
        "Worst grade of each update recognisable nothing tried, without a grade client 0",
        "Attacked: all of 3 clients",
        "What to do Stop, or leave out who is seen. Test one of these changes in a new run: A",
    ):
        assert words in seen, words
    for below in ("Replay check", "it was given", "Attack could not be applied", "98 %"):
        assert below not in seen and below in page.text


def test_no_page_tells_whose_home_a_run_was_made_in(run_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    own, home = tmp_path / "elsewhere" / "a.txt", "/home/jo"
    config = {"data": f"{home}/data", "paths": [f"/mnt{home}/x", "C:\\Users\\jo\\x", f"{own}"]}
    write_metadata(run_folder, config, 5, {"run": "demo"})
    path = run_folder / "run.json"
    metadata = json.loads(path.read_text()) | {"command": f"run a={home}/x b=/rooted/home"}
    path.write_text(json.dumps(metadata))
    tracker = JsonlTracker(run_folder, resume=True)
    tracker.event(RunEvent("demo", 1, 0, "error", f"{home}/.cache/a.pth is damaged"))
    missing = LeakageRecord("demo", 1, 0, 0, "metric", "lpips", None, note="/root/a.pth is damaged")
    tracker.log(missing)
    tracker.close()
    html, page = report(run_folder)
    assert "jo" not in re.findall(r"\w+", page.text) and "/root/" not in html
    assert "elsewhere" not in page.text
    for told in (
        "~/.cache/a.pth is damaged", "(~/a.pth is damaged)", "data= ~/data", "paths.0= ~/x",
        "paths.1= ~\\x", "paths.2= ~/a.txt", "run a=~/x b=/rooted/home",
    ):  # fmt: skip
        assert told in page.text, told


def test_it_needs_nothing_but_itself(run_folder):
    html, page = report(run_folder)
    [policy] = [m["content"] for m in page.all("meta") if m.get("http-equiv")]
    assert policy.startswith("default-src 'none'; img-src data:;")
    [script] = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy  # this script and no other
    assert len(page.all("script")) == 1 and not page.all("link") and not page.all("iframe")
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    outside = re.findall(r"(?:https?:)?//[a-z][^\s\"'<)]*", re.sub(r"base64,[^\"]*", "", html))
    assert set(outside) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "@import" not in html and not re.search(r"url\((?!#)", html)


def test_it_can_be_read_without_seeing_it(run_folder):
    _, page = report(run_folder)
    assert page.all("html")[0]["lang"] == "en"
    assert all(image["alt"] for image in page.all("img"))
    charts = [svg for svg in page.all("svg") if svg.get("role") == "img"]
    assert len(charts) == len(page.all("svg")) == 6
    assert all(svg["aria-label"] for svg in charts)
    assert all(cell.get("scope") in ("row", "col") for cell in page.all("th"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = [link["href"][1:] for link in page.all("a")]
    assert targets and set(targets) <= set(ids)


def test_a_run_that_was_killed(run_folder):
    path = run_folder / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.warns(UserWarning, match="cannot be read"):
        _, page = report(run_folder)
    assert (
        "Unfinished run. It still goes on, or it was stopped in or after round 2 of 2." in page.text
    )
    assert "cannot be read" in page.text


def test_a_run_that_ended_early(tmp_path):
    tracker = JsonlTracker(tmp_path)
    write_metadata(tmp_path, {"num_rounds": 9}, 0)
    fill(tracker)
    tracker.close()
    assert "Unfinished run. It ended after round 2 of 9." in report(tmp_path)[1].text


def test_a_run_of_unknown_length_that_an_error_ended(tmp_path):
    tracker = JsonlTracker(tmp_path)
    write_metadata(tmp_path, {}, 0)
    fill(tracker)
    tracker.event(RunEvent("r", 3, -1, "error", f"{ENDED_EARLY}: SystemExit: 143"))
    tracker.close()
    _, page = report(tmp_path)
    assert "Unfinished run. It was ended early, in or after round 2 (see Events)." in page.text


def test_a_run_without_truth(tmp_path):
    tracker = JsonlTracker(tmp_path)
    fill(tracker, truth=False)
    tracker.close()
    _, page = report(tmp_path)
    assert "nothing tells how near the reconstructions of 5 of 6 attacked updates are" in page.text
    assert "Scores were computed, but there is nothing to compare" in page.text
    assert page.text.count("no original") == 1 + 10
    assert "All reconstructions: 10 of 10" in page.text
    assert "leak first" not in page.text
    assert page.text.count("PSNR unknown") == 1 + 10


def test_a_run_with_scores_only(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(LeakageRecord("r", 1, 0, 0, "score", "new_score", 0.5, "1", "larger is safer"))
    tracker.close()
    _, page = report(tmp_path)
    assert "no update was attacked. No attack was run, or none has ended yet." in page.text
    assert "new score" in page.text and "No reconstruction was recorded." in page.text


def test_a_run_without_scores(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(LeakageRecord("r", 1, 0, 0, "metric", "psnr", 30.0, "dB"))
    tracker.close()
    _, page = report(tmp_path)
    assert "No score was computed." in page.text
    assert "Leakage over the rounds" in page.text and "Each dot is one image" in page.text
    assert "On top: " not in page.text and "Dotted: " not in page.text  # of what is not drawn


def test_a_run_without_any_number(tmp_path):
    JsonlTracker(tmp_path).close()
    _, page = report(tmp_path)
    for words in ("No attack was run, or none has", "No reconstruction", "No error or warning",
                  "No cost was recorded", "No configuration was recorded"):  # fmt: skip
        assert words in page.text


def test_a_run_of_metadata_only_and_of_odd_metadata(tmp_path):
    (tmp_path / "run.json").write_text(
        '{"config": [1, "a"], "seed": null, "versions": "none", "run": 3, "commit": null,'
        ' "threat": {"labels": "known"}, "start_time": "yesterday"}'
    )
    _, page = report(tmp_path)
    assert "yesterday" in page.text and "unknown: not run from a git checkout" in page.text


def test_a_page_with_a_defense_folds_its_commands_and_keeps_a_short_caption(tmp_path):
    tracker = JsonlTracker(tmp_path)
    node = {"_target_": "flwr_leakage.defenses.GradientPruning", "prune_ratio": 0.99}
    choices = {"defense": "none", "defense@what_if.pruning": "pruning"}
    write_metadata(tmp_path, {"what_if": {"pruning": node}, "choices": choices}, 0, {})
    for client, psnr in ((0, 60.0), (1, 20.0)):
        where = ("r", 1, client, 0)
        for kind, name, value in (
            ("metric", "psnr", psnr),
            ("metric", "blind_psnr", 12.0),
            ("what_if", "pruning/psnr", 11.0),
        ):
            tracker.log(LeakageRecord(*where, kind, name, value, "dB"))
        for kind, name in (("attack", "objective"), ("attack", "stopped_by_budget")):
            tracker.log(LeakageRecord(*where[:3], -1, kind, name, 1.0))
    tracker.log(LeakageRecord("r", 1, 2, -1, "client", "not_attacked", 30.0, note="too many"))
    tracker.log(LeakageRecord("r", 1, -1, -1, "utility", "test_accuracy", 0.5))
    tracker.close()
    html, page = report(tmp_path)
    told = "The commands that measure the price"
    assert told in page.text and told not in page.visible
    assert re.search(r"<summary>Commands</summary>.*?<code class=\"command\">", html, re.DOTALL)
    caption, _ = re.findall(r"</svg>\s*(?:</div>)?\s*<figcaption>(On top.*?)</figcaption>", html)
    assert "Hollow: " in caption
    assert len(caption) < 320  # four lines of the width of the chart
    assert "Decibels are drawn up to 48.1" in page.text.partition("How to read it")[2]
    told = page.text.index("PSNR tells in decibels")
    assert told < page.text.index("median PSNR, dB")
    apart = page.text.partition("Not attacked: whether their images can be seen is not known")[2]
    assert apart.split("errors, warnings")[1].split()[:3] == ["2", "too", "many"]


def test_every_printed_page_carries_the_warning(run_folder):
    html, _ = report(run_folder)
    assert re.search(r"@page \{[^}]*@top-center \{[^}]*private training images", html)


def test_the_same_run_gives_the_same_file_for_its_owner_only(run_folder):
    path = write_report(run_folder)
    assert path == run_folder / "report.html"
    first = path.read_bytes()
    assert write_report(run_folder).read_bytes() == first
    assert path.stat().st_mode & 0o777 == 0o600


def test_command_line(run_folder, tmp_path):
    output = tmp_path / "elsewhere" / "page.html"
    arguments = ["--output", str(output), "--max-gallery", "1"]
    done = CliRunner().invoke(app, ["report", str(run_folder), *arguments])
    assert (done.exit_code, done.stdout.strip()) == (0, str(output))
    assert "1 of 10 shown" in Page(output.read_text()).text


@pytest.mark.parametrize("arguments", [[], ["--max-gallery", "-1"]])
def test_command_line_names_a_wrong_folder_or_setting(tmp_path, arguments):
    done = CliRunner().invoke(app, ["report", str(tmp_path), *arguments])
    assert done.exit_code == 2 and re.search("error: |Invalid value", done.stderr)
