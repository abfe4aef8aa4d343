"""Results as a table, a frame and tensors."""

import builtins
import math

import pytest
import torch
from scored import small_network

from flwr_leakage.records import Measurement
from flwr_leakage.scores import LAVP, GradientNorm, LambdaMax, score
from flwr_leakage.scores.result import ScoreResult, Scores


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(3, 1, 6, 6, generator=generator), torch.tensor([0, 3, 1])


SCORES = {
    "norm": GradientNorm(),
    "rough": LambdaMax(0.3),
    "fine": LambdaMax(1e-3),
    "both": LAVP(("lambda_max", "angular_max")),
    "failing": LambdaMax(max_steps=1),
    "broken": lambda client, seed: 1 / 0,
}
FULL = Measurement(
    "height",
    (1.0, None, 3.0),
    "m",
    "larger is safer",
    ("", "too <tall>", "look"),
    errors=(0.125, None, None),
    states=("within tolerance", "unresolved", "lower bound"),
)


def test_results_stand_under_the_names_that_were_asked_for(data):
    found = score(small_network(), *data, SCORES)
    assert list(found) == list(SCORES) and len(found) == 6 and "norm" in found
    assert found["rough"].values != found["fine"].values
    assert found["broken"].values == (None,) * 3 and "ZeroDivisionError" in found["broken"].error
    with pytest.raises(KeyError, match=r"no score 'lambda_max', only .*'rough'"):
        found["lambda_max"]
    assert found["fine"].products == sum(m.products for m in found["fine"])


def test_tensors_hold_nan_where_there_is_no_number():
    expected = torch.tensor([1.0, math.nan, 3.0], dtype=torch.float64)
    torch.testing.assert_close(FULL.tensor(), expected, equal_nan=True)
    result = ScoreResult((FULL, Measurement("other", (None,) * 3, "", "")))
    torch.testing.assert_close(result.tensor(), expected, equal_nan=True)
    assert result["other"].tensor().isnan().all()


def test_a_frame_has_a_row_for_each_sample_and_measurement(data):
    pandas = pytest.importorskip("pandas")
    found = score(small_network(), *data, SCORES)
    frame = found.to_pandas()
    assert len(frame) == 3 * sum(len(list(result)) for result in found.values())
    wide = frame.pivot(index="sample", columns=["score", "measurement"], values="value")
    for name, result in found.items():
        for measured in result:
            column = wide[name, measured.name].to_numpy()
            torch.testing.assert_close(torch.tensor(column), measured.tensor(), equal_nan=True)
    full = Scores({"asked": ScoreResult((FULL,))}).to_pandas()
    assert list(full.columns) == [
        "score", "measurement", "sample", "value", "error", "state", "unit", "direction", "note",
    ]  # fmt: skip
    assert full["error"].tolist()[0] == 0.125 and math.isnan(full["error"][1])
    assert full["state"].tolist() == list(FULL.states) and full["note"][1] == "too <tall>"
    assert isinstance(frame, pandas.DataFrame)


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install pandas.*tensor\(\)"):
        Scores({"asked": ScoreResult((FULL,))}).to_pandas()


def test_the_printed_table_reads_well():
    low = Measurement("floor", (0.5, 0.25, None), "1", "larger leaks more")
    found = Scores({"asked": ScoreResult((FULL, low))}, ("one thing to know",))
    assert str(found) == repr(found)
    lines = str(found).splitlines()
    assert lines[0] == "! one thing to know"
    assert lines[1].split("  ")[0] == "sample" and "asked: height" in lines[1]
    assert "larger is safer" in lines[2] and "larger leaks more" in lines[2]
    assert lines[3].split() == ["unit", "m", "1"]
    assert lines[5].split() == ["0", "1", "±", "0.1", "0.5"]
    assert lines[6].split() == ["1", "–", "[1]", "0.25"]
    assert lines[7].split() == ["2", "≥", "3", "[2]", "–"]
    assert lines[8:] == ["[1] too <tall>", "[2] look"]


def test_long_tables_say_what_they_leave_out():
    values = tuple(float(i) for i in range(50))
    found = Scores({"x": ScoreResult((Measurement("x", values, "1", "larger is safer"),))})
    assert "… and 30 more samples" in str(found) and len(str(found).splitlines()) == 25


def test_a_notebook_shows_the_same_table_with_all_text_escaped():
    found = Scores({"<b>": ScoreResult((FULL,))}, ("a & b",))
    html = found._repr_html_()
    assert "<td>1 ± 0.1</td>" in html and "too &lt;tall&gt;" in html and "a &amp; b" in html
    assert "&lt;b&gt;: height" in html and "<b>" not in html


def test_a_failed_score_is_in_the_table_with_its_reason(data):
    text = str(score(small_network(), *data, SCORES))
    assert "ZeroDivisionError: division by zero" in text and "broken" in text
    assert "unresolved: at least" in text
