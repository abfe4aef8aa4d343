"""Store the numbers of a run in a folder that stays readable after a crash, and show them in live
views.

``TensorBoardTracker``, ``WandbTracker`` and ``MlflowTracker`` are imported from modules of their
own, as each needs packages that only an extra of this package installs.
"""

from flwr_leakage.tracking.guarded import GuardedTracker
from flwr_leakage.tracking.jsonl import JsonlTracker
from flwr_leakage.tracking.lines import ImageRecord, TextRecord, schema
from flwr_leakage.tracking.metadata import write_metadata
from flwr_leakage.tracking.run_data import RunData, read_run
from flwr_leakage.tracking.tracker import CompositeTracker, KeepsTexts, Tracker

__all__ = [
    "CompositeTracker",
    "GuardedTracker",
    "ImageRecord",
    "JsonlTracker",
    "KeepsTexts",
    "RunData",
    "TextRecord",
    "Tracker",
    "read_run",
    "schema",
    "write_metadata",
]
