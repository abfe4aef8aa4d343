"""Private texts on a page, whatever they hold."""

import json
import re

import pytest
from report_page import fill

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report import write_report
from flwr_leakage.report.attempts import attempts, labels_right
from flwr_leakage.report.index import Index
from flwr_leakage.report.page import conclusion
from flwr_leakage.report.samples import IMAGE, ROW, TEXT
from flwr_leakage.report.texts import text_exhibits
from flwr_leakage.tracking import (
    CompositeTracker,
    GuardedTracker,
    JsonlTracker,
    TextRecord,
    read_run,
)

HOSTILE = ["<b>", "\u202eevil", "image", "</style>", "\x1b[2J", "a&b"]


def write(folder, words=HOSTILE, answer=(5, 6, 7, 8, 1, 10)):
    tracker = GuardedTracker(CompositeTracker((JsonlTracker(folder),)))
    ids, words = tuple(range(5, 5 + len(words))), tuple(words)
    tracker.text(TextRecord(1, 0, 0, "original", len(ids), ids, words))
    if answer:
        tracker.text(TextRecord(1, 0, 0, "reconstruction", len(ids), answer, words))
    tracker.text(TextRecord(1, 0, -1, "named", 1, (9,), (words[4],)))
    for name, value, note in (
        ("token_accuracy", 5 / 6 if answer else None, "most tokens" if answer else "no text"),
        ("named_tokens", 1 / 6, "1 token named"),
    ):
        tracker.log(LeakageRecord("r", 1, 0, 0, "metric", name, value, "1", note=note))
    tracker.close()
    return read_run(folder)


def test_texts_are_read_back_in_plain_words(tmp_path):
    run = write(tmp_path / "run")
    assert [text.role for text in run.texts] == ["original", "reconstruction", "named"]
    assert run.texts[0].ids == (5, 6, 7, 8, 9, 10)
    assert run.texts[0].words[1] == "\\u202eevil" and run.texts[0].words[4] == "\\u001b[2J"


@pytest.mark.parametrize(
    "changed",
    [{"ids": ["x"]}, {"words": ["one"]}, {"role": "../x"}, {"ids": [1] * 2000, "words": []}],
)
def test_a_text_of_another_form_is_left_out(tmp_path, changed):
    write(tmp_path / "run")
    path = tmp_path / "run" / "records.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    place = next(i for i, row in enumerate(lines) if row["type"] == "text")
    lines[place] |= changed
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    with pytest.warns(UserWarning, match="cannot be read"):
        run = read_run(tmp_path / "run")
    assert len(run.texts) == 2 and len(run.problems) == 1


def test_words_are_escaped_isolated_and_marked(tmp_path):
    folder = tmp_path / "run"
    write(folder)
    page = write_report(folder).read_text()
    assert '<bdi class="placed">&lt;b&gt;</bdi>' in page and "\u202e" not in page
    assert '<bdi class="placed">image</bdi>' in page  # a private word is not the page's own
    assert '<bdi class="named">\\u001b[2J</bdi>' in page
    assert '<bdi class="wrong">\\u001b[2J</bdi>' in page
    assert "a&amp;b" in page and "private training texts" in page


def test_the_worst_text_stands_on_the_first_screen(tmp_path):
    write(tmp_path / "run")
    page = write_report(tmp_path / "run").read_text()
    first = page[page.index('<div class="first">') : page.index("<nav ")]
    assert "private text: round 1, client 0" in first and "83 % of its tokens in place" in first
    assert first.count('<bdi class="placed">image</bdi>') == 2  # of the original, and recovered


def test_a_label_without_an_answer_counts_as_wrong():
    def record(kind, name, sample, value, note=""):
        return LeakageRecord("r", 1, 0, sample, kind, name, value, "1", note=note)

    records = [record("metric", "label_accuracy", 0, 1.0)]
    records += [record("metric", "token_accuracy", i, 1.0 - i, "all tokens") for i in (0, 1)]
    records += [record("client", "class", i, 0.0, name) for i, name in enumerate(("cat", "dog"))]
    index = Index(records)
    assert labels_right(index, attempts(index))[:2] == (1, 2)


def test_tokens_that_are_named_alone_are_no_full_leak(tmp_path):
    run = write(tmp_path / "run", answer=())
    (attempt,) = attempts(Index(run.records))
    assert attempt.grade == "nothing" and attempt.tokens == 0.0
    (exhibit,) = text_exhibits(run.texts, [attempt])
    marks = [token.mark for token in exhibit.rows[0][1]]
    assert marks == ["missed"] * 4 + ["named", "missed"]


@pytest.mark.parametrize("sample", [IMAGE, ROW, TEXT])
def test_every_sentence_names_the_samples_that_the_run_had(tmp_path, sample):
    fill(tracker := JsonlTracker(tmp_path / "run"))
    tracker.log(LeakageRecord("r", 1, 0, -1, "client", "images", 2.0, sample.one))
    if sample is TEXT:
        tracker.text(TextRecord(1, 0, 0, "original", 1, (3,), ("word",)))
    tracker.close()
    page = write_report(tmp_path / "run").read_text()
    shown = re.sub(r"<(style|script|code|svg)\b.*?</\1>", "", page, flags=re.S)
    told = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", shown))
    assert f"Private {sample.many} leak. 12 attempts ({sample.a} in a round)" in conclusion(
        tmp_path / "run"
    )
    assert f"private training {sample.many}: share it" in told
    found = set(re.findall(r"\b(?:image|row|text)s?\b", told.split("What to do")[0]))
    assert found <= {sample.one, sample.many}
