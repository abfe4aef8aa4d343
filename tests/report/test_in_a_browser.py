"""The pages in a real browser: silent, self-contained, filterable, readable at every width."""

import shutil
import subprocess

import pytest
import torch
from browser import started_browser

from flwr_leakage.comparison import compare, write_comparison
from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report import write_report
from flwr_leakage.tracking import JsonlTracker, write_metadata

METRICS = {"psnr": 20.0, "ssim": 0.5, "lpips_alex": 0.2, "blind_psnr": 12.0, "blind_ssim": 0.1,
           "label_accuracy": 1.0, "identification_rank": 1.0}  # fmt: skip

CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (text) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => c <= 10.3 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = (c) => 0.2126 * light(c[0]) + 0.7152 * light(c[1]) + 0.0722 * light(c[2]);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour[3] === 255) { return colour; }
    }
    return [255, 255, 255, 255];
  };
  const poor = new Set();
  let seen = 0;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || ["SCRIPT", "STYLE"].includes(element.tagName)) { continue; }
    const style = getComputedStyle(element);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [luminance(rgb(ink)), luminance(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    seen += 1;
    if (ratio < 4.5) { poor.add(`${element.tagName} ${element.className.baseVal ??
      element.className}: ${ink} has ${ratio.toFixed(2)}`); }
  }
  return [seen, [...poor]];
})()
"""


def fill(folder, seed=0):
    """A run with everything that a report can show."""
    tracker = JsonlTracker(folder)
    config = {"num_rounds": 2, "what_if": {"pruning": {}}, "choices": {"defense": str(seed)}}
    write_metadata(folder, config, seed, {"run": "demo", "threat": "labels known, single view"})
    for server_round in (1, 2):
        for client in range(3):
            where, done = ("demo", server_round, client), "30 images, 3 steps, batch 10, rate 0.1"
            for kind, name, note in (
                ("client", "images", done),
                ("client", "not_attacked", "30 images, more than allowed"),
                ("attack", "objective", ""),
                ("cost", "train_cpu_seconds", ""),
                ("check", "replay_residual", "explains the update"),
            ):
                if name != "not_attacked" or client == 2:
                    tracker.log(LeakageRecord(*where, -1, kind, name, 3.0, "s", "", note))
            for score in ("gradient_norm", "lambda_max"):
                tracker.log(LeakageRecord(*where, 0, "score", score, 1.0 + client + server_round,
                                          "1", "larger leaks more", "", 0.1, "exact"))  # fmt: skip
            if client == 2:
                continue
            for name, value in METRICS.items():
                note = "of 101 images" if name == "identification_rank" else ""
                tracker.log(LeakageRecord(*where, 0, "metric", name, value, "dB", "", note))
            for name in ("pruning/psnr", "pruning/blind_psnr"):
                tracker.log(LeakageRecord(*where, 0, "what_if", name, 11.0, "dB"))
            tracker.log(LeakageRecord(*where, 0, "client", "class", 1.0, "", "", "cat"))
            tracker.log(LeakageRecord(*where, 0, "client", "image", 1.0))
            for role in ("original", "reconstruction", "what_if_pruning"):
                tracker.image(server_round, client, 0, role, torch.rand(3, 8, 8))
        for name in ("test_accuracy", "test_loss"):
            tracker.log(LeakageRecord("demo", server_round, -1, -1, "utility", name, 0.5))
    tracker.image(1, -1, -1, "blind_guess", torch.rand(3, 8, 8))
    tracker.event(RunEvent("demo", 1, 2, "error", "a_long_word_" * 30))
    tracker.event(RunEvent("demo", 1, 2, "info", "hello"))
    tracker.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of a report, of one without any number, and of a comparison."""
    folder = tmp_path_factory.mktemp("pages")
    JsonlTracker(folder / "empty").close()
    for seed in (0, 1):
        fill(folder / str(seed), seed)
    comparison = write_comparison(compare([folder / "0", folder / "1"]), folder / "both.html")
    report, empty = write_report(folder / "0"), write_report(folder / "empty")
    return {"report": report.as_uri(), "empty": empty.as_uri(), "comparison": comparison.as_uri()}


@pytest.fixture(scope="module")
def page():
    with started_browser() as found:
        yield found


