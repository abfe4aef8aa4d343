import gc
import os
import sys

# Before NumPy and torch are imported, in every process of a test: cores are shared by workers,
# and threads of one that wait for work keep another from its own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest
import torch
from audits import write_tiny_data

os.environ["FLWR_LEAKAGE_OFFLINE"] = "1"  # no test fetches the backbone of LPIPS, in any process


def pytest_collection_finish():
    """What is imported by now stays: half a million objects that no collection need look at.

    Flower collects garbage after each array that it reads, a quarter of a second each time.
    """
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Hostile folders come first: their limit of memory counts what the forked worker holds."""
    items.sort(key=lambda item: "test_hostile_folders" not in item.nodeid)


@pytest.fixture(autouse=True)
def _one_thread_and_no_seed_from_outside():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_was_compiled_before():
    """A capture sees less in a process that has compiled a model, as other tests do."""
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


@pytest.fixture
def unchecked(monkeypatch):
    """No types of calls are checked: for wrong arguments that the code itself refuses."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def tiny_data(tmp_path):
    """The folder of the data set that tiny audits train on."""
    return write_tiny_data(tmp_path)
