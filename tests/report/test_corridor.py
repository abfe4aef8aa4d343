"""The chart of attack and bounds."""

import math

import pytest

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report import write_report
from flwr_leakage.report.figures import corridors, smallest_std
from flwr_leakage.report.index import Index
from flwr_leakage.tracking import JsonlTracker, write_metadata

SCORES = {"cramer_rao_bound_rmse": 0.02, "bayesian_bound_rmse": 0.1}


def records(psnr=(20.0, 30.0), scores=SCORES):
    for sample, value in enumerate(psnr):
        where = ("demo", 1, 0, sample)
        yield LeakageRecord(*where, "metric", "psnr", value, "dB")
        for name, bound in scores.items():
            yield LeakageRecord(*where, "score", name, bound, "model input", "larger is safer")


def test_the_gap_and_what_crosses_a_bound_are_told():
    # Pixels are a quarter of a model input: 46 and 32 dB are possible.
    (found,) = corridors(Index(records((20.0, 34.0))), {"input_std": [0.25, 0.5]})
    assert (
        "stays 19.0 dB below Cramér–Rao (median of 2 samples, of which none above it)"
        in found.caption
    )
    assert "stays 5.0 dB below Bayesian (median of 2 samples, of which 1 above it)" in found.caption
    assert "unbiased" in found.caption and "no single sample" in found.caption
    assert found.svg.startswith("<svg")


@pytest.mark.parametrize(
    ("given", "metadata"),
    [
        (records(scores={}), {"input_std": [0.25]}),
        (records(psnr=(None, None)), {"input_std": [0.25]}),
        (records(scores={"cramer_rao_bound_rmse": None}), {"input_std": [0.25]}),
        (records(), {}),
        (records(), {"input_std": ["x"]}),
        (records(), {"input_std": [math.nan]}),
    ],
)
def test_without_one_of_them_there_is_no_chart(given, metadata):
    assert corridors(Index(given), metadata) == []


def test_the_least_standard_deviation_counts():
    assert smallest_std({"input_std": [0.3, 0.2]}) == 0.2


def test_the_page_shows_it(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for record in records():
        tracker.log(record)
    tracker.close()
    write_metadata(tmp_path, config={}, seed=0, extra={"input_std": [0.25]})
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Attack and bounds" in page and "Cramér–Rao" in page
