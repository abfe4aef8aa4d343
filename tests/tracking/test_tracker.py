import math

import pytest
import torch

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking import CompositeTracker
from flwr_leakage.tracking.tracker import checked_pixels


class Recorder:
    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def _take(self, name, *arguments):
        if self.error:
            raise self.error
        self.calls.append((name, *arguments))

    def log(self, record):
        self._take("log", record)

    def event(self, event):
        self._take("event", event)

    def image(self, *arguments):
        self._take("image", *arguments)

    def close(self):
        self._take("close")


RECORD = LeakageRecord("r", 1, 0, 0, "metric", "psnr", 20.0, "dB")
EVENT = RunEvent("r", 1, 0, "error", "it broke")
PIXELS = torch.zeros(1, 2, 2)


def test_composite_passes_everything_to_all_in_order():
    first, second = Recorder(), Recorder()
    tracker = CompositeTracker([first, second])
    tracker.log(RECORD)
    tracker.event(EVENT)
    tracker.image(1, 2, 3, "original", PIXELS)
    tracker.close()
    assert first.calls == second.calls
    assert [call[0] for call in first.calls] == ["log", "event", "image", "close"]
    assert first.calls[2] == ("image", 1, 2, 3, "original", PIXELS)


def test_composite_serves_the_others_before_it_raises_the_first_error():
    last = Recorder()
    tracker = CompositeTracker([Recorder(OSError("one")), Recorder(KeyError("two")), last])
    with pytest.raises(OSError, match="one"):
        tracker.log(RECORD)
    assert last.calls == [("log", RECORD)]


def test_checked_pixels_clamps_and_removes_nan():
    pixels = torch.tensor([[[-1.0, 0.5, 2.0, math.nan, math.inf]]], dtype=torch.float64)
    expected = torch.tensor([[[0.0, 0.5, 1.0, 0.0, 1.0]]])
    assert torch.equal(checked_pixels(pixels, "original"), expected)


@pytest.mark.parametrize("shape", [(2, 2), (2, 4, 4), (1, 0, 3), (1, 1, 2, 2)])
def test_checked_pixels_names_a_wrong_shape(shape):
    with pytest.raises(ValueError, match=r"pixels must be \(1 or 3, H, W\), got"):
        checked_pixels(torch.zeros(shape), "original")
