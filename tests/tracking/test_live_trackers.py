import math
import sys
from types import SimpleNamespace

import pytest
import torch

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.tracking.mlflow import MlflowTracker
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
    missing = [(1, None), (1, math.nan), (1, math.inf)]
    for server_round, value in [(1, 10.0), (1, 30.0), *missing, (1, 12.0), (2, 5.0)]:
        tracker.log(psnr(server_round, value))
    tracker.log(LeakageRecord("r", 2, 0, 0, "score", "psnr", 4.0))
    tracker.event(RunEvent("r", 2, 4, "error", "no reply"))
    tracker.image(2, 4, 0, "original", torch.full((1, 2, 2), 2.0))
    tracker.close()
    scalars = [arguments for arguments, _ in writer.named("add_scalar")]
    assert scalars == [("metric/psnr", 12.0, 1), ("metric/psnr", 5.0, 2), ("score/psnr", 4.0, 2)]
    assert writer.named("add_text") == [(("error", "client 4: no reply", 2), {})]
    [((tag, pixels, server_round), _)] = writer.named("add_image")
    assert (tag, server_round) == ("original/client_4/sample_0", 2)
    assert pixels.shape == (2, 2, 1) and pixels.max() == 255
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


class FakeMlflow(Fake):
    """An ``MlflowClient`` that knows no experiment yet."""

    def get_experiment_by_name(self, name):
        return None

    def create_run(self, experiment_id, run_name):
        self.calls.append(("create_run", (), {"run_name": run_name}))
        return SimpleNamespace(info=SimpleNamespace(run_id="7"))


def test_mlflow_gets_the_median_of_each_round_and_counts_of_events(tmp_path):
    client = FakeMlflow()
    tracker = MlflowTracker(tmp_path / "demo", client=client)
    for server_round, value in [(1, 10.0), (1, 30.0), (1, 12.0), (2, 5.0)]:
        tracker.log(psnr(server_round, value))
    tracker.event(RunEvent("r", 2, 4, "error", "a secret in a message"))
    tracker.image(2, 0, 0, "original", torch.zeros(1, 2, 2))
    tracker.close()
    assert client.named("create_run") == [((), {"run_name": "demo"})]
    assert client.named("log_metric") == [
        (("7", "metric/psnr", 12.0), {"step": 1}),
        (("7", "metric/psnr", 5.0), {"step": 2}),
        (("7", "events/error", 1.0), {"step": 2}),
    ]
    assert client.calls[-1][0] == "set_terminated" and "secret" not in str(client.calls)
    assert client.named("log_image") == []


def test_mlflow_itself_keeps_what_it_was_sent(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    tracker = MlflowTracker(tmp_path, upload_images=True)
    tracker.log(psnr(1, 10.0))
    tracker.log(psnr(3, 20.0))
    tracker.image(3, 0, 0, "original", torch.rand(3, 4, 4))
    tracker.close()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("flwr-leakage")
    [run] = client.search_runs([experiment.experiment_id])
    kept = client.get_metric_history(run.info.run_id, "metric/psnr")
    assert [(m.step, m.value) for m in kept] == [(1, 10.0), (3, 20.0)]
    assert run.info.status == "FINISHED"
    [image] = client.list_artifacts(run.info.run_id, "original")
    assert image.path == "original/round_3_client_0_sample_0.png"


def test_tensorboard_itself_keeps_what_it_was_sent(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    tracker.log(psnr(1, 10.0))
    tracker.log(psnr(3, 20.0))
    tracker.close()
    written = EventAccumulator(str(tmp_path)).Reload()
    assert [(s.step, s.value) for s in written.Scalars("metric/psnr")] == [(1, 10.0), (3, 20.0)]


def test_wandb_itself_takes_what_it_is_sent(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    tracker = WandbTracker(tmp_path, mode="offline", upload_images=True)
    tracker.log(psnr(1, 10.0))
    tracker.image(1, 0, 0, "original", torch.rand(3, 4, 4))
    tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize(
    ("tracker", "module", "extra"),
    [
        (TensorBoardTracker, "torch.utils.tensorboard", "tensorboard"),
        (WandbTracker, "wandb", "wandb"),
        (MlflowTracker, "mlflow.tracking", "mlflow"),
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
