import sys

import pytest
import torch

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.tensorboard import TensorBoardTracker
from flwr_leakage.tracking.wandb import WandbTracker


class Fake:
    """Keeps every call to any method."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments, **named: self.calls.append((name, arguments, named))

    def named(self, name):
        return [(arguments, named) for called, arguments, named in self.calls if called == name]


def psnr(server_round, value):
    return LeakageRecord("r", server_round, 0, 0, "metric", "psnr", value)


def test_tensorboard_gets_the_median_of_each_round(tmp_path):
    writer = Fake()
    tracker = TensorBoardTracker(tmp_path, writer=writer)
    for server_round, value in [(1, 10.0), (1, 30.0), (1, 12.0), (1, None), (2, 5.0)]:
        tracker.log(psnr(server_round, value))
    tracker.event(RunEvent("r", 2, 4, "error", "no reply"))
    tracker.image(2, 4, 0, "original", torch.full((1, 2, 2), 2.0))
    tracker.close()
    scalars = [arguments for arguments, _ in writer.named("add_scalar")]
    assert scalars == [("metric/psnr", 12.0, 1), ("metric/psnr", 5.0, 2)]
    assert writer.named("add_text") == [(("error", "client 4: no reply", 2), {})]
    [((tag, pixels, server_round), _)] = writer.named("add_image")
    assert (tag, server_round) == ("original/client_4/sample_0", 2)
    assert pixels.max() == 1
    assert writer.calls[-1][0] == "close"


def test_wandb_gets_the_median_of_each_round_and_counts_of_events(tmp_path):
    run = Fake()
    tracker = WandbTracker(tmp_path, run=run)
    for server_round, value in [(1, 10.0), (1, 30.0), (1, 12.0), (2, 5.0)]:
        tracker.log(psnr(server_round, value))
    tracker.event(RunEvent("r", 2, 4, "error", "a secret in a message"))
    tracker.close()
    assert [arguments[0] for arguments, _ in run.named("log")] == [
        {"metric/psnr": 12.0, "server_round": 1},
        {"metric/psnr": 5.0, "events/error": 1, "server_round": 2},
    ]
    assert run.calls[-1][0] == "finish"
    assert "secret" not in str(run.calls)


def test_private_images_stay_here_unless_the_setting_says_otherwise(tmp_path):
    run = Fake()
    WandbTracker(tmp_path, run=run).image(1, 0, 0, "original", torch.zeros(1, 2, 2))
    assert run.named("log") == []


def test_images_are_sent_where_the_setting_says_so(tmp_path, monkeypatch):
    class Module:
        Image = staticmethod(lambda content: ("image", content.shape, str(content.dtype)))

    monkeypatch.setitem(sys.modules, "wandb", Module)
    run = Fake()
    tracker = WandbTracker(tmp_path, upload_images=True, run=run)
    tracker.image(1, 2, 0, "original", torch.zeros(3, 4, 5))
    [((content,), _)] = run.named("log")
    image = content["original/client_2/sample_0"]
    assert image == ("image", (4, 5, 3), "uint8") and content["server_round"] == 1


@pytest.mark.parametrize(
    ("tracker", "module", "extra"),
    [
        (TensorBoardTracker, "torch.utils.tensorboard", "tensorboard"),
        (WandbTracker, "wandb", "wandb"),
    ],
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, tracker, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'flwr-leakage\[{extra}\]'"):
        tracker(tmp_path)


def test_a_mistyped_mode_is_named(tmp_path):
    with pytest.raises(
        ValueError, match="mode must be 'online', 'offline' or 'disabled', got 'of'"
    ):
        WandbTracker(tmp_path, mode="of", run=Fake())