@pytest.mark.parametrize("name", ["report", "empty", "comparison"])
def test_a_page_is_silent_asks_for_nothing_and_fits(page, pages, name):
    page.complaints.clear()
    page.requests.clear()
    for scheme in ("light", "dark"):
        page.show(pages[name], 1280, scheme=scheme)
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        seen, poor = page.evaluate(CONTRAST)
        assert seen > 5 and poor == []
    assert page.requests == [pages[name]] * 2
    assert page.complaints == []
    wide = "document.documentElement.scrollWidth"
    scrolled = (
        "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth)"
    )
    assert page.evaluate(wide) == 1280
    assert page.evaluate(f"{scrolled}.map((e) => e.textContent.slice(0, 80))") == []
    for width in (320, 390):
        page.resize(width)
        assert page.cut_off() == []
        assert page.evaluate(wide) == width
        assert page.evaluate(f"{scrolled}.map((e) => e.textContent.slice(0, 80))") == []


def test_a_value_stays_in_one_line_on_a_phone(page, pages):
    page.show(pages["report"], 390)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    lines = """
    [...document.querySelectorAll("td:not(.text)")].filter((cell) => {
      const range = document.createRange(); range.selectNodeContents(cell);
      const tops = new Set([...range.getClientRects()].map((r) => Math.round(r.top)));
      return / /.test(cell.textContent) && cell.textContent.length <= 18 && tops.size > 1;
    }).map((cell) => cell.textContent)
    """
    assert page.evaluate(lines) == []


def test_a_phone_is_given_the_narrow_frontier(page, pages):
    drawn = """
    [...document.querySelectorAll(".frontier svg")].filter((svg) => svg.checkVisibility())
      .map((svg) => svg.viewBox.baseVal.width)
    """
    page.show(pages["comparison"], 1280)
    assert page.evaluate(drawn) == [11 * 72]
    page.show(pages["comparison"], 390)
    assert page.evaluate(drawn) == [4 * 72]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_verdict_pictures_numbers_and_map_are_one_screen(page, pages, width, height):
    page.show(pages["report"], width, height)
    bottom = "document.querySelector('.first').getBoundingClientRect().bottom"
    assert page.evaluate(bottom) <= height
    for part in ("h1", ".worst img", ".tiles", ".map svg"):
        assert page.evaluate(f"document.querySelector('{part}').getBoundingClientRect().height") > 8
    assert page.evaluate("document.querySelectorAll('.section[open]').length") == 0


def test_a_link_unfolds_its_part_and_the_search_finds_what_is_folded(page, pages):
    opened = "[...document.querySelectorAll('details.section[open] h2')].map((h) => h.id)"
    page.show(pages["empty"])  # a fragment of the page that is there would load nothing
    page.show(pages["report"] + "#grades")
    assert page.evaluate(opened) == ["grades"]
    page.evaluate("location.hash = '#costs'; 0")
    page.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert page.evaluate(opened) == ["grades", "costs"]
    look = """
    (() => {
      const input = document.querySelector("#search input");
      input.value = "%s"; input.dispatchEvent(new Event("input", {bubbles: true}));
      return document.querySelector("#search output").textContent;
    })()
    """
    assert page.evaluate(look % "train cpu") == "1 of 11 parts"
    assert page.evaluate(opened) == ["costs"]
    assert page.evaluate(look % "") == "" and page.evaluate(opened) == []


def test_the_filters_filter(page, pages):
    page.show(pages["report"])
    choose = """
    (([name, value]) => {{
      const select = document.querySelector(`#filter select[name=${{name}}]`);
      select.value = value; select.dispatchEvent(new Event("change", {{bubbles: true}}));
      const figures = [...document.querySelectorAll("#all figure")].filter((f) => !f.hidden);
      return [figures.map((f) => f.dataset[name]), document.getElementById("shown").textContent];
    }})({})
    """
    assert page.evaluate(choose.format('["round", ""]'))[1] == "4 of 4 shown"
    clients, told = page.evaluate(choose.format('["client", "client 1"]'))
    assert clients == ["client 1"] * 2 and told == "2 of 4 shown"
    rounds, told = page.evaluate(choose.format('["round", "2"]'))
    assert rounds == ["2"] and told == "1 of 4 shown"
    page.evaluate("document.querySelector('#filter button').click()")
    images, told = page.evaluate(choose.format('["image", "client 0, image 1"]'))
    assert images == ["client 0, image 1"] * 2 and told == "2 of 4 shown"


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="no pdftotext: apt install poppler-utils")
def test_every_printed_page_has_the_warning(page, pages, tmp_path):
    page.show(pages["report"])
    file = tmp_path / "page.pdf"
    file.write_bytes(page.pdf())
    text = subprocess.run(["pdftotext", file, "-"], capture_output=True, text=True, check=True)
    sheets = text.stdout.rstrip("\f").split("\f")
    assert len(sheets) > 1
    assert all("Contains private training images" in sheet for sheet in sheets)
