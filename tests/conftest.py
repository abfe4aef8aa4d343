import gc
import os

import jaxtyping
import numpy as np
import pytest
import torch

os.environ["FLWR_LEAKAGE_OFFLINE"] = "1"  # no test fetches the backbone of LPIPS, in any process


def pytest_collection_finish():
    """What is imported by now stays: half a million objects that no collection need look at.

    Flower collects garbage after each array that it reads, a quarter of a second each time.
    """
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread_and_no_seed_from_outside():
    torch.set_num_threads(1)


@pytest.fixture
def unchecked(monkeypatch):
    """No types of calls are checked: for wrong arguments that the code itself refuses."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def tiny_data(tmp_path):
    """An npz data set of 60 training and 20 test images, 8×8, four classes."""
    draws = np.random.default_rng(0)
    for part, count in (("train", 60), ("test", 20)):
        images = draws.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        labels = np.arange(count, dtype=np.int64) % 4
        np.savez(tmp_path / f"tiny_{part}.npz", images=images, labels=labels)
    return tmp_path
