import pytest
import torch

from flwr_leakage.records import Measurement
from flwr_leakage.scores.summary import summarize


def measured(values, direction="larger is safer"):
    return Measurement("x", values, "1", direction)


def test_worst_median_spread_and_classes():
    summary = summarize(measured((4.0, 1.0, None, 2.0)), torch.tensor([0, 1, 1, 0]))
    assert (summary.worst, summary.worst_sample) == (1.0, 1)
    assert (summary.count, summary.missing) == (3, 1)
    assert summary.median == 2.0 and summary.spread == 4.0
    assert summary.by_class == {0: 3.0, 1: 1.0}
    assert summary.quantiles[0.25] == pytest.approx(1.5)


def test_the_direction_decides_who_is_worst():
    targets = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    summary = summarize(measured((4.0, 1.0), "larger leaks more"), targets)
    assert summary.worst_sample == 0 and summary.by_class == {0: 4.0, 1: 1.0}
    assert summarize(measured((4.0, 1.0), ""), targets).worst is None


def test_no_number_gives_no_statistics():
    summary = summarize(measured((None, None)), torch.tensor([0, 1]))
    assert summary.worst is None and summary.median is None and summary.missing == 2
    assert summarize(measured((0.0, 1.0)), torch.tensor([0, 1])).spread is None
    with pytest.raises(ValueError, match="2 samples"):
        summarize(measured((None, None)), torch.tensor([0]))
