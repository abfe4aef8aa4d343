"""Images of a page: what a tile tells, and which are shown."""

import re

import pytest
import torch
from report_page import report

from flwr_leakage.records import LeakageRecord
from flwr_leakage.tracking import JsonlTracker


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (["original", "defended", "reconstruction"], "the sample as the defense encoded it"),
        (
            ["original", "reconstruction", "decoded"],
            "what the encodings of all rounds so far were decoded to",
        ),
    ],
)
def test_what_a_defense_made_of_an_image_stands_in_its_row(tmp_path, roles, words):
    tracker = JsonlTracker(tmp_path)
    for role in reversed(roles):
        tracker.image(1, 0, 0, role, torch.zeros(3, 4, 4))
    tracker.close()
    _, page = report(tmp_path)
    shown = [image["alt"].split(",")[0].lower() for image in page.all("img")]
    assert shown == ["original", "reconstruction", *roles]  # first of all the worst leak
    assert words in page.text


def test_the_gallery_shows_the_worst_leaks_first_and_counts_the_rest(run_folder):
    _, page = report(run_folder, max_gallery=3)
    shown = [i["alt"] for i in page.all("img") if i["alt"].startswith("Reconstruction")]
    decibels = [alt.split(" dB")[0].rsplit(" ", 1)[1] for alt in shown]
    assert decibels == ["31.0", "31.0", "30.0", "21.0"]
    assert "3 of 10 shown, 7 left out" in page.text


def test_the_worst_leak_stands_beside_what_the_best_defense_makes_of_it(tmp_path):
    tracker = JsonlTracker(tmp_path)
    under = {"weak/psnr": 30.0, "strong_one/psnr": 11.0}
    for kind, told in (("metric", {"psnr": 60.0, "blind_psnr": 12.0}), ("what_if", under)):
        for name, value in told.items():
            tracker.log(LeakageRecord("r", 1, 0, 0, kind, name, value))
    for name in ("weak", "strong_one"):
        tracker.log(LeakageRecord("r", 1, 0, 0, "what_if", f"{name}/blind_psnr", 12.0))
    for role in ("original", "reconstruction", "what_if_weak", "what_if_strong_one"):
        tracker.image(1, 0, 0, role, torch.zeros(3, 4, 4))
    tracker.close()
    _, page = report(tmp_path)
    told = (
        "private original round 1, client 0, place 0 of the batch what the server made of it "
        "an exact copy under strong one in a trial: nothing, 11.0 dB"
    )
    assert told in page.visible
    assert [image["alt"].split(",")[0] for image in page.all("img")][:3] == [
        "Original", "Reconstruction", "Under strong one",
    ]  # fmt: skip


def test_only_a_page_with_private_images_asks_for_care(tmp_path, run_folder):
    JsonlTracker(tmp_path / "none").close()
    for folder, is_private in ((run_folder, True), (tmp_path / "none", False)):
        html, page = report(folder)
        assert ("Contains private training images" in page.visible) == is_private
        assert bool(re.search(r"@top-center \{[^}]*private training", html)) == is_private


def test_a_tile_says_where_structure_and_not_psnr_decided(tmp_path):
    tracker = JsonlTracker(tmp_path)
    told = {"psnr": 12.0, "blind_psnr": 11.7, "ssim": 0.52, "blind_ssim": 0.1}
    for name, value in told.items():
        tracker.log(LeakageRecord("r", 1, 0, 0, "metric", name, value))
    tracker.image(1, 0, 0, "reconstruction", torch.zeros(3, 4, 4))
    tracker.close()
    assert "partly · 12.0 dB (blind 11.7), by SSIM 0.52 (blind 0.10)" in report(tmp_path)[1].text


def test_a_tile_says_what_the_other_rounds_gave_of_the_same_image(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for server_round, psnr in ((1, 120.0), (3, 11.0), (5, 11.5)):
        for kind, name, value in (
            ("metric", "psnr", psnr), ("metric", "blind_psnr", 11.7), ("client", "image", 0.0),
        ):  # fmt: skip
            tracker.log(LeakageRecord("r", server_round, 0, 0, kind, name, value))
        tracker.image(server_round, 0, 0, "reconstruction", torch.zeros(3, 4, 4))
    tracker.close()
    _, page = report(tmp_path)
    assert (
        "120.0 dB (blind 11.7), the ceiling round 1, client 0, image 0; in rounds 3 and 5: no"
        in (page.text)
    )
    assert "round 5, client 0, image 0; in round 1: exact; in round 3: nothing" in page.text
    alts = [image["alt"] for image in page.all("img") if image["alt"].startswith("Reconstruction")]
    assert alts and not any("in rounds" in alt for alt in alts)  # they are of one round only


def test_the_filter_offers_what_there_is_and_marks_every_figure(run_folder):
    _, page = report(run_folder)
    names = [select["name"] for select in page.all("select")]
    assert names == ["round", "client", "grade"]
    options = [option["value"] for option in page.all("option")]
    assert options == ["", "1", "2", "", "client 0", "client 1", "client 2", "", "recognisable",
                       "nothing"]  # fmt: skip
    marked = [attrs for attrs in page.all("figure") if "data-client" in attrs]
    assert {attrs["data-round"] for attrs in marked} == {"1", "2"}
    assert all(attrs["data-client"] in options for attrs in marked)
    hidden = [attrs["id"] for attrs in page.all("form") if "hidden" in attrs]
    assert hidden == ["search", "filter"]


def test_a_file_that_is_no_png_is_not_inlined(run_folder):
    victim = next((run_folder / "images").glob("*client0002*reconstruction.png"))
    victim.write_bytes(b"<svg onload=alert(1)>")
    _, page = report(run_folder)
    assert "no reconstruction" in page.text
    assert len(page.all("img")) == 2 + 19
